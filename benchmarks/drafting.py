"""Quality and speed of drafts from our pools, compared with Arctic's SuffixDecoding and others; no model runs.

    python benchmarks/drafting.py --quick --json drafting.json

Texts that an LLM wrote are replayed against every drafter; drafters take turns text by text. AAL is the mean number of
accepted draft tokens per step, without the bonus token. Times that are not compared with a peer's are taken several
times, minutes apart, and the fastest counts: other tenants of the machine can only add time. Figures are only reported:
the exit code is 0 whether they are met or not.
"""

import gc
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from common import (
    SAMPLE_MODEL,
    SEED,
    Figure,
    Interval,
    Spread,
    benchmark_parser,
    finish,
    resampled_totals,
    scale_of,
    show_progress,
    table,
    turns,
)
from corpora import Corpus, CorpusSize, Document, goodreads_corpus, reki_corpus
from drafters import (
    INSTALL_ARCTIC,
    MIN_ACCEPTANCE,
    Arctic,
    ArcticGrid,
    Drafter,
    Ours,
    PromptLookup,
    Replay,
    SuffixDecodingCache,
    Trie,
    replay,
    tuned_arctic,
)
from transformers import AutoTokenizer

from laserbatch.retrieval_pools.draft import DraftOptions, draft_batch
from laserbatch.retrieval_pools.settings import PoolSettings

logger = logging.getLogger("benchmarks")

MAX_NODES = (16, 32, 64)
NUM_SEQUENCES = 64  # per step
NUM_THREADS = (1, 2)
MIN_AAL_OVER_ARCTIC = 1.30
MAX_DRAFT_US = {("goodreads", 32): 30.0}
MAX_STEP_MS = 1.5
STEP_FIGURES = (16, 32)  # tree sizes whose step time has a figure
MIN_BUILD_MTOKENS_PER_S = 1.0
MAX_BYTES_PER_TOKEN = 10.0


@dataclass(frozen=True)
class Scale:
    """The amount of work. Arctic has many options, so they are tried on only some of the texts for tuning.

    Our pools are calibrated with as many texts as a pool is by default: 400 texts, or texts with 50,000 tokens.
    """

    reki: CorpusSize
    goodreads: CorpusSize
    arctic_grid: ArcticGrid
    num_arctic_texts: dict[str, int]
    num_steps: int
    min_supports: tuple[int, ...] = ()  # measured in addition to 1


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
    """One drafter's replays of a corpus' held-out texts, with trees of at most `max_nodes` tokens."""

    drafter: Drafter
    max_nodes: int
    replays: list[Replay]

    @property
    def draft_us(self) -> np.ndarray:
        """Microseconds of every draft."""
        return np.concatenate([replayed.draft_us for replayed in self.replays])


def measure_corpus(corpus: Corpus, scale: Scale, folder: Path) -> dict[str, list]:
    """The rows, ratios, step times and chosen options of one corpus, and its figures."""
    logger.info("%s: %d texts in the pool, %d held out", corpus.name, len(corpus.pool), len(corpus.held_out))
    Ours(corpus, folder / "warm-up", MAX_NODES[:1])  # compiles
    ours = Ours(corpus, folder / corpus.name, MAX_NODES)
    steady, settings = [ours, PromptLookup(), Trie(corpus, corpus.pool)], {}
    if SuffixDecodingCache is not None:
        settings = tuned_arctic(corpus, scale.arctic_grid, MAX_NODES, scale.num_arctic_texts[corpus.name])
        logger.info("%s: options of arctic: %s", corpus.name, settings)
    rows, ratios = [], []
    sequences = live_sequences(corpus.held_out)
    steps, drafts = [step_rows(corpus, ours, sequences, scale)], [draft_rows(corpus, ours)]
    for k in MAX_NODES:
        arctic = [Arctic(corpus, corpus.pool, settings[k])] if settings else []
        measured = replay_in_turns([*steady, *arctic], corpus, k)
        rows += [row_of(corpus, each) for each in measured]
        if not settings:
            missing = f"not installed: {INSTALL_ARCTIC}"
            rows.append({"drafter": Arctic.name, "corpus": corpus.name, "k": k, "missing": missing})
        ratios += [ratio_of(corpus, measured[0], peer) for peer in measured[1:]]
        steps.append(step_rows(corpus, ours, sequences, scale))
        drafts.append(draft_rows(corpus, ours))
    result = {
        "rows": rows,
        "ratios": ratios,
        "steps": fastest_of(steps, "step_ms"),
        "drafts": fastest_of(drafts, "draft_us"),
        "min_support": support_rows(corpus, ours, scale, folder),
        "settings": [
            {"corpus": corpus.name, "k": k, "pool_escape": escape, "calibration_s": ours.calibration_s}
            for k, escape in ours.escapes.items()
        ],
        "arctic_settings": [{"corpus": corpus.name, "k": k, **asdict(chosen)} for k, chosen in settings.items()],
    }
    figures = [figure for ratio in ratios for figure in figures_of_ratio(ratio)]
    return result | {"figures": figures + figures_of_ours(corpus, ours, result["drafts"], result["steps"])}


def replay_in_turns(drafters: Sequence[Drafter], corpus: Corpus, max_nodes: int) -> list[Measured]:
    """Replay every held-out text against every drafter, text by text in turns."""
    logger.info("%s: trees of %d tokens", corpus.name, max_nodes)
    for drafter in drafters:
        replay(drafter, corpus.tuning[0], max_nodes)
    replays: list[list[Replay]] = [[] for _ in drafters]
    gc.collect()
    gc.disable()  # otherwise it walks the trie's millions of nodes in the middle of a draft
    try:
        for document, order in zip(corpus.held_out, turns(range(len(drafters))), strict=False):
            for place in order:
                replays[place].append(replay(drafters[place], document, max_nodes))
    finally:
        gc.enable()
    return [Measured(drafter, max_nodes, replayed) for drafter, replayed in zip(drafters, replays, strict=True)]


def aal_samples(replays: Sequence[Replay]) -> np.ndarray:
    """AAL over the steps of all texts, then of resampled texts: float64[1 + n]."""
    accepted = resampled_totals([sum(replayed.num_accepted) for replayed in replays])
    return accepted / resampled_totals([len(replayed.num_accepted) for replayed in replays])


def aal_ratio(replays: Sequence[Replay], peer: Sequence[Replay]) -> Interval:
    """The AAL divided by a peer's on the same texts; both are resampled together."""
    with np.errstate(divide="ignore", invalid="ignore"):  # if the peer accepted nothing
        return Interval.of(aal_samples(replays) / aal_samples(peer))


def row_of(corpus: Corpus, measured: Measured) -> dict:
    """The row of one drafter."""
    num_drafted = np.concatenate([replayed.num_drafted for replayed in measured.replays])
    num_accepted = np.concatenate([replayed.num_accepted for replayed in measured.replays])
    aal = Interval.of(aal_samples(measured.replays))
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


def ratio_of(corpus: Corpus, ours: Measured, peer: Measured) -> dict:
    """The ratios of our drafter to a peer, on the same texts."""
    own_us, peer_us = ours.draft_us, peer.draft_us
    aal = aal_ratio(ours.replays, peer.replays)
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


def live_sequences(documents: Sequence[Document]) -> tuple[list[np.ndarray], list[int]]:
    """The sequences of a step, which are held-out texts cut at random places, and the length of each one's prompt."""
    rng = np.random.default_rng(SEED)
    chosen = [documents[number % len(documents)] for number in range(NUM_SEQUENCES)]
    begun = [(document.prompt_ids, document.text_ids[: rng.integers(len(document.text_ids))]) for document in chosen]
    return list(map(np.concatenate, begun)), [len(document.prompt_ids) for document in chosen]


def step_rows(corpus: Corpus, ours: Ours, sequences: tuple[list[np.ndarray], list[int]], scale: Scale) -> list[dict]:
    """Times of drafting one step for all sequences in one call, by tree size and by threads; threads take turns."""
    rows = []
    for k in MAX_NODES:
        times: dict[int, list[float]] = {num_threads: [] for num_threads in NUM_THREADS}
        options = DraftOptions(k, MIN_ACCEPTANCE, use_previous=False)
        for _ in range(scale.num_steps):
            for num_threads, durations in times.items():
                start_s = time.perf_counter()
                draft_batch(ours.pools[k], *sequences, options=options, num_threads=num_threads)
                durations.append((time.perf_counter() - start_s) * 1e3)
        row = {"corpus": corpus.name, "k": k, "num_sequences": NUM_SEQUENCES}
        rows += [row | {"num_threads": number, "step_ms": Spread.of(durations)} for number, durations in times.items()]
    return rows


def draft_rows(corpus: Corpus, ours: Ours) -> list[dict]:
    """Times of our drafts along all held-out texts, with no peer in between, for the entries of MAX_DRAFT_US."""
    rows = []
    for name, k in MAX_DRAFT_US:
        if name == corpus.name:
            alone = Measured(ours, k, [replay(ours, document, k) for document in corpus.held_out])
            rows.append({"corpus": name, "k": k, "draft_us": Spread.of(alone.draft_us.tolist())})
    return rows


def fastest_of(instalments: Sequence[list[dict]], name: str) -> list[dict]:
    """Of each repeatedly measured row, the one whose time has the least median, with the medians of all of them."""
    return [
        min(again, key=lambda row: row[name].median) | {f"{name}_of_each": [row[name].median for row in again]}
        for again in zip(*instalments, strict=True)
    ]


def support_rows(corpus: Corpus, ours: Ours, scale: Scale, folder: Path) -> list[dict]:
    """AAL when only continuations in several texts are drafted, by `min_support`; every text is another entity's."""
    if not scale.min_supports:
        return []
    k = MAX_NODES[0]
    drafters = {1: ours} | {
        least: Ours(corpus, folder / f"min-support-{least}", [k], PoolSettings(min_support=least))
        for least in scale.min_supports
    }
    measured = replay_in_turns(list(drafters.values()), corpus, k)
    rows = []
    for least, drafted in zip(drafters, measured, strict=True):
        ratio = aal_ratio(drafted.replays, measured[0].replays)
        row = {"corpus": corpus.name, "k": k, "min_support": least, "aal": float(aal_samples(drafted.replays)[0])}
        rows.append(row | {"of_all": ratio.value, "of_all_low": ratio.low, "of_all_high": ratio.high})
    return rows


def figures_of_ratio(ratio: dict) -> list[Figure]:
    """The figures that compare our drafter with Arctic."""
    if ratio["peer"] != Arctic.name:
        return []
    where = f"{ratio['corpus']}, K={ratio['k']}: ours over arctic"
    return [Figure.at_least(f"{where}, AAL", ratio["aal"], MIN_AAL_OVER_ARCTIC)] + [
        Figure.at_most(f"{where}, {name} microseconds a draft", ratio[f"{name}_us"], 1.0)
        for name in ("median", "mean", "p99")
    ]


def figures_of_ours(corpus: Corpus, ours: Ours, drafts: list[dict], steps: list[dict]) -> list[Figure]:
    """The figures of our drafter alone."""
    figures = []
    for row in drafts:
        name = f"{corpus.name}, {len(corpus.pool):,} texts, K={row['k']}: median microseconds a draft"
        figures.append(Figure.at_most(name, row["draft_us"].median, MAX_DRAFT_US[corpus.name, row["k"]]))
    for step in steps:
        if step["k"] in STEP_FIGURES:
            where = f"{corpus.name}, K={step['k']}, {step['num_sequences']} sequences, {step['num_threads']} thread(s)"
            figures.append(Figure.at_most(f"{where}: milliseconds a step", step["step_ms"].median, MAX_STEP_MS))
    num_tokens = corpus.num_pool_tokens
    speed, size = num_tokens / ours.build_s / 1e6, ours.num_bytes / num_tokens
    return [
        *figures,
        Figure.at_least(f"{corpus.name}: million tokens a second built", speed, MIN_BUILD_MTOKENS_PER_S),
        Figure.at_most(f"{corpus.name}: bytes a token on disk", size, MAX_BYTES_PER_TOKEN),
    ]


def describe_corpus(corpus: Corpus) -> dict:
    """The sizes of a corpus, for the JSON."""
    return {
        "corpus": corpus.name,
        "num_docs": len(corpus.pool),
        "num_pool_tokens": corpus.num_pool_tokens,
        "num_held_out": len(corpus.held_out),
        "num_held_out_tokens": sum(len(document.text_ids) for document in corpus.held_out),
        "num_tuning": len(corpus.tuning),
    }


def describe(content: dict) -> list[str]:
    """Tables for a terminal: all drafters, ours over each peer, and AAL by `min_support`."""
    where = {"corpus": "{corpus}", "K": "{k}"}
    columns = {
        "AAL": "{aal:.2f}", "(95 %)": "({aal_low:.2f}-{aal_high:.2f})", "median us": "{median_us:.2f}",
        "mean": "{mean_us:.2f}", "p99": "{p99_us:.2f}",
    }  # fmt: skip
    more = {"drafted": "{drafted:.1f}", "precision": "{precision:.3f}", "build s": "{build_s:.2f}", "B": "{bytes:,}"}
    supported = {"min_support": "{min_support}", "AAL": "{aal:.2f}", "of all": "{of_all:.2f}"}
    measured = [row for row in content["rows"] if "missing" not in row]
    tables = [
        table(measured, where | {"drafter": "{drafter}"} | columns | more),
        table(content["ratios"], where | {"ours /": "{peer}"} | columns),
    ]
    return tables + ([table(content["min_support"], where | supported)] if content["min_support"] else [])


def main() -> None:
    """Measure, print, and write the JSON; uses only the tokenizer of the model, or of the sample model."""
    arguments = benchmark_parser(__doc__, "model", "data").parse_args()
    show_progress()
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    model = arguments.model if arguments.model.is_dir() else SAMPLE_MODEL
    unmeasured = [] if SuffixDecodingCache is not None else [f"beside arctic: {INSTALL_ARCTIC}"]
    for system in unmeasured:
        logger.warning("unmeasured %s", system)
    tokenizer = AutoTokenizer.from_pretrained(model)
    corpora = [
        reki_corpus(tokenizer, arguments.data, scale.reki),
        goodreads_corpus(tokenizer, arguments.data, scale.goodreads),
    ]
    with tempfile.TemporaryDirectory() as folder:
        parts = [measure_corpus(corpus, scale, Path(folder) / corpus.name) for corpus in corpora]
    content = {name: [row for part in parts for row in part[name]] for name in parts[0]}
    figures = content.pop("figures")
    content |= {"tokenizer": model.name, "corpora": [describe_corpus(corpus) for corpus in corpora]}
    met = not unmeasured and all(figure.met for figure in figures)
    finish(arguments.json, figures, describe(content), {"met": met, "unmeasured": unmeasured, **content})


if __name__ == "__main__":
    main()
