"""Time of one engine step by part: drafting, packing, the model's parts, verification, committing.

    python benchmarks/step_profile.py --quick --json step_profile.json
    python benchmarks/step_profile.py --device cuda --geometry 8b-gqa --json step_profile_gpu.json

It watches steps of full batches in the middle of texts (`step_spans`), plain and with trees of 16 tokens from a pool of
the model's own texts. No text ends while it is measured, and no step computes a prompt. Watching waits for the device
at every part and turns CUDA graphs off. So the same steps are also timed unwatched, and compared with the roofline.
"""

import argparse
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import (
    DEFAULT_MODEL,
    SAMPLE_MODEL,
    Figure,
    Spread,
    begin,
    benchmark_parser,
    finish,
    scale_of,
)
from roofline import DeviceRates, Roofline, measure_device
from step_spans import HOST_PARTS, PARTS, Spans, watched
from tasks import TaskSize, build, plain_texts, sample_tasks
from widen import GEOMETRIES, load_widened

from laserbatch.pipeline.decoding.drafters import Drafter, NoDrafter, drafter_from
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import LoadedModel, load_model
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed, Verifier

TREE_NODES = 16
PREFILL_TOKENS = 8192  # prompt tokens of a step: the first texts must not end before the last ones begin
NUM_WARM_STEPS = 3  # uncounted first steps of a full batch: they compile or are captured
MIN_ROOFLINE_SHARE, ROOFLINE_BATCHES = 0.75, (1, 64, 256)  # for plain decoding on a GPU
MAX_HOST_SHARE, HOST_BATCH = 0.15, 64
HEAD = (
    f"{'model':13}{'kind':12}{'batch':>6}{'nodes':>7}{'step ms':>9}{'of least':>9}{'watched':>9}{'host':>6}"
    "  share of each part, %"
)


@dataclass(frozen=True)
class Scale:
    """The amount of work: batch sizes, counted steps at each, texts in the pool and their tokens."""

    batches: tuple[int, ...]
    num_steps: int
    num_pool_texts: int
    num_pool_tokens: int


FULL = Scale((1, 16, 32, 64, 256), num_steps=40, num_pool_texts=128, num_pool_tokens=256)
QUICK = Scale((1, 32, 64, 256), num_steps=6, num_pool_texts=32, num_pool_tokens=96)
SMOKE = Scale((1, 2), num_steps=2, num_pool_texts=2, num_pool_tokens=16)


def prompts_of(tokenizer, num_prompts: int) -> list[np.ndarray]:
    """Different prompts of a sample world, from the project's templates; int32 token ids each."""
    tasks = sample_tasks(tokenizer, TaskSize(-(-num_prompts // 2), 0))
    return [prompt for pair in zip(*(task.held_out for task in tasks), strict=True) for prompt in pair][:num_prompts]


def engine_of(loaded: LoadedModel, batch: int, num_draft_tokens: int, max_cache_tokens: int | None = None) -> Engine:
    """An engine whose texts do not end, which drafts the full budget and fills its batch in few steps."""
    settings = DecodingSettings(
        batch_size=batch, max_draft_tokens=num_draft_tokens, min_acceptance=0.0, max_cache_tokens=max_cache_tokens
    )
    engine = Engine(replace(loaded, end_ids=()), settings)
    engine.max_prefill_tokens = PREFILL_TOKENS
    return engine


def requests_of(engine: Engine, prompts: Sequence[np.ndarray]) -> list[GenerationRequest]:
    """One request for each place in the engine's batch."""
    numbers = range(engine.settings.batch_size)
    return [GenerationRequest(str(number), prompts[number % len(prompts)], None, "all", 512) for number in numbers]


def is_full(engine: Engine, live: Sequence) -> bool:
    """Whether the live texts of a step are a full batch, and all prompts are computed."""
    return len(live) == engine.settings.batch_size and all(sequence.num_output > 0 for sequence in live)


def profile(
    engine: Engine, drafter: Drafter, prompts: Sequence[np.ndarray], num_steps: int, verifier: Verifier
) -> dict:
    """Mean times of the steps of one full batch, by part."""
    num_full = itertools.count()
    counts: list[np.ndarray] = []  # sums over live texts before each counted step and at the end: drafted, all tokens
    with watched(engine) as spans:

        def keeps(live) -> bool:
            is_counted = is_full(engine, live) and next(num_full) >= NUM_WARM_STEPS
            if is_counted:
                counts.append(np.array([(sequence.num_drafted, sequence.num_output) for sequence in live]).sum(0))
            if len(counts) > num_steps:
                raise Enough
            return is_counted

        spans.keeps = keeps
        with suppress(Enough):
            for _ in engine.generate(requests_of(engine, prompts), drafter, verifier):
                pass
    num_text_steps = engine.settings.batch_size * spans.num_steps
    return _row(engine, spans, *((counts[-1] - counts[0]) / num_text_steps).tolist())


class Enough(Exception):
    """Enough steps are counted; the texts need not be finished."""


def _row(engine: Engine, spans: Spans, num_drafted: float, num_written: float) -> dict:
    seconds = {part: spans.seconds.get(part, 0.0) / spans.num_steps for part in PARTS}
    total = sum(seconds.values())
    return {
        "batch": engine.settings.batch_size,
        "num_steps": spans.num_steps,
        "drafted_tokens_a_text": num_drafted,
        "tokens_a_step": num_written,
        "step_ms": 1e3 * total,
        "host_share": sum(seconds[part] for part in HOST_PARTS) / total,
        "parts_ms": {part: 1e3 * value for part, value in seconds.items()},
    }


def timed_steps(
    engine: Engine, drafter: Drafter, prompts: Sequence[np.ndarray], num_steps: int, verifier: Verifier
) -> list[float]:
    """The milliseconds of `num_steps` unwatched steps of a full batch."""
    ends: list[float] = []
    finish_step = engine.finish_step

    def counted(step, stream):
        counts = is_full(engine, stream.scheduler.live)
        ended = finish_step(step, stream)
        if counts:
            ends.append(time.perf_counter())
        if len(ends) > NUM_WARM_STEPS + num_steps:
            raise Enough
        return ended

    engine.finish_step = counted
    with suppress(Enough):
        next(engine.generate(requests_of(engine, prompts), drafter, verifier))
    engine.finish_step = finish_step
    return (1e3 * np.diff(ends)[NUM_WARM_STEPS:]).tolist()


def measure_model(loaded: LoadedModel, name: str, rates: DeviceRates, scale: Scale) -> list[dict]:
    """The rows of one model: each batch size, plain and with trees."""
    prompts = prompts_of(loaded.tokenizer, max(scale.batches))
    writer = engine_of(loaded, scale.num_pool_texts, 0)
    of_pool = [prompts[-1 - number % len(prompts)] for number in range(scale.num_pool_texts)]
    texts = plain_texts(writer, of_pool, scale.num_pool_tokens)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pool = build(texts, Path(folder) / "pool", "user")
        del writer
        for batch in scale.batches:
            for kind, num_nodes in (("plain", 0), (f"trees of {TREE_NODES}", TREE_NODES)):
                _let_go()
                engine = engine_of(loaded, batch, num_nodes)
                threads = engine.num_draft_threads
                drafter = drafter_from(engine.settings, pool, num_threads=threads) if num_nodes else NoDrafter()
                verifier = Relaxed() if num_nodes else Greedy()
                times = timed_steps(engine, drafter, prompts, scale.num_steps, verifier)
                if not times:
                    print(f"{name}, {kind}, batch {batch}: left out, the KV cache is too small", flush=True)
                    continue
                row = profile(engine, drafter, prompts, scale.num_steps, verifier)
                num_cached = sum(len(prompts[n % len(prompts)]) for n in range(batch))
                num_cached += round(batch * row["tokens_a_step"] * (NUM_WARM_STEPS + scale.num_steps / 2))
                num_tokens = round(batch * (1 + row["drafted_tokens_a_text"]))
                least = Roofline.of_engine(engine, rates)
                least.add(num_tokens, num_tokens, num_cached)  # all tokens have logits
                unwatched = Spread.of(times)
                row |= {
                    "unwatched_ms": unwatched,
                    "roofline_share": 1e3 * least.seconds / unwatched.median,
                    "host_share_unwatched": row["host_share"] * row["step_ms"] / unwatched.median,
                }
                del engine, drafter
                rows.append({"model": name, "dtype": str(loaded.model.dtype)[6:], "kind": kind, **row})
                print(describe_row(rows[-1]), flush=True)
    return rows


def _let_go() -> None:
    """Free the KV cache of the previous engine, whose memory the next one needs."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def figures_of(rows: Sequence[dict]) -> list[Figure]:
    """The figures for a GPU."""
    figures = []
    for row in rows:
        where = f"{row['model']}, {row['kind']}, batch {row['batch']}"
        if row["kind"] == "plain" and row["batch"] in ROOFLINE_BATCHES:
            share = row["roofline_share"]
            figures.append(Figure.at_least(f"{where}: share of the roofline", share, MIN_ROOFLINE_SHARE))
        if row["batch"] == HOST_BATCH:
            share = row["host_share_unwatched"]
            figures.append(Figure.at_most(f"{where}: host's share of a step", share, MAX_HOST_SHARE))
    return figures


def describe_row(row: dict) -> str:
    """A row of the table for a terminal: the parts that take at least 1 %."""
    shares = {part: 100 * value / row["step_ms"] for part, value in row["parts_ms"].items()}
    parts = ", ".join(f"{part} {share:.0f}" for part, share in shares.items() if share >= 1)
    return (
        f"{row['model']:13}{row['kind']:12}{row['batch']:6}{row['drafted_tokens_a_text']:7.1f}"
        f"{row['unwatched_ms'].median:9.2f}{row['roofline_share']:9.2f}{row['step_ms']:9.2f}"
        f"{100 * row['host_share_unwatched']:5.0f}%  {parts}"
    )


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__, "device", "dtype", "threads")
    parser.add_argument("--model", type=Path, nargs="+", default=[SAMPLE_MODEL, DEFAULT_MODEL], help="model folders")
    parser.add_argument("--geometry", choices=GEOMETRIES, help="widen the models to this geometry first (widen.py)")
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes, instead of the scale's own")
    return parser.parse_args(words)


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = parse_arguments()
    begin(arguments.threads)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    if arguments.batches:
        scale = replace(scale, batches=tuple(arguments.batches))
    rows: list[dict] = []
    rates = None
    for model_dir in arguments.model:
        if not model_dir.is_dir():
            print(f"left out, no such folder: {model_dir.name}", file=sys.stderr)
            continue
        if arguments.geometry:
            loaded = load_widened(model_dir, arguments.geometry, arguments.dtype, arguments.device)
        else:
            loaded = load_model(model_dir, arguments.dtype, arguments.device)
        if rates is None:
            rates = measure_device(loaded.device, loaded.model.dtype)
            print(f"{rates.bytes_per_s / 1e9:.0f} GB/s, {rates.flops_per_s / 1e12:.1f} TFLOP/s", HEAD, sep="\n")
        rows += measure_model(loaded, loaded.model_id if arguments.geometry else model_dir.name, rates, scale)
    on_gpu = torch.cuda.is_available() and arguments.device != "cpu"
    finish(arguments.json, figures_of(rows) if on_gpu else [], [], {"device_rates": rates, "rows": rows})


if __name__ == "__main__":
    main()
