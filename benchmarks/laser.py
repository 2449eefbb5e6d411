"""LASER's experiments repeated (Xi et al., SIGIR 2025), each compared with the paper's result.

    python benchmarks/laser.py --quick --json OUT

    a  knowledge under different samplings (the paper's Table 1): AUC with texts of greedy decoding, of relaxed
       verification, and sampled at two temperatures, compared with AUC without texts
    b  one pool, random groups, routed groups, under greedy and relaxed verification (Table 3)
    c  verification by rank (top-k), probability (top-p) and both (Figure 6): speed, lengths, share equal to plain texts
    d  features as vectors, as cluster codes, as both (Table 5)
    e  the time of a night besides its forwards: drafting, grouping, pools (Table 6)

In b and c the measuring model answers held-out prompts, with all systems in turns under one budget, so that only pools
or rules differ. In a, d and e the bundled model writes nights of the sample world, whose ratings judge the texts.
README.md says how to read the tables.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from common import SAMPLE_MODEL, Figure, Spread, begin, benchmark_parser, finish, scale_of, table
from engine_passes import Amount, Repetitions, measure, ratios
from engine_pools import pools_of, unseen_prompts
from engine_systems import PLAIN, WITH_POOL, Contestant, Engines, drafting
from laser_nights import auc_rows, texts_of, write_nights
from systems import EngineSystem, Pass
from tasks import TaskSize, tasks_of

from laserbatch.pipeline.decoding.settings import Budget

OURS = "preference"  # one pool, in which the texts of the entity's group count more
POOLS = ("global", "random", "group", OURS)  # the paper's GRP, RRP and CRP, and ours
RULES = {"top-1": "greedy", "top-k": "top_k", "top-p": "probability", "relaxed": "relaxed"}  # k = 2, p = 0.1
OF_OURS = [(OURS, rule) for rule in RULES]
ALONE = [*((pool, rule) for pool in POOLS[:-1] for rule in ("top-1", "relaxed")), *OF_OURS]
BUDGET = Budget(32, 0.07)
BATCH = 16  # batch size of the rows that are not measured at batch 1
MAX_NEW_TOKENS = 1024  # the paper's limit: it exposes texts that do not end
LONG, SHORT = "long answers", "descriptions"
MARGIN = 0.005  # the demo's equivalence margin of AUC


@dataclass(frozen=True)
class Scale:
    """Both tasks' prompts at batch 1, prompts in batches and pool texts; repetitions; users and seeds of nights."""

    long: tuple[int, int, int]
    short: tuple[int, int, int]
    num_repetitions: int
    num_users: int
    num_seeds: int


FULL = Scale((6, 32, 200), (24, 96, 1000), 3, 300, 4)
QUICK = Scale((2, 16, 60), (8, 48, 300), 2, 100, 2)
SMOKE = Scale((1, 2, 20), (2, 4, 20), 1, 30, 2)


def decoding_rows(model: Path, data: Path, cache: Path, scale: Scale) -> Iterator[dict]:
    """The rows of b and c: each pool and rule at batch 1, as in the paper, and our pool with each rule in batches."""
    engines = Engines(model, "float32", "cpu")
    sizes = [TaskSize(max(alone, batched), num_pool) for alone, batched, num_pool in (scale.long, scale.short)]
    for task in tasks_of(model, data, engines.tokenizer, *sizes):
        with tempfile.TemporaryDirectory() as folder:
            task = unseen_prompts(engines.of_batch(BATCH), task, cache)
            pools = pools_of(engines.of_batch(BATCH), task, cache, Path(folder), POOLS)
            alone, batched, _ = scale.long if task.is_long else scale.short
            for batch, num, pairs in ((1, alone, ALONE), (BATCH, batched, OF_OURS)):
                engine = engines.of_batch(batch)
                systems = [Contestant(PLAIN, None, EngineSystem.plain(engine))]
                for pool, rule in pairs:
                    runner = drafting(engine, pools[pool].pool, WITH_POOL, pools[pool].groups, BUDGET, RULES[rule])
                    systems.append(Contestant(pool, rule, runner, BUDGET))
                amount = Amount(num, scale.num_repetitions, num, scale.num_repetitions)
                passes = measure(systems, task.held_out, batch, MAX_NEW_TOKENS, amount, num_warm_up=1)
                for (pool, rule), own in passes.items():
                    row = {"task": LONG if task.is_long else SHORT, "batch": batch, "pool": pool, "rule": rule}
                    yield row | compared(own, passes[PLAIN, None])


def compared(own: Repetitions, plain: Repetitions) -> dict:
    """The values of passes, compared with plain decoding; steps and texts are the same in every repetition."""
    joined, others = ([Pass.joined(parts) for parts in passes] for passes in (own, plain))
    first, num_texts = joined[0], len(joined[0].texts)
    return {
        "num_texts": num_texts,
        "aal": first.num_accepted / first.num_steps,
        "tokens_per_step": first.tokens_per_step,
        "retrieval_ms": 1e3 * Spread.of([run.drafting_s / num_texts for run in joined]).median,  # per text
        "retrieval_share": Spread.of([run.drafting_s / run.wall_s for run in joined]).median,
        "tokens_per_s": Spread.of([run.tokens_per_s for run in joined]),
        "speed": Spread.of(ratios(own, plain)),
        "time": Spread.of([run.wall_s / other.wall_s for run, other in zip(joined, others, strict=True)]),
        "mean_length": first.num_tokens / num_texts,
        "length": first.num_tokens / others[0].num_tokens,
        "share_cut": sum(count >= MAX_NEW_TOKENS for count in first.text_tokens) / num_texts,
        "share_as_plain": sum(map(np.array_equal, first.texts, others[0].texts)) / num_texts,
    }


def pools_figures(rows: Sequence[dict]) -> Iterator[Figure]:
    """Figures of b against the paper's on users' texts (ML-10M): ours are long answers at batch 1."""
    at = {(row["task"], row["pool"], row["rule"]): row for row in rows}
    one_pool, routed, random = (at[LONG, pool, "top-1"] for pool in ("global", "group", "random"))
    relaxed_one, relaxed = (at[LONG, pool, "relaxed"] for pool in ("global", "group"))
    for name, papers, own, other, wanted in (
        ("aal", "accepted, one pool over routed groups (paper 1.13)", one_pool, routed, 1),
        ("aal", "accepted, routed over random groups (1.02)", routed, random, 1),
        ("aal", "accepted, relaxed over greedy, routed groups (1.37)", relaxed, routed, 1),
        ("retrieval_ms", "time to retrieve, one pool over routed groups (8.4)", one_pool, routed, 2),
    ):
        yield Figure.at_least(f"b: {papers}", own[name] / other[name], wanted)
    for papers, own, other in (("greedy (1.44)", routed, one_pool), ("relaxed (1.93)", relaxed, relaxed_one)):
        gain = own["speed"].median / other["speed"].median
        yield Figure.at_least(f"b: speed, routed groups over one pool, {papers}", gain, 1)
    for papers, row, wanted in (
        ("one pool, greedy: ReSD (1.5 to 2.5)", one_pool, 1.5),
        ("routed groups, relaxed: LASER (3.86 to 4.92)", relaxed, 3.86),
        ("ours (the same)", at[LONG, OURS, "relaxed"], 3.86),
        ("LASER on descriptions (2.14 to 3.28)", at[SHORT, "group", "relaxed"], 2.14),
    ):
        yield Figure.at_least(f"b: speed over plain, {papers}", row["speed"].median, wanted)


def rules_figures(rows: Sequence[dict]) -> Iterator[Figure]:
    """Figures of c: speeds at batch 1, and lengths in batches, which have more texts."""
    speed = {row["rule"]: row["tokens_per_s"].median for row in rows if (row["task"], row["batch"]) == (LONG, 1)}
    for rule in ("top-k", "top-p", "relaxed"):
        yield Figure.at_least(f"c: tokens a second, {rule} over top-1 (paper > 1)", speed[rule] / speed["top-1"], 1)
    yield Figure.at_least("c: tokens a second, relaxed over top-k (alike)", speed["relaxed"] / speed["top-k"], 0.9)
    for task in (LONG, SHORT):
        length = {row["rule"]: row["length"] for row in rows if (row["task"], row["batch"]) == (task, BATCH)}
        yield Figure.at_least(f"c: {task}, length, top-k over plain (far above 1)", length["top-k"], 1.2)
        strays = abs(length["relaxed"] - 1)
        yield Figure.at_most(f"c: {task}, length, relaxed over plain (alike), from 1", strays, 0.1)


def texts_figures(part: str, gains: str, differences: str, rows: Sequence[dict]) -> Iterator[Figure]:
    """Figures of a and d, by the bounds of intervals: texts help, and differ from greedy ones by at most the margin."""
    for row in rows[1:]:
        name = f"{part}: AUC, {row['texts']} as {row['form']}"
        yield Figure.at_least(f"{name} over none (paper {gains}), least of the interval", row["over_none"].low, 0)
        if row["texts"] != "greedy":
            most = max(-row["over_greedy"].low, row["over_greedy"].high)
            yield Figure.at_most(f"{name} from greedy ({differences}), most of the interval", most, MARGIN)


def forms_figures(rows: Sequence[dict]) -> Iterator[Figure]:
    yield from texts_figures("d", "0.004 to 0.006", "0.0004", rows)
    gain = {row["form"]: row["over_none"].value for row in rows if row["texts"] == "greedy"}
    yield Figure.at_least("d: AUC, codes over vectors (0.0013)", gain["codes"] - gain["vectors"], 0)


def nights_figures(rows: Sequence[dict]) -> Iterator[Figure]:
    at = {row["night"]: row for row in rows}
    for name, papers in (("resd", 0.012), ("laser", 0.0035)):
        share = (at[name]["grouping_s"] + at[name]["pools_s"]) / at[name]["generation_s"]
        yield Figure.at_most(f"e: {name}, grouping and pools over generation (paper {papers})", share, 0.05)
    share = at["laser"]["pools_s"] / at["resd"]["pools_s"]
    yield Figure.at_most("e: time of pools, laser over resd (0.13)", share, 0.5)
    for name, papers in (("resd", 0.73), ("laser", 0.31)):
        share = at[name]["generation_s"] / at["vanilla"]["generation_s"]
        yield Figure.at_most(f"e: {name}, generation over plain generation ({papers})", share, 1)


AUC = {name: f"{{{name}[auc_mean]:.4f}} ±{{{name}[auc_std]:.3f}}" for name in ("din", "dcnv2", "gbdt")}
OVER = {
    f"over {name}": f"{{over_{name}.value:+.4f}} ({{over_{name}.low:+.4f}} to {{over_{name}.high:+.4f}})"
    for name in ("none", "greedy")
}
COLUMNS = {  # headings and format strings of each part's table
    "a": {"texts": "{texts}"} | AUC | OVER | {
        "tokens": "{mean_tokens:.0f}", "as greedy": "{share_as_greedy:.0%}", "cosine": "{cosine:.2f}"
    },
    "b": {
        "texts": "{task}", "pool": "{pool}", "rule": "{rule}", "AAL": "{aal:.2f}", "retrieval ms": "{retrieval_ms:.1f}",
        "share": "{retrieval_share:.1%}", "tokens/s over plain": "{speed}",
    },
    "c": {
        "texts": "{task}", "batch": "{batch}", "rule": "{rule}", "per step": "{tokens_per_step:.2f}",
        "tokens": "{mean_length:.0f}", "over plain": "{length:.2f}", "cut": "{share_cut:.0%}",
        "as plain": "{share_as_plain:.0%}", "tokens/s over plain": "{speed}", "time over plain": "{time}",
    },
    "d": {"texts": "{texts}", "as": "{form}"} | AUC | OVER,
    "e": {
        "night": "{night}", "texts": "{num_texts}", "per step": "{tokens_per_step:.2f}",
        "writing": "{generation_s:.2f} s", "drafting": "{drafting_s:.2f} ({drafting_share:.1%})",
        "grouping": "{grouping_s:.2f} ({grouping_share:.1%})",
        "building pools": "{pools_s:.2f} ({pools_share:.1%})",
    },
}  # fmt: skip


def page_part(part: str, rows: Sequence[dict], figures: Sequence[Figure]) -> str:
    """A part's table, and below it whether each figure agrees with the paper."""
    blank = {"mean_tokens": 0, "share_as_greedy": 0, "cosine": 0}
    unmet = {True: "NOT SHOWN", False: "DISAGREES"}
    verdicts = ["agrees" if figure.met else unmet[figure.name.endswith("of the interval")] for figure in figures]
    judged = zip(verdicts, figures, strict=True)
    lines = (f"{verdict}: {figure.name}: {figure.measured:.4g}" for verdict, figure in judged)
    return "\n".join([f"Part {part}", "", table([blank | row for row in rows], COLUMNS[part]), "", *lines])


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = benchmark_parser(__doc__, "model", "data", "threads", "cache").parse_args()
    begin(arguments.threads)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    model = arguments.model if arguments.model.is_dir() else SAMPLE_MODEL
    decoded = list(decoding_rows(model, arguments.data, arguments.cache, scale))
    with tempfile.TemporaryDirectory(prefix="laserbatch-laser-") as folder:
        nights, overhead = write_nights(Path(folder), scale.num_users)
        judged = auc_rows(nights["ours"], texts_of(nights, Path(folder)), scale.num_seeds, MARGIN)
    parts = {
        "a": ([row for row in judged if row["form"] == "both"], partial(texts_figures, "a", "0.018 to 0.021", "0.001")),
        "b": ([row for row in decoded if row["batch"] == 1 and row["rule"] in ("top-1", "relaxed")], pools_figures),
        "c": ([row for row in decoded if row["pool"] == OURS], rules_figures),
        "d": ([row for row in judged if not row["texts"].startswith("sampled")], forms_figures),
        "e": (overhead, nights_figures),
    }
    figures = {part: list(figures_of(rows)) for part, (rows, figures_of) in parts.items()}
    tables = [page_part(part, rows, figures[part]) for part, (rows, _) in parts.items()]
    content = {"model": model.name, **{part: rows for part, (rows, _) in parts.items()}}
    finish(arguments.json, [figure for of_part in figures.values() for figure in of_part], tables, content)


if __name__ == "__main__":
    main()
