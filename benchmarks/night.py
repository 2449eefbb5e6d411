"""Tokens per second and per step of plain, greedy and relaxed decoding beside transformers.generate, on the CPU.

    python benchmarks/night.py --quick --json night.json

All systems live in this process, hold the same float32 weights, use the same threads and answer the same held-out
prompts in turn; what is compared is the ratio within one repetition. Figures are reported, not judged: the exit code
is 0 whether they are met or not. Owns the measuring loop and the printing; tasks, systems and pools are beside it.
"""

import argparse
import itertools
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from big_pool import measure_big_pool
from command import add_data, add_engine, add_models, benchmark_parser, existing, finish, scale_of, show_progress
from common import DEFAULT_MODEL, SAMPLE_MODEL, Figure, Spread
from night_pools import build, own_texts
from night_systems import MAX_DRAFT_TOKENS, EngineSystem, Pass, TransformersGenerate, load_engine
from night_tasks import Task, TaskSize, goodreads_items_task, reki_task, sample_tasks

logger = logging.getLogger("night")

BATCHES = (1, 16)
LEAST_TOKENS_PER_STEP = {"reki": 7.0, "goodreads-items": 4.0}
LEAST_SPEEDUP_AT_BATCH_1 = {"reki": 3.0, "goodreads-items": 2.0}


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
SMOKE = Scale({1: 1, 16: 2}, {1: 2, 16: 4}, num_long_pool=4, num_short_pool=20, num_repetitions=1, min_seconds=0)


def tasks_of(model_dir: Path, data: Path, tokenizer, scale: Scale) -> list[Task]:
    """The tasks that a model was trained for: the sample model's own, or those of the public data."""
    num_long, num_short = max(scale.long_prompts.values()), max(scale.short_prompts.values())
    if model_dir.resolve() == SAMPLE_MODEL:
        return sample_tasks(tokenizer, TaskSize(num_short, scale.num_long_pool))
    return [
        reki_task(tokenizer, data, TaskSize(num_long, scale.num_long_pool)),
        goodreads_items_task(tokenizer, data, TaskSize(num_short, scale.num_short_pool)),
    ]


def measure(systems: dict[str, object], task: Task, batch: int, num_prompts: int, scale: Scale) -> list[dict]:
    """Rows of one task at one batch size: every system over the same prompts, in rotation."""
    prompts = task.held_out[:num_prompts]
    passes: dict[str, list[Pass]] = {name: [] for name in systems}
    for system in systems.values():
        system.run(prompts[:1], batch, 16)  # compiles and touches everything once
    names = list(systems)
    start_s = time.perf_counter()
    for repetition in itertools.count():
        if repetition >= scale.num_repetitions and time.perf_counter() - start_s >= scale.min_seconds:
            break
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            passes[name].append(systems[name].run(prompts, batch, task.max_new_tokens))
    return [_row(name, task.name, batch, passes) for name in names]


def _row(system: str, task: str, batch: int, passes: dict[str, list[Pass]]) -> dict:
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


def figures_of(rows: list[dict]) -> list[Figure]:
    """What the rows say about the figures that were asked for."""
    figures = []
    for row in rows:
        where = f"{row['model']}, {row['task']}, batch {row['batch']}"
        if row["system"] == "plain" and row["batch"] == 16:
            ratio = row["ratio_to_transformers"].median
            figures.append(Figure.at_least(f"{where}: plain over transformers-generate, tokens per second", ratio, 1.0))
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
    rows = []
    for task in tasks_of(model_dir, data, engines[16].tokenizer, scale):
        with tempfile.TemporaryDirectory() as folder:
            pool = build(own_texts(engines[16], task, cache), Path(folder) / "pool", engines[16], task.side)
            num_prompts = scale.long_prompts if task.is_long else scale.short_prompts
            for batch in BATCHES:
                engine = engines[batch]
                systems = {
                    "transformers-generate": peer,
                    "plain": EngineSystem.of_pool(engine, None, "greedy"),
                    "greedy": EngineSystem.of_pool(engine, pool, "greedy"),
                    "relaxed": EngineSystem.of_pool(engine, pool, "relaxed"),
                }
                logger.info("%s: batch %d", task.name, batch)
                rows += [
                    {"model": model_dir.name, **row} for row in measure(systems, task, batch, num_prompts[batch], scale)
                ]
    return rows


def describe_rows(rows: list[dict]) -> str:
    """The rows as a table for a terminal."""
    head = f"{'model':14}{'task':17}{'batch':>6}  {'system':23}{'tokens/s':>9}{'per step':>13}{'texts':>7}  over plain"
    lines = [
        f"{row['model']:14}{row['task']:17}{row['batch']:6}  {row['system']:23}{row['tokens_per_s']:9.0f}"
        f"{row['tokens_per_step']:13.2f}{row['num_texts']:7}  {row['ratio_to_plain']}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(
        __doc__,
        quick="fewer prompts and repetitions: under 5 minutes on 2 cores",
        smoke="a handful of prompts: does it run at all",
        writes="rows and figures",
    )
    add_models(parser, [DEFAULT_MODEL, SAMPLE_MODEL])
    add_data(parser)
    add_engine(parser)
    return parser.parse_args(words)


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = parse_arguments()
    show_progress("night")
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    rows, big_pool = [], None
    for model_dir in existing(arguments.model):
        rows += measure_model(model_dir, arguments.data, arguments.cache, scale, arguments.threads)
    figures = figures_of(rows)
    if (arguments.data / "goodreads").is_dir() and arguments.model[0].is_dir():
        big_pool, pool_figures = measure_big_pool(load_engine(arguments.model[0], 1, arguments.threads), arguments.data)
        figures += pool_figures
    finish(arguments.json, figures, [describe_rows(rows)], {"rows": rows, "big_pool": big_pool})


if __name__ == "__main__":
    main()
