"""Tokens per second of each drafting method, under fixed and adaptive budgets, and of transformers; on CPU or GPU.

    python benchmarks/engine.py --quick --json engine.json
    python benchmarks/engine.py --device cuda --geometry 8b-gqa --batch 1 64 256 --json engine_gpu.json

All systems answer the same held-out prompts in turn, with the same weights. Ratios are taken within one repetition.
Figures are only reported: the exit code is 0 whether they are met or not.
"""

import argparse
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import SAMPLE_MODEL, begin, benchmark_parser, finish, table, write_json
from engine_passes import Amount, counted, measure
from engine_pools import GroupedPool, pools_of, unseen_prompts
from engine_rows import COLUMNS, described, figures_of, repeats_of_plain, row_of
from engine_systems import (
    ADAPTIVE,
    FIXED_BUDGETS,
    PLAIN,
    Contestant,
    Engines,
    Peers,
    adaptive_budget,
    pool_kinds,
    relaxed_pools,
    speculating,
    twins_of,
)
from roofline import DeviceRates, WatchedPlain, measure_device
from systems import MIN_ACCEPTANCE
from tasks import Task, TaskSize, tasks_of
from widen import DTYPES, GEOMETRIES, widened

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.settings import Budget

logger = logging.getLogger("benchmarks")

ASKED = ("own-text", "resd", "crp", "rrp", "laser")
SWEPT = ("resd", "laser")  # also measured with the fixed budgets of FIXED_BUDGETS
WRITER_BATCH = {"cpu": 16, "cuda": 128}  # batch size at which the texts of pools are written


@dataclass(frozen=True)
class Scale:
    """The amount of work: prompts by batch size, texts in the pools, repetitions, systems, fixed budgets.

    The pools are the same at every batch size.
    """

    long_prompts: dict[int, int]
    short_prompts: dict[int, int]
    long: TaskSize
    short: TaskSize
    num_long_repetitions: int
    num_short_repetitions: int
    systems: tuple[str, ...] = ASKED
    fixed_budgets: tuple[int, ...] = FIXED_BUDGETS
    fixed_at: dict[int, tuple[int, ...]] = field(default_factory=dict)  # replaces fixed_budgets at these batch sizes
    only_at: dict[int, tuple[str, ...]] = field(default_factory=dict)  # systems besides plain at these batch sizes
    max_new_tokens: int = 512  # of measured texts; the texts of pools are not cut
    slow_long_prompts: int | None = None  # long prompts of slow systems (`Contestant.is_slow`) at batch 1; None: all
    slow_short_prompts: int | None = None
    num_slow_repetitions: int | None = None  # repetitions of slow systems at any batch size
    batches: tuple[int, ...] = ()  # measured batch sizes, among those of `long_prompts`; (): all

    def amount_at(self, task: Task, batch: int) -> Amount:
        """The prompts and repetitions of a task at one batch size."""
        num_prompts = (self.long_prompts if task.is_long else self.short_prompts)[batch]
        num_repetitions = self.num_long_repetitions if task.is_long else self.num_short_repetitions
        num_slow = (self.slow_long_prompts if task.is_long else self.slow_short_prompts) if batch == 1 else None
        return Amount(
            num_prompts, num_repetitions, num_slow or num_prompts, self.num_slow_repetitions or num_repetitions
        )


CPU_FULL = Scale(
    {1: 24, 4: 24, 16: 32}, {1: 96, 4: 128, 16: 128}, TaskSize(32, 200, 0, 128), TaskSize(128, 1000, 0, 512),
    2, 3, max_new_tokens=384, slow_long_prompts=3, slow_short_prompts=24, num_slow_repetitions=3,
)  # fmt: skip
CPU_QUICK = Scale(
    {1: 8, 4: 8, 16: 32}, {1: 24, 4: 32, 16: 64}, TaskSize(16, 100, 16, 64), TaskSize(64, 500, 0, 256),
    2, 2, ASKED, (8, 16), {1: (16, 32), 4: (16,)}, {4: ("resd", "laser")}, max_new_tokens=160,
    slow_long_prompts=2, slow_short_prompts=4, num_slow_repetitions=1,
)  # fmt: skip
CUDA_FULL = Scale(
    {1: 4, 8: 24, 32: 96, 64: 192, 128: 384, 256: 512},
    {1: 16, 8: 64, 32: 256, 64: 512, 128: 1024, 256: 2048},
    TaskSize(512, 400, 0, 128), TaskSize(2048, 4000, 0, 512), 3, 5,
)  # fmt: skip
CUDA_QUICK = Scale(
    {1: 2, 8: 16, 32: 48, 64: 96, 128: 192, 256: 384},
    {1: 8, 8: 32, 32: 96, 64: 192, 128: 384, 256: 768},
    TaskSize(512, 400, 0, 128), TaskSize(2048, 4000, 0, 512), 2, 2, ("resd", "laser"), (8, 16, 32),
    only_at=dict.fromkeys((1, 32, 64, 256), ("resd", "laser")), batches=(1, 32, 64, 256),
)  # fmt: skip
SMOKE = Scale(
    dict.fromkeys((1, 4, 16), 2), dict.fromkeys((1, 4, 16), 2), TaskSize(3, 12, 0, 2), TaskSize(3, 20, 0, 2), 1, 1,
    ("resd", "laser"), (8,), batches=(4,),
)  # fmt: skip
SCALES = {
    "cpu": {"full": CPU_FULL, "quick": CPU_QUICK, "smoke": SMOKE},
    "cuda": {"full": CUDA_FULL, "quick": CUDA_QUICK, "smoke": SMOKE},
}


def chosen(tasks: Sequence[Task], names: Sequence[str] | None) -> list[Task]:
    """The tasks with the given names; None: all."""
    unknown = set(names or ()) - {task.name for task in tasks}
    if unknown:
        raise SystemExit(f"no task {', '.join(sorted(unknown))}; there are {', '.join(task.name for task in tasks)}")
    return [task for task in tasks if names is None or task.name in names]


def contestants_at(
    task: Task,
    batch: int,
    engines: Engines,
    peers: Peers,
    pools: dict[str, GroupedPool],
    scale: Scale,
    rates: DeviceRates,
) -> list[Contestant]:
    """Every system and budget at a batch size."""
    step_cost = engines.step_cost(batch, next((grouped.pool for grouped in pools.values()), None))
    only = scale.only_at.get(batch)
    systems = [system for system in scale.systems if only is None or system in only]
    engine = engines.of_batch(batch)
    contestants = [peer for peer in peers.at_batch(batch) if only is None or peer.system in only]
    contestants.append(Contestant(PLAIN, None, WatchedPlain(engine, rates)))
    for system in systems:
        settled = adaptive_budget(step_cost, batch, pools, system)
        contestants.append(speculating(engine, pools, system, ADAPTIVE, settled))
        for size in scale.fixed_at.get(batch, scale.fixed_budgets) if system in SWEPT else ():
            contestants.append(speculating(engine, pools, system, size, Budget(size, MIN_ACCEPTANCE)))
    return contestants


def _writer(engines: Engines) -> Engine:
    """The engine that writes unmeasured texts. Callers must not hold it: the next engine needs its memory."""
    return engines.of_batch(WRITER_BATCH[engines.device.type])


def measure_batch(
    task: Task,
    batch: int,
    engines: Engines,
    peers: Peers,
    pools: dict[str, GroupedPool],
    scale: Scale,
    rates: DeviceRates,
) -> list[dict]:
    """All rows of one task at one batch size."""
    contestants = contestants_at(task, batch, engines, peers, pools, scale, rates)
    logger.info("%s: batch %d, %d systems and budgets", task.name, batch, len(contestants))
    num_warm_up = 1 if engines.device.type == "cpu" else batch
    amount, prompts = scale.amount_at(task, batch), task.held_out
    twins = twins_of(contestants)
    different = [contestant for contestant in contestants if contestant.key not in twins]
    passes = measure(different, prompts, batch, task.max_new_tokens, amount, num_warm_up)
    passes |= {key: passes[twin] for key, twin in twins.items()}
    step_cost = engines.step_cost(batch, None)
    counts = {
        contestant.key: counted(step_cost, batch, passes[contestant.key][0], prompts, contestant.settled)
        for contestant in contestants
        if not contestant.is_peer
    }
    measured = [contestant for contestant in contestants if contestant.key in passes]
    return [{"task": task.name, "batch": batch} | row_of(contestant, passes, counts) for contestant in measured]


def measure_task(
    task: Task, engines: Engines, peers: Peers, scale: Scale, cache: Path, rates: DeviceRates
) -> Iterator[list[dict]]:
    """Yield the rows of one task, one batch size at a time, the largest first."""
    with tempfile.TemporaryDirectory() as folder:
        task = unseen_prompts(_writer(engines), task, cache)
        kinds = pool_kinds(scale.systems)
        pools = pools_of(_writer(engines), task, cache, Path(folder), kinds)
        task = replace(task, max_new_tokens=min(task.max_new_tokens, scale.max_new_tokens))
        pools |= relaxed_pools(_writer(engines), pools, task, scale.systems)
        for batch in sorted(scale.batches, reverse=True):
            yield measure_batch(task, batch, engines, peers, pools, scale, rates)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__, "model", "data", "device", "dtype", "threads", "cache")
    parser.add_argument("--geometry", choices=GEOMETRIES, help="widen the model to this geometry first (widen.py)")
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes; default: all that the device has")
    parser.add_argument("--task", nargs="+", help="tasks; default: all")
    return parser.parse_args(words)


def scale_on(device: str, arguments: argparse.Namespace) -> Scale:
    """The scale that the options ask for on `device`."""
    scale = SCALES[device][arguments.size]
    batches = tuple(arguments.batch or scale.batches or scale.long_prompts)
    unknown = set(batches) - set(scale.long_prompts)
    if unknown:
        there = ", ".join(map(str, scale.long_prompts))
        raise SystemExit(f"no batch size {min(unknown)} on {device}; there are {there}")
    return replace(scale, batches=batches)


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = parse_arguments()
    begin(arguments.threads)
    device = arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = arguments.dtype if arguments.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    scale = scale_on(device, arguments)
    trained_dir = model_dir = arguments.model if arguments.model.is_dir() else SAMPLE_MODEL
    if arguments.geometry:
        model_dir = widened(trained_dir, arguments.geometry, dtype, arguments.cache / "widened")
    rates = measure_device(torch.device(device), DTYPES[dtype])
    peers = Peers(model_dir, dtype, device)
    engines = Engines(model_dir, dtype, device)
    rows: list[dict] = []

    def content() -> dict[str, Any]:
        return {
            "model": model_dir.name,
            "dtype": dtype,
            "device_rates": rates,
            "repeats_of_plain": repeats_of_plain(rows),
            "rows": rows,
        }

    tasks = tasks_of(trained_dir, arguments.data, engines.tokenizer, scale.long, scale.short)
    for task in chosen(tasks, arguments.task):
        for rows_of_task in measure_task(task, engines, peers, scale, arguments.cache, rates):
            rows += rows_of_task
            if arguments.json:  # if the run is cut off, the file has what was measured by then
                write_json(arguments.json, {"figures": figures_of(rows, device), **content(), "is_cut_off": True})
    finish(arguments.json, figures_of(rows, device), [table(map(described, rows), COLUMNS)], content())


if __name__ == "__main__":
    main()
