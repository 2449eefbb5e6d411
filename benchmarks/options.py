"""What each drafting option gains with a real model: tokens per step over the pool alone, on the CPU.

    python benchmarks/options.py --quick --json options.json

One text a prompt is written with every option, by the engine, from pools of the same model's earlier texts. Tokens per
step do not depend on the machine's speed (but for rounding), so nothing is timed. The figure asked for is reported,
not judged. Owns the options, the measuring and the printing; tasks and pools are beside it.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from command import add_data, add_engine, add_model, benchmark_parser, finish, scale_of, show_progress
from common import SAMPLE_MODEL, Figure
from night_pools import own_texts
from night_tasks import TaskSize
from options_pools import Pools
from options_tasks import NightTask, one_night_tasks, readers_task, sample_night_tasks

from laserbatch.pipeline.decoding.budget import Budget
from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine, GenerationFailure, GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.sources import SOURCE_NAMES

logger = logging.getLogger("options")

MAX_DRAFT_TOKENS = 32
DEFAULT_K = 16
RULES = {"greedy": Greedy(), "relaxed": Relaxed()}
POOL_ONLY = ("pool",)
OWN = ("pool", "prompt", "output")
EVERYTHING = ("previous", "prompt", "output", "pool")
LEAST_GAIN_OF_PREVIOUS = 1.15
NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Scale:
    """How many texts are measured, and how many fill a pool.

    Prompts are divided as in `night.py`, so that both find the same pool texts; of the long answers, which are dear,
    the first `num_long_measured` are measured.
    """

    long: TaskSize
    num_long_measured: int
    short: TaskSize
    num_readers: int
    num_measured_readers: int


FULL = Scale(TaskSize(32, 200), 32, TaskSize(128, 1000), num_readers=1000, num_measured_readers=256)
QUICK = Scale(TaskSize(16, 100), 6, TaskSize(32, 500), num_readers=500, num_measured_readers=64)
SMOKE = Scale(TaskSize(2, 4), 1, TaskSize(2, 20), num_readers=40, num_measured_readers=4)


@dataclass(frozen=True)
class Variant:
    """One way to draft.

    `gain_over` names the variant of the same task, verification and K that its gain is measured against.
    """

    option: str
    value: str
    pool: Pool
    sources: tuple[str, ...] = OWN
    gain_over: tuple[str, str] = ("sources", "pool, prompt, output")
    max_nodes: int = DEFAULT_K
    uses_groups: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.option, self.value


def variants_of(task: NightTask, pools: Pools) -> Iterator[Variant]:
    """Every option of one task; the pools behind them hold the same texts."""
    default = pools.default
    pool_only = ("sources", "pool")
    yield Variant("sources", "pool, prompt, output", default, gain_over=pool_only)
    yield Variant("sources", "pool", default, POOL_ONLY, pool_only)
    if any(number is not None for number in task.previous):
        yield Variant("sources", "previous, pool", default, ("previous", "pool"), pool_only)
        yield Variant("sources", "previous, prompt, output, pool", default, EVERYTHING, pool_only)
    for min_support in (2, 3, 5):
        yield Variant("min_support", str(min_support), pools.built(min_support=min_support))
    if len(set(task.pool_groups)) > 1:
        for weight in (1.0, 3.0, 10.0):
            pool = default.with_settings(group_weight=weight)
            yield Variant("group_weight", f"{weight:g}", pool, uses_groups=True)
        yield Variant("scope", "group", default.with_settings(scope="group"), uses_groups=True)


def write_texts(
    engine: Engine, task: NightTask, texts: Sequence[np.ndarray], variant: Variant, rule: str
) -> list[GenerationResult]:
    """The measured prompts' texts, in the order of the prompts."""
    least = Budget.of(engine.settings).min_acceptance
    drafter = RetrievalDrafter(variant.pool, variant.sources, variant.max_nodes, least)
    requests = (
        GenerationRequest(
            str(number),
            prompt,
            None if before is None else texts[before],
            group if variant.uses_groups else None,
            task.first.max_new_tokens,
        )
        for number, (prompt, before, group) in enumerate(zip(task.prompts, task.previous, task.groups, strict=True))
    )
    results: dict[str, GenerationResult] = {}
    for result in engine.generate(requests, drafter, RULES[rule]):
        if isinstance(result, GenerationFailure):
            raise SystemExit(f"{task.name}, prompt {result.request_id} failed: {result.reason}")
        results[result.request_id] = result
    return [results[str(number)] for number in range(len(task.prompts))]


@dataclass(frozen=True)
class Counts:
    """Tokens (end token included) and steps of each text, float64[num_texts]."""

    num_tokens: np.ndarray
    num_steps: np.ndarray

    @classmethod
    def of(cls, results: Sequence[GenerationResult]) -> "Counts":
        num_steps = np.array([result.num_steps for result in results], float)
        return cls(np.array([result.num_accepted for result in results], float) + num_steps, num_steps)

    def tokens_per_step(self, chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Mean growth of a text in a step, over the texts `chosen`: int[..., num_texts] or all."""
        return self.num_tokens[chosen].sum(-1) / self.num_steps[chosen].sum(-1)


def row_of(task: NightTask, variant: Variant, rule: str, results: list[GenerationResult], base: Counts) -> dict:
    """One measurement; intervals are of 95 %, by resampling texts, the same ones for both sides of a gain."""
    counts = Counts.of(results)
    resampled = np.random.default_rng(0).integers(0, len(results), (NUM_RESAMPLES, len(results)))
    low, high = np.quantile(counts.tokens_per_step(resampled), (0.025, 0.975))
    gain_low, gain_high = np.quantile(
        counts.tokens_per_step(resampled) / base.tokens_per_step(resampled), (0.025, 0.975)
    )
    num_steps = int(counts.num_steps.sum())
    return {
        "option": variant.option,
        "value": variant.value,
        "task": task.name,
        "verification": rule,
        "k": variant.max_nodes,
        "tokens_per_step": float(counts.tokens_per_step()),
        "low": float(low),
        "high": float(high),
        "gain": float(counts.tokens_per_step() / base.tokens_per_step()),
        "gain_low": float(gain_low),
        "gain_high": float(gain_high),
        "gain_over": variant.gain_over[1],
        "drafted": sum(result.num_drafted for result in results) / num_steps,
        "drafted_by_source": _by_source(results, "drafted_by_source"),
        "accepted_by_source": _by_source(results, "accepted_by_source"),
        "num_texts": len(results),
        "num_tokens": int(counts.num_tokens.sum()),
        "num_steps": num_steps,
    }


def _by_source(results: list[GenerationResult], name: str) -> dict[str, int]:
    totals = sum(getattr(result, name) for result in results)
    return {source: int(count) for source, count in zip(SOURCE_NAMES, totals, strict=True) if count}


def measure(engine: Engine, task: NightTask, cache: Path) -> list[dict]:
    """All rows of one task."""
    texts = own_texts(engine, task.first, cache)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        variants = list(variants_of(task, Pools(task, texts, engine, Path(folder))))
        for rule in RULES:
            logger.info("%s: %s, %d variants of %d texts", task.name, rule, len(variants), len(task.prompts))
            results = {
                (variant.key, variant.max_nodes): write_texts(engine, task, texts, variant, rule)
                for variant in variants
            }
            counts = {key: Counts.of(found) for key, found in results.items()}
            rows += [
                row_of(
                    task,
                    variant,
                    rule,
                    results[variant.key, variant.max_nodes],
                    counts[variant.gain_over, variant.max_nodes],
                )
                for variant in variants
            ]
    return rows


def figures_of(rows: list[dict]) -> list[Figure]:
    """What the rows say about the figure that was asked for: the own previous text beside the pool."""
    return [
        Figure.at_least(
            f"{row['task']}, {row['verification']}: own previous text and pool over the pool alone, tokens per step",
            row["gain"],
            LEAST_GAIN_OF_PREVIOUS,
        )
        for row in rows
        if row["value"] == "previous, pool"
    ]


def describe_rows(rows: list[dict]) -> str:
    """The rows as a table for a terminal."""
    head = f"{'task':18}{'verification':14}{'option':14}{'value':32}{'K':>3}{'per step':>10}  {'95 %':14}{'drafted':>8}"
    lines = [
        f"{row['task']:18}{row['verification']:14}{row['option']:14}{row['value']:32}{row['k']:3}"
        f"{row['tokens_per_step']:10.2f}  {row['low']:5.2f} to {row['high']:5.2f}{row['drafted']:8.1f}  "
        f"{row['gain']:.3f} ({row['gain_low']:.3f} to {row['gain_high']:.3f})"
        for row in rows
    ]
    return "\n".join([f"{head}  gain", *lines])


def load_engine(model_dir: Path, num_threads: int) -> Engine:
    """Our engine in float32 on the CPU."""
    settings = DecodingSettings(
        dtype="float32", batch_size=16, num_threads=num_threads, max_draft_tokens=MAX_DRAFT_TOKENS
    )
    return Engine.from_pretrained(model_dir, settings, device="cpu")


def tasks_of(model_dir: Path, data: Path, tokenizer, scale: Scale) -> list[NightTask]:
    """The tasks that a model was trained for: those of the public data, or the sample model's own."""
    if model_dir.resolve() == SAMPLE_MODEL:
        return sample_night_tasks(tokenizer, replace(scale.short, num_pool=scale.long.num_pool))
    readers = readers_task(tokenizer, data, scale.num_readers, scale.num_measured_readers)
    reki, items = one_night_tasks(tokenizer, data, scale.long, scale.short)
    return [readers, reki.cut(scale.num_long_measured), items]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(
        __doc__,
        quick="fewer texts: under 5 minutes on 2 cores",
        smoke="a handful of texts: does it run at all",
        writes="rows and figures",
    )
    add_model(parser, "model folder; the sample model if absent")
    add_data(parser)
    add_engine(parser)
    return parser.parse_args(words)


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = parse_arguments()
    show_progress("options", "night")
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    model_dir = arguments.model if arguments.model.is_dir() else SAMPLE_MODEL
    if model_dir != arguments.model:
        print(f"no such folder: {arguments.model.name}; the sample model is measured", file=sys.stderr)
    engine = load_engine(model_dir, arguments.threads)
    rows = []
    for task in tasks_of(model_dir, arguments.data, engine.tokenizer, scale):
        rows += [{"model": model_dir.name, **row} for row in measure(engine, task, arguments.cache)]
    finish(arguments.json, figures_of(rows), [describe_rows(rows)], {"rows": rows})


if __name__ == "__main__":
    main()
