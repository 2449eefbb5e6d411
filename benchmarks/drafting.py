"""How well and how fast our pools draft, beside Arctic's SuffixDecoding and others; no model runs here.

    python benchmarks/drafting.py --quick --json drafting.json

Texts that an LLM wrote are replayed against every drafter, text by text in turns. AAL is the mean number of accepted
draft tokens of a step; the bonus token is not counted. Times that stand alone, beside no peer's, are taken several
times, minutes apart, and the fastest counts: other tenants of a machine only ever add to one. Figures are reported, not
judged: the exit code is 0 whether they are met or not. Owns the order of measuring and the printing; corpora, drafters
and replays are beside it.
"""

import argparse
import gc
import itertools
import logging
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import drafting_arctic
import numpy as np
from command import add_data, add_model, benchmark_parser, finish, scale_of, show_progress
from common import SAMPLE_MODEL, Figure, Spread
from drafting_arctic import Arctic, ArcticGrid
from drafting_corpora import SEED, Corpus, CorpusSize, goodreads_corpus, reki_corpus
from drafting_peers import Ours, PromptLookup, Trie
from drafting_replay import Drafter, Replay, accepted_interval, accepted_ratio, mean_accepted, replay
from drafting_steps import NUM_SEQUENCES, LiveSequence, live_sequences, measure_steps
from transformers import AutoTokenizer

from laserbatch.retrieval_pools.settings import PoolSettings

logger = logging.getLogger("drafting")

MAX_NODES = (16, 32, 64)
LEAST_AAL_OVER_ARCTIC = 1.30
MOST_DRAFT_US = {("goodreads", 32): 30.0}
MOST_STEP_MS = 1.5
STEP_FIGURES = (16, 32)  # sizes of tree at which a step's time was asked for
LEAST_BUILD_MTOKENS_PER_S = 1.0
MOST_BYTES_PER_TOKEN = 10.0


@dataclass(frozen=True)
class Scale:
    """How much is measured. Arctic's options are tried on some of the texts for tuning: there are many.

    Ours are calibrated with as many texts as a pool is by default: 400, or those that have 50,000 tokens.
    """

    reki: CorpusSize
    goodreads: CorpusSize
    arctic_grid: ArcticGrid
    num_arctic_texts: dict[str, int]
    num_steps: int
    min_supports: tuple[int, ...] = ()  # beside 1


ALL = 1 << 30
FULL = Scale(
    CorpusSize(150, 140, ALL),
    CorpusSize(500, 400, ALL),
    ArcticGrid((8, 16, 32), (4, 8, 16, 100), (0, 8), (0.002, 0.005, 0.01, 0.03)),
    {"reki": 40, "goodreads": 150},
    num_steps=300,
    min_supports=(2, 3, 5),
)
QUICK = Scale(
    CorpusSize(40, 140, ALL),
    CorpusSize(150, 400, ALL),
    ArcticGrid((8, 16), (8, 16, 100), (0,), (0.002, 0.005, 0.01)),
    {"reki": 16, "goodreads": 60},
    num_steps=100,
)
SMOKE = Scale(
    CorpusSize(2, 2, 10), CorpusSize(3, 2, 20), ArcticGrid((8,), (8, 100), (0,), (0.01,)),
    {"reki": 1, "goodreads": 1}, num_steps=2, min_supports=(2,),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One drafter's replays of a corpus' held-out texts with trees of `max_nodes` tokens."""

    drafter: Drafter
    max_nodes: int
    replays: list[Replay]

    @property
    def draft_us(self) -> np.ndarray:
        """Microseconds of every draft."""
        return np.concatenate([one.draft_us for one in self.replays])


def measure_corpus(corpus: Corpus, scale: Scale, folder: Path) -> dict[str, list]:
    """Rows, ratios, step times and chosen options of one corpus, and the figures that they give."""
    logger.info("%s: %d texts in the pool, %d held out", corpus.name, len(corpus.pool), len(corpus.held_out))
    Ours(corpus, folder / "warm-up", MAX_NODES[:1])  # compiles
    ours = Ours(corpus, folder / corpus.name, MAX_NODES)
    logger.info("%s: escapes chosen by replay: %s", corpus.name, ours.escapes)
    steady = [ours, PromptLookup()]
    settings = {}
    if drafting_arctic.is_installed():
        settings = drafting_arctic.tuned(corpus, scale.arctic_grid, MAX_NODES, scale.num_arctic_texts[corpus.name])
        logger.info("%s: options of arctic: %s", corpus.name, settings)
    steady.append(Trie(corpus, corpus.pool))
    names = ("figures", "rows", "ratios", "steps", "drafts", "min_support", "settings", "arctic_settings")
    result: dict[str, list] = {name: [] for name in names}
    sequences = live_sequences(corpus.held_out, SEED)
    steps, drafts = [step_rows(corpus, ours, sequences, scale)], [draft_rows(corpus, ours)]
    for k in MAX_NODES:
        arctic = [Arctic(corpus, corpus.pool, settings[k])] if settings else []
        measured = replay_in_turns([*steady, *arctic], corpus, k)
        result["rows"] += [row_of(corpus, one) for one in measured]
        result["rows"] += [] if settings else [missing_row(corpus, k)]
        ratios = [ratio_of(corpus, measured[0], peer) for peer in measured[1:]]
        result["ratios"] += ratios
        result["figures"] += [figure for ratio in ratios for figure in figures_of_ratio(ratio)]
        result["arctic_settings"] += [{"corpus": corpus.name, "k": k, **asdict(settings[k])}] if settings else []
        steps.append(step_rows(corpus, ours, sequences, scale))
        drafts.append(draft_rows(corpus, ours))
    result["steps"], result["drafts"] = fastest_of(steps, "step_ms"), fastest_of(drafts, "draft_us")
    result["min_support"] = support_rows(corpus, ours, scale, folder)
    result["settings"] = [
        {"corpus": corpus.name, "k": k, "pool_escape": escape, "calibration_s": ours.calibration_s}
        for k, escape in ours.escapes.items()
    ]
    result["figures"] += figures_of_ours(corpus, ours, result["drafts"], result["steps"])
    return result


def replay_in_turns(drafters: Sequence[Drafter], corpus: Corpus, max_nodes: int) -> list[Measured]:
    """Every drafter along every held-out text, in all orders: nobody always comes after the one that fills caches."""
    logger.info("%s: trees of %d tokens", corpus.name, max_nodes)
    for drafter in drafters:
        replay(drafter, corpus.tuning[0], max_nodes)
    replays: list[list[Replay]] = [[] for _ in drafters]
    orders = list(itertools.permutations(range(len(drafters))))
    random.Random(SEED).shuffle(orders)
    gc.collect()
    gc.disable()  # millions of the trie's nodes would be walked in the midst of anybody's draft
    try:
        for document, order in zip(corpus.held_out, itertools.cycle(orders), strict=False):
            for place in order:
                replays[place].append(replay(drafters[place], document, max_nodes))
    finally:
        gc.enable()
    return [Measured(drafter, max_nodes, found) for drafter, found in zip(drafters, replays, strict=True)]


def row_of(corpus: Corpus, measured: Measured) -> dict:
    """What the replays of one drafter say."""
    num_drafted = np.concatenate([one.num_drafted for one in measured.replays])
    num_accepted = np.concatenate([one.num_accepted for one in measured.replays])
    aal = accepted_interval(measured.replays, SEED)
    draft_us = measured.draft_us
    return {
        "drafter": measured.drafter.name,
        "corpus": corpus.name,
        "k": measured.max_nodes,
        "num_docs": len(corpus.pool),
        "aal": aal.value,
        "aal_low": aal.low,
        "aal_high": aal.high,
        "drafted": float(num_drafted.mean()),
        "precision": float(num_accepted.sum() / max(1, num_drafted.sum())),
        "median_us": float(np.median(draft_us)),
        "mean_us": float(draft_us.mean()),
        "p99_us": float(np.quantile(draft_us, 0.99)),
        "build_s": measured.drafter.build_s,
        "bytes": measured.drafter.num_bytes,
    }


def missing_row(corpus: Corpus, max_nodes: int) -> dict:
    """The row of a peer that is not installed."""
    return {
        "drafter": Arctic.name,
        "corpus": corpus.name,
        "k": max_nodes,
        "missing": f"not installed: {drafting_arctic.INSTALL}",
    }


def ratio_of(corpus: Corpus, ours: Measured, peer: Measured) -> dict:
    """Ours over a peer, on the same texts."""
    own_us, peer_us = ours.draft_us, peer.draft_us
    aal = accepted_ratio(ours.replays, peer.replays, SEED)
    return {
        "peer": peer.drafter.name,
        "corpus": corpus.name,
        "k": ours.max_nodes,
        "aal": aal.value,
        "aal_low": aal.low,
        "aal_high": aal.high,
        "median_us": float(np.median(own_us) / np.median(peer_us)),
        "mean_us": float(own_us.mean() / peer_us.mean()),
        "p99_us": float(np.quantile(own_us, 0.99) / np.quantile(peer_us, 0.99)),
    }


def step_rows(corpus: Corpus, ours: Ours, sequences: Sequence[LiveSequence], scale: Scale) -> list[dict]:
    """Times of our steps, by size of tree and number of threads."""
    return [
        {"corpus": corpus.name, "k": k, "num_sequences": NUM_SEQUENCES, "num_threads": num_threads, "step_ms": step_ms}
        for k in MAX_NODES
        for num_threads, step_ms in measure_steps(ours.pools[k], sequences, k, scale.num_steps).items()
    ]


def draft_rows(corpus: Corpus, ours: Ours) -> list[dict]:
    """Times of our drafts along all held-out texts, no peer between them; where a time was asked for."""
    rows = []
    for k in MAX_NODES:
        if (corpus.name, k) in MOST_DRAFT_US:
            alone = Measured(ours, k, [replay(ours, document, k) for document in corpus.held_out])
            rows.append({"corpus": corpus.name, "k": k, "draft_us": Spread.of(alone.draft_us.tolist())})
    return rows


def fastest_of(instalments: Sequence[list[dict]], name: str) -> list[dict]:
    """Rows measured again and again: of each the one whose time has the least median, and all medians beside it."""
    return [
        min(again, key=lambda row: row[name].median) | {f"{name}_of_each": [row[name].median for row in again]}
        for again in zip(*instalments, strict=True)
    ]


def support_rows(corpus: Corpus, ours: Ours, scale: Scale, folder: Path) -> list[dict]:
    """What it costs to draft only what several texts hold, every text being of another entity."""
    if not scale.min_supports:
        return []
    k = MAX_NODES[0]
    drafters = {1: ours} | {
        least: Ours(corpus, folder / f"min-support-{least}", [k], PoolSettings(min_support=least))
        for least in scale.min_supports
    }
    measured = replay_in_turns(list(drafters.values()), corpus, k)
    rows = []
    for least, one in zip(drafters, measured, strict=True):
        ratio = accepted_ratio(one.replays, measured[0].replays, SEED)
        row = {"corpus": corpus.name, "k": k, "min_support": least, "aal": mean_accepted(one.replays)}
        rows.append(row | {"of_all": ratio.value, "of_all_low": ratio.low, "of_all_high": ratio.high})
    return rows


def figures_of_ratio(ratio: dict) -> list[Figure]:
    """What was asked for beside Arctic."""
    if ratio["peer"] != Arctic.name:
        return []
    where = f"{ratio['corpus']}, K={ratio['k']}: ours over arctic"
    return [Figure.at_least(f"{where}, AAL", ratio["aal"], LEAST_AAL_OVER_ARCTIC)] + [
        Figure.at_most(f"{where}, {name} microseconds a draft", ratio[f"{name}_us"], 1.0)
        for name in ("median", "mean", "p99")
    ]


def figures_of_ours(corpus: Corpus, ours: Ours, drafts: list[dict], steps: list[dict]) -> list[Figure]:
    """What was asked for of ours alone."""
    figures = []
    for row in drafts:
        where, wanted_us = (
            f"{corpus.name}, {len(corpus.pool):,} texts, K={row['k']}",
            MOST_DRAFT_US[corpus.name, row["k"]],
        )
        figures.append(Figure.at_most(f"{where}: median microseconds a draft", row["draft_us"].median, wanted_us))
    for step in steps:
        if step["k"] in STEP_FIGURES:
            where = f"{corpus.name}, K={step['k']}, {step['num_sequences']} sequences, {step['num_threads']} thread(s)"
            figures.append(Figure.at_most(f"{where}: milliseconds a step", step["step_ms"].median, MOST_STEP_MS))
    num_tokens = corpus.num_pool_tokens
    speed, size = num_tokens / ours.build_s / 1e6, ours.num_bytes / num_tokens
    return [
        *figures,
        Figure.at_least(f"{corpus.name}: million tokens a second built", speed, LEAST_BUILD_MTOKENS_PER_S),
        Figure.at_most(f"{corpus.name}: bytes a token on disk", size, MOST_BYTES_PER_TOKEN),
    ]


def describe_corpus(corpus: Corpus) -> dict:
    """Sizes of a corpus for the JSON."""
    return {
        "corpus": corpus.name,
        "num_docs": len(corpus.pool),
        "num_pool_tokens": corpus.num_pool_tokens,
        "num_held_out": len(corpus.held_out),
        "num_held_out_tokens": sum(len(document.text_ids) for document in corpus.held_out),
        "num_tuning": len(corpus.tuning),
    }


def describe_rows(rows: list[dict]) -> str:
    """The rows as a table for a terminal."""
    head = (
        f"{'corpus':10}{'K':>3}  {'drafter':14}{'AAL':>5} {'(95 %)':14}{'drafted':>7}{'precision':>10}"
        f"{'median us':>10}{'mean':>8}{'p99':>9}{'build s':>8}{'MB':>7}"
    )
    return "\n".join([head, *map(_describe_row, rows)])


def _describe_row(row: dict) -> str:
    start = f"{row['corpus']:10}{row['k']:3}  {row['drafter']:14}"
    if "missing" in row:
        return start + row["missing"]
    interval = f"({row['aal_low']:.2f}-{row['aal_high']:.2f})"
    return (
        f"{start}{row['aal']:5.2f} {interval:14}{row['drafted']:7.1f}{row['precision']:10.3f}"
        f"{row['median_us']:10.1f}{row['mean_us']:8.1f}{row['p99_us']:9.1f}{row['build_s']:8.2f}"
        f"{row['bytes'] / 1e6:7.1f}"
    )


def describe_ratios(ratios: list[dict]) -> str:
    """Ours over each peer as a table for a terminal."""
    head = f"{'corpus':10}{'K':>3}  {'ours over':14}{'AAL':>5} {'(95 %)':14}{'median us':>10}{'mean':>8}{'p99':>9}"
    lines = [
        f"{one['corpus']:10}{one['k']:3}  {one['peer']:14}{one['aal']:5.2f} "
        f"{'({:.2f}-{:.2f})'.format(one['aal_low'], one['aal_high']):14}"
        f"{one['median_us']:10.2f}{one['mean_us']:8.2f}{one['p99_us']:9.2f}"
        for one in ratios
    ]
    return "\n".join([head, *lines])


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(
        __doc__,
        quick="fewer held-out texts: under 5 minutes on 2 cores",
        smoke="a handful of texts: does it run at all",
        writes="rows and figures",
    )
    add_model(parser, "whose tokenizer; absent: the sample model's")
    add_data(parser)
    return parser.parse_args(words)


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = parse_arguments()
    show_progress("drafting")
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    model = arguments.model if arguments.model.is_dir() else SAMPLE_MODEL
    unmeasured = [] if drafting_arctic.is_installed() else [f"beside arctic: {drafting_arctic.INSTALL}"]
    for one in unmeasured:
        logger.warning("unmeasured %s", one)
    tokenizer = AutoTokenizer.from_pretrained(model)
    corpora = [
        reki_corpus(tokenizer, arguments.data, scale.reki),
        goodreads_corpus(tokenizer, arguments.data, scale.goodreads),
    ]
    with tempfile.TemporaryDirectory() as folder:
        parts = [measure_corpus(corpus, scale, Path(folder) / corpus.name) for corpus in corpora]
    content = {name: [one for part in parts for one in part[name]] for name in parts[0]}
    figures = content.pop("figures")
    tables = [
        describe_rows(content["rows"]),
        describe_ratios(content["ratios"]),
        "\n".join(
            f"{row['corpus']}, min_support {row['min_support']}: AAL {row['aal']:.2f}, {row['of_all']:.2f} of all"
            for row in content["min_support"]
        ),
    ]
    described = {"tokenizer": model.name, "corpora": [describe_corpus(corpus) for corpus in corpora]}
    met = not unmeasured and all(figure.met for figure in figures)
    finish(arguments.json, figures, tables, {"met": met, "unmeasured": unmeasured, **content, **described})


if __name__ == "__main__":
    main()
