"""Tokens per second and per step of plain, greedy and relaxed decoding beside transformers.generate, on the CPU.

    python benchmarks/night.py --quick --json night.json

All systems live in this process, hold the same float32 weights, use the same threads and answer the same held-out
prompts in turn; what is compared is the ratio within one repetition. Beside it stands what a pool of 15,000
descriptions costs to build and to draft from. Figures are reported, not judged: the exit code is 0 whether they are met
or not.
"""

import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from common import (
    DEFAULT_MODEL,
    SAMPLE_MODEL,
    Figure,
    Spread,
    begin,
    benchmark_parser,
    existing,
    finish,
    scale_of,
    turns,
)
from systems import MAX_DRAFT_TOKENS, MIN_ACCEPTANCE, EngineSystem, Pass, TransformersGenerate, load_engine
from tasks import GOODREADS_PROMPT, Task, TaskSize, build, chat_ids, own_texts, tasks_of

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.retrieval_pools.calibration.replay import DraftOptions, ReplayText, pool_steps, replay
from laserbatch.retrieval_pools.index.pool import Pool

logger = logging.getLogger("benchmarks")

BATCHES = (1, 16)
LEAST_TOKENS_PER_STEP = {"reki": 7.0, "goodreads-items": 4.0}
LEAST_SPEEDUP_AT_BATCH_1 = {"reki": 3.0, "goodreads-items": 2.0}
MOST_REPLAY_ERROR = 2.0  # percent
NUM_BIG_POOL, NUM_BIG_HELD_OUT = 15_000, 150
BIG_MIN_ACCEPTANCE = 1e-3  # low enough for full trees; a run cuts earlier and drafts faster


@dataclass(frozen=True)
class Scale:
    """How much is measured: prompts by batch, texts in the pools, repetitions; more of them where they are short."""

    long_prompts: dict[int, int]
    short_prompts: dict[int, int]
    num_long_pool: int
    num_short_pool: int
    num_repetitions: int
    min_seconds: float  # of all repetitions of one task at one batch size


FULL = Scale(
    {1: 8, 16: 32}, {1: 32, 16: 128}, num_long_pool=200, num_short_pool=1000, num_repetitions=5, min_seconds=30
)
QUICK = Scale({1: 4, 16: 16}, {1: 4, 16: 32}, num_long_pool=100, num_short_pool=500, num_repetitions=2, min_seconds=8)
SMOKE = Scale({1: 1, 16: 2}, {1: 1, 16: 2}, num_long_pool=4, num_short_pool=4, num_repetitions=1, min_seconds=0)


def measure(systems: dict[str, object], task: Task, batch: int, num_prompts: int, scale: Scale) -> dict[str, list]:
    """Passes of every system over the same prompts, in turns."""
    prompts = task.held_out[:num_prompts]
    passes: dict[str, list[Pass]] = {name: [] for name in systems}
    for system in systems.values():
        system.run(prompts[:1], batch, 16)  # compiles and touches everything once
    start_s = time.perf_counter()
    for repetition, order in enumerate(turns(list(systems))):
        if repetition >= scale.num_repetitions and time.perf_counter() - start_s >= scale.min_seconds:
            return passes
        for name in order:
            passes[name].append(systems[name].run(prompts, batch, task.max_new_tokens))


def row_of(system: str, task: str, batch: int, passes: dict[str, list[Pass]]) -> dict:
    """What the passes of one system say, beside the others'."""
    own = passes[system]
    speed = Spread.of([one.tokens_per_s for one in own])
    plain_texts = passes["plain"][0].texts
    return {
        "system": system,
        "task": task,
        "batch": batch,
        "tokens_per_s": speed.median,
        "tokens_per_s_min": speed.min,
        "tokens_per_s_max": speed.max,
        "tokens_per_step": own[0].tokens_per_step,
        "num_texts": len(own[0].texts),
        "num_tokens": own[0].num_tokens,
        "num_texts_as_plain": sum(text == plain for text, plain in zip(own[0].texts, plain_texts, strict=True)),
        "num_repetitions": len(own),
        "ratio_to_plain": _ratios(own, passes["plain"]),
        "ratio_to_transformers": _ratios(own, passes["transformers-generate"]),
        "max_draft_tokens": MAX_DRAFT_TOKENS if system in ("greedy", "relaxed") else 0,
    }


def _ratios(passes: list[Pass], peers: list[Pass]) -> Spread:
    return Spread.of([one.tokens_per_s / peer.tokens_per_s for one, peer in zip(passes, peers, strict=True)])


def replayed_accepted(pool: Pool, task: Task, plain: Pass) -> float:
    """Accepted tokens of a step that a replay of plain texts on the pool predicts: what `pools simulate` counts by."""
    prompts = task.held_out[: len(plain.texts)]
    texts = [ReplayText(p, np.array(text, np.int32)) for p, text in zip(prompts, plain.texts, strict=True)]
    return replay(pool, texts, DraftOptions(MAX_DRAFT_TOKENS, MIN_ACCEPTANCE, use_previous=False)).mean_accepted


def figures_of(rows: list[dict]) -> list[Figure]:
    """What the rows say about the figures that were asked for."""
    figures = []
    for row in rows:
        where = f"{row['model']}, {row['task']}, batch {row['batch']}"
        if row["system"] == "plain" and row["batch"] == 16:
            ratio = row["ratio_to_transformers"].median
            figures.append(Figure.at_least(f"{where}: plain over transformers-generate, tokens per second", ratio, 1.0))
        if row.get("replayed_accepted"):
            error = 100 * abs(row["replayed_accepted"] / row["accepted_per_step"] - 1)
            name = f"{where}: greedy, accepted tokens that replays of plain texts predict, error in percent"
            figures.append(Figure.at_most(name, error, MOST_REPLAY_ERROR))
        if row["system"] != "relaxed":
            continue
        if row["batch"] == 16 and (wanted := LEAST_TOKENS_PER_STEP.get(row["task"])):
            figures.append(Figure.at_least(f"{where}: relaxed, tokens per step", row["tokens_per_step"], wanted))
        if row["batch"] == 1 and (wanted := LEAST_SPEEDUP_AT_BATCH_1.get(row["task"])):
            ratio = row["ratio_to_plain"].median
            figures.append(Figure.at_least(f"{where}: relaxed over plain, tokens per second", ratio, wanted))
    return figures


def measure_model(model_dir: Path, data: Path, cache: Path, scale: Scale, num_threads: int) -> list[dict]:
    """All rows of one model."""
    engines = {batch: load_engine(model_dir, batch, num_threads) for batch in BATCHES}
    peer = TransformersGenerate.load(model_dir)
    long = TaskSize(max(scale.long_prompts.values()), scale.num_long_pool)
    short = TaskSize(max(scale.short_prompts.values()), scale.num_short_pool)
    rows = []
    for task in tasks_of(model_dir, data, engines[16].tokenizer, long, short):
        with tempfile.TemporaryDirectory() as folder:
            pool = build(own_texts(engines[16], task, cache), Path(folder) / "pool", task.side)
            num_prompts = scale.long_prompts if task.is_long else scale.short_prompts
            for batch, engine in engines.items():
                systems = {
                    "transformers-generate": peer,
                    "plain": EngineSystem.of_pool(engine, None, "greedy"),
                    "greedy": EngineSystem.of_pool(engine, pool, "greedy"),
                    "relaxed": EngineSystem.of_pool(engine, pool, "relaxed"),
                }
                logger.info("%s: batch %d", task.name, batch)
                passes = measure(systems, task, batch, num_prompts[batch], scale)
                found = [{"model": model_dir.name, **row_of(name, task.name, batch, passes)} for name in systems]
                if batch == max(BATCHES):
                    greedy = passes["greedy"][0]
                    found[2]["accepted_per_step"] = greedy.num_accepted / greedy.num_steps
                    found[2]["replayed_accepted"] = replayed_accepted(pool, task, passes["plain"][0])
                rows += found
    return rows


def measure_big_pool(engine: Engine, data: Path) -> tuple[dict, list[Figure]]:
    """Build time of a pool of 15,000 descriptions, and draft times along descriptions left out of it.

    Texts are those published with goodreads, in the tokens of the engine's model. Compilation is done before.
    """
    knowledge = pq.read_table(data / "goodreads" / "item_knowledge.parquet").to_pylist()
    knowledge = knowledge[: NUM_BIG_POOL + NUM_BIG_HELD_OUT]
    titles = pq.read_table(data / "goodreads" / "items.parquet").to_pydict()
    titles = dict(zip(titles["item_id"], titles["title"], strict=True))
    tokenizer = engine.tokenizer
    texts = [np.asarray(tokenizer(row["text"], add_special_tokens=False).input_ids, np.int32) for row in knowledge]
    held_out = [
        ReplayText(chat_ids(tokenizer, GOODREADS_PROMPT.format(title=titles[row["item_id"]])), text)
        for row, text in zip(knowledge[NUM_BIG_POOL:], texts[NUM_BIG_POOL:], strict=True)
    ]
    options = DraftOptions(max_nodes=MAX_DRAFT_TOKENS, min_acceptance=BIG_MIN_ACCEPTANCE)
    with tempfile.TemporaryDirectory() as folder:
        replay(build(texts[:50], Path(folder) / "warm-up", "item"), held_out[:1], options)
        start_s = time.perf_counter()
        pool = build(texts[:NUM_BIG_POOL], Path(folder) / "pool", "item")
        build_s = time.perf_counter() - start_s
        steps = [step for text in held_out for step in pool_steps(pool, text, options)]
    draft_us = Spread.of([step.draft_us for step in steps])
    measured = {
        "num_texts": NUM_BIG_POOL,
        "num_tokens": sum(map(len, texts[:NUM_BIG_POOL])),
        "build_s": build_s,
        "max_draft_tokens": MAX_DRAFT_TOKENS,
        "num_drafts": len(steps),
        "draft_us": draft_us,
        "mean_num_drafted": float(np.mean([len(step.tree) for step in steps])),
        "mean_num_accepted": float(np.mean([len(step.path) for step in steps])),
    }
    return measured, [
        Figure.under(f"pool of {NUM_BIG_POOL:,} descriptions, build, seconds", build_s, 5.0),
        Figure.under(f"draft of {MAX_DRAFT_TOKENS} tokens from it, median, microseconds", draft_us.median, 60.0),
    ]


def describe_rows(rows: list[dict]) -> str:
    """The rows as a table for a terminal."""
    head = f"{'model':14}{'task':17}{'batch':>6}  {'system':23}{'tokens/s':>9}{'per step':>13}{'texts':>7}  over plain"
    lines = [
        f"{row['model']:14}{row['task']:17}{row['batch']:6}  {row['system']:23}{row['tokens_per_s']:9.0f}"
        f"{row['tokens_per_step']:13.2f}{row['num_texts']:7}  {row['ratio_to_plain']}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = benchmark_parser(__doc__, "data", "threads", "cache")
    default = [DEFAULT_MODEL, SAMPLE_MODEL]
    parser.add_argument("--model", type=Path, nargs="+", default=default, help="model folders")
    arguments = parser.parse_args()
    begin(arguments.threads)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    rows, big_pool = [], None
    for model_dir in existing(arguments.model):
        rows += measure_model(model_dir, arguments.data, arguments.cache, scale, arguments.threads)
    figures = figures_of(rows)
    if (arguments.data / "goodreads").is_dir() and arguments.model[0].is_dir() and arguments.size != "smoke":
        big_pool, pool_figures = measure_big_pool(load_engine(arguments.model[0], 1, arguments.threads), arguments.data)
        figures += pool_figures
    finish(arguments.json, figures, [describe_rows(rows)], {"rows": rows, "big_pool": big_pool})


if __name__ == "__main__":
    main()
