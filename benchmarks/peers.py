"""Compare our engine, and our drafts inside vLLM, with vLLM plain and with its own drafts: one run, the same prompts.

    make .venv-vllm/.installed
    .venv-vllm/bin/python -m pip install --no-deps arctic-inference==0.3.0
    .venv-vllm/bin/python benchmarks/peers.py --quick --json peers.json

The measuring model writes long answers and short descriptions to held-out prompts; with `--models DIR`, SmolLM2-135M
answers KAR's questions about viewers and films of MovieLens 100K. Pools have the model's own answers to other prompts.
The systems are `vllm`, `vllm-ngram`, `vllm-suffix` (if Arctic's package is installed) and `vllm-laserbatch`, each in a
separate process, and our engine as `plain`, `greedy` and `relaxed`; all have the same dtype and number of threads. They
answer the same prompts, each round in a newly drawn order: trust only ratios within one run. Suffix drafts know the
answers to the pool's prompts, and forget all other answers after each pass. Texts are compared token by token with
those of the same engine without drafts.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from common import SMOLLM2, Figure, Spread, begin, benchmark_parser, finish, scale_of, turns
from engine_pools import GroupedPool, pools_of, unseen_prompts
from engine_systems import PLAIN, Engines, as_a_night, relaxed_pools
from peers_worker import MARK
from systems import EngineSystem, Pass
from tasks import Task, TaskSize, movielens_tasks, own_texts, tasks_of

from laserbatch.retrieval_pools.calibration.calibrate import calibrate
from laserbatch.retrieval_pools.calibration.replay import ReplayText
from laserbatch.retrieval_pools.draft import DraftOptions
from laserbatch.retrieval_pools.index.build import HeldBack, PoolText, build_pool
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.integrations.vllm import SETTINGS_VARIABLE
from laserbatch.retrieval_pools.integrations.vllm_steps import PROPOSERS, speculative_config

logger = logging.getLogger("benchmarks")

MAX_DRAFT_TOKENS = 8
ENGINE = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True, "seed": 0}
ON_A_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": MAX_DRAFT_TOKENS, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": MAX_DRAFT_TOKENS}
VLLM, VLLM_NGRAM, VLLM_SUFFIX, VLLM_OURS = "vllm", "vllm-ngram", "vllm-suffix", "vllm-laserbatch"
GREEDY, RELAXED = "greedy", "relaxed"
POOL, SPECULATIONS = "global", {GREEDY: "resd", RELAXED: "resd, relaxed"}
WARM_UP_TOKENS = 32
MIN_RATIO = 0.98  # speed relative to plain vLLM, for any drafts


@dataclass(frozen=True)
class Scale:
    """Sizes of both tasks, long answers first; rounds; batch sizes; prompts at small batches; tokens of a text."""

    sizes: tuple[TaskSize, ...]
    num_rounds: int
    batches: tuple[int, ...] = (1, 4, 16)
    min_long_prompts: int = 2
    min_short_prompts: int = 8
    max_new_tokens: int = 512


FULL = Scale((TaskSize(16, 400, 0, 40), TaskSize(32, 1000, 0, 100)), num_rounds=5, min_long_prompts=8)
QUICK = Scale((TaskSize(16, 48, 0, 8), TaskSize(24, 300, 0, 40)), num_rounds=3, batches=(1, 16), min_long_prompts=1)
SMOKE = Scale((TaskSize(4, 12, 0, 2), TaskSize(4, 20, 0, 2)), num_rounds=1, max_new_tokens=24)
# the size of both tasks with SmolLM2
FULL_REAL = replace(FULL, sizes=(TaskSize(24, 120, 0, 24),), min_short_prompts=4, max_new_tokens=160)
QUICK_REAL = replace(QUICK, sizes=(TaskSize(16, 24, 0, 16),), num_rounds=1, min_short_prompts=2, max_new_tokens=80)
SMOKE_REAL = replace(SMOKE, sizes=(TaskSize(3, 6, 0, 2),), batches=(1, 2), max_new_tokens=8)


def _own_environment() -> dict[str, str]:
    """This process' environment without GOMP_SPINCOUNT, which our package sets only for itself."""
    return {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}


class Served:
    """A vLLM in a separate process, with `run` like `EngineSystem.run`; call `ready` to wait for its start."""

    def __init__(
        self, model: Path, speculative: dict | None, environment: dict[str, str], dtype: str = ENGINE["dtype"]
    ) -> None:
        payload = {"model": str(model), "engine": ENGINE | {"dtype": dtype}, "speculative_config": speculative}
        command = [sys.executable, str(Path(__file__).with_name("peers_worker.py")), json.dumps(payload)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self._process = subprocess.Popen(command, env=_own_environment() | environment, **pipes)
        self._is_ready = False

    def ready(self) -> None:
        """Wait until it has started."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True

    def run(self, prompts: Sequence[np.ndarray], batch: int, max_new_tokens: int, is_pool: bool = False) -> Pass:
        """Answer all prompts at once; texts have their end token. `is_pool`: later drafts may use the answers."""
        prompts = [prompt.tolist() for prompt in prompts]
        request = {"prompts": prompts, "max_tokens": max_new_tokens, "is_pool": is_pool}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        texts = tuple(map(tuple, answer["texts"]))
        return Pass(answer["seconds"], sum(map(len, texts)), answer["num_steps"], texts)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict:
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise SystemExit(f"a vLLM ended with {self._process.wait()}")


def measure_steps(model: Path, path: Path, engine: dict, batches: Sequence[int], environment: dict[str, str]) -> dict:
    """Measure the cost of vLLM's steps with drafts, and write it to a file for the proposer."""
    command = [sys.executable, "-m", f"{PROPOSERS}_steps", str(model), "--out", str(path)]
    command += ["--tokens", str(MAX_DRAFT_TOKENS), "--engine", json.dumps(engine), "--batch", *map(str, batches)]
    subprocess.run(command, env=_own_environment() | environment, check=True, capture_output=True)
    return json.loads(path.read_text())


def write_drafts(
    folder: Path, model: Path, task: Task, texts: Sequence[np.ndarray], max_tokens: int, **settings: str | float
) -> Path:
    """Write a pool of answers, calibrated by some of them, and a file of proposer settings; return the file."""
    held_back = [ReplayText(*pair) for pair in zip(task.pool_prompts[::4], texts[::4], strict=True)]
    options = DraftOptions(max_nodes=max_tokens, min_acceptance=0.01, use_previous=False)
    by = HeldBack(range(0, len(texts), 4), lambda others: calibrate(others, held_back, options))
    build = partial(build_pool, side=task.side, tokenizer_hash=tokenizer_hash(model), model_id=model.name)
    with PoolStore(folder / "pools").publish("v1") as version:
        build([PoolText(row) for row in texts], version / task.side, calibration=by)
    path = folder / "drafts.json"
    path.write_text(json.dumps({"pools": "pools", "side": task.side, **settings}))
    return path


def serve_ours(
    folder: Path, model: Path, task: Task, texts: Sequence[np.ndarray], cost: Path, environment: dict, dtype: str
) -> Served:
    """Start a vLLM with our proposer."""
    drafts = write_drafts(folder, model, task, texts, MAX_DRAFT_TOKENS, step_cost=str(cost))
    os.environ[SETTINGS_VARIABLE] = str(drafts)  # `speculative_config` reads it too
    return Served(model, speculative_config(model, MAX_DRAFT_TOKENS), environment, dtype)


def of_our_engine(
    engines: Engines, batch: int, pools: dict[str, GroupedPool], task: Task, max_new_tokens: int
) -> dict[str, EngineSystem]:
    """Plain decoding, and drafts with the budgets that a night would choose for a task's texts."""
    num_context_tokens = (
        float(np.mean([len(prompt) for prompt in task.held_out])) + min(task.max_new_tokens, max_new_tokens) / 2
    )
    drafted = {name: as_a_night(engines, batch, pools, way, num_context_tokens) for name, way in SPECULATIONS.items()}
    return {PLAIN: EngineSystem.plain(engines.of_batch(batch))} | drafted


def passes_in_turns(
    systems: dict[str, Served | EngineSystem],
    prompts: Sequence[np.ndarray],
    batch: int,
    num_rounds: int,
    max_new_tokens: int,
) -> dict[str, list[Pass]]:
    """The passes of each system over the prompts in batches, one per round; systems take turns."""
    parts = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
    passes: dict[str, list[Pass]] = {name: [] for name in systems}
    for system in systems.values():  # compiles
        system.run(prompts[:batch], batch, WARM_UP_TOKENS)
    orders = turns(list(systems))
    for _ in range(num_rounds):
        for name in next(orders):
            written = [systems[name].run(part, batch, max_new_tokens) for part in parts]
            passes[name].append(Pass.joined(written))
            logger.info("batch %d: %s %.1f tokens/s", batch, name, passes[name][-1].tokens_per_s)
    return passes


def measure(systems: dict[str, Served | EngineSystem], task: Task, batch: int, scale: Scale) -> Iterator[dict]:
    """Yield a row for each system; ratios are within a round. A batch begins when the last batch has ended."""
    prompts = task.held_out[: max(batch, scale.min_long_prompts if task.is_long else scale.min_short_prompts)]
    passes = passes_in_turns(systems, prompts, batch, scale.num_rounds, min(task.max_new_tokens, scale.max_new_tokens))
    for name, own in passes.items():
        speeds = [run.tokens_per_s for run in own]
        undrafted = passes[VLLM if name.startswith(VLLM) else PLAIN][0]
        ratios = [speed / other.tokens_per_s for speed, other in zip(speeds, passes[VLLM], strict=True)]
        yield {
            "system": name,
            "task": task.name,
            "batch": batch,
            "tokens_per_s": Spread.of(speeds).median,
            "tokens_per_step": own[0].tokens_per_step,
            "tokens_per_s_range": [min(speeds), max(speeds)],
            "ratio_to_vllm": Spread.of(ratios),
            "num_texts": len(prompts),
            "num_texts_as_undrafted": sum(map(tuple.__eq__, own[0].texts, undrafted.texts)),
        }


def figures_of(rows: Sequence[dict], dtype: str) -> Iterator[Figure]:
    """The figures of our drafts inside vLLM and of our engine. Only in float32 does vLLM keep texts the same."""
    for row in rows:
        system, batch, is_long = row["system"], row["batch"], row["task"] == "reki"
        over, where = row["ratio_to_vllm"].median, f"{row['task']}, batch {batch}"
        if system == VLLM_OURS:
            wanted = 2.0 if batch == 1 and is_long else MIN_RATIO
            yield Figure.at_least(f"{where}: vLLM with our drafts over vLLM plain, tokens a second", over, wanted)
            share = row["num_texts_as_undrafted"] / row["num_texts"]
            about = f"{where}: share of texts with our drafts that are those of vLLM plain"
            if dtype == "float32":
                yield Figure.at_least(about, share, 1.0)
        elif system == PLAIN:
            yield Figure.at_least(f"{where}: our plain decoding over vLLM plain, tokens a second", over, 1.0)
        elif system == RELAXED and batch == ENGINE["max_num_seqs"]:
            wanted = 2.0 if is_long else 1.2
            yield Figure.at_least(f"{where}: our relaxed decoding over vLLM plain, tokens a second", over, wanted)


def figures_beside_best(rows: Sequence[dict]) -> Iterator[Figure]:
    """Figures of our drafts over vLLM's own best system, at the largest batch size, on the real model's tasks."""
    for task, wanted in (("movielens-users", 2.0), ("movielens-items", 1.5)):
        own = [row for row in rows if row["task"] == task]
        batch = max((row["batch"] for row in own), default=0)
        over = {row["system"]: row["ratio_to_vllm"].median for row in own if row["batch"] == batch}
        if over:
            ours = max(over[GREEDY], over[RELAXED])
            best = max(over.get(name, 0.0) for name in (VLLM, VLLM_NGRAM, VLLM_SUFFIX))
            name = f"{task}, batch {batch}: our drafts over the best of vLLM's own ways, tokens a second"
            yield Figure.at_least(name, ours / best, wanted)


def tasks_measured(data: Path, model: Path, tokenizer, scale: Scale, is_real: bool) -> list[Task]:
    """The tasks of the measuring model, or of the real model."""
    if is_real:
        return movielens_tasks(tokenizer, data, scale.sizes[0], scale.max_new_tokens)
    return tasks_of(model, data, tokenizer, *scale.sizes)


def main() -> None:
    """Write the pools' texts, measure the cost of steps, then measure all systems."""
    parser = benchmark_parser(__doc__, "data", "model", "threads", "cache")
    parser.add_argument("--models", type=Path, help=f"folder with {SMOLLM2}/, to measure instead of --model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of all systems")
    arguments = parser.parse_args()
    begin(arguments.threads)
    environment = ON_A_CPU | dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(arguments.threads))
    model, dtype, is_real = arguments.model, arguments.dtype, arguments.models is not None
    scale = scale_of(arguments, *((FULL_REAL, QUICK_REAL, SMOKE_REAL) if is_real else (FULL, QUICK, SMOKE)))
    if is_real:
        model = arguments.models / SMOLLM2
    engines, engine, rows = Engines(model, dtype, "cpu"), ENGINE | {"dtype": dtype}, []
    with tempfile.TemporaryDirectory() as name:
        cost = Path(name) / "cost.json"
        step_cost = measure_steps(model, cost, engine, scale.batches, environment)
        logger.info("measuring the steps of vLLM")
        drafts = {VLLM: None, VLLM_NGRAM: NGRAM} | ({VLLM_SUFFIX: SUFFIX} if find_spec("arctic_inference") else {})
        peers = {system: Served(model, own, environment, dtype) for system, own in drafts.items()}
        tasks = tasks_measured(arguments.data, model, engines.tokenizer, scale, is_real)
        for task in tasks:
            folder = Path(name) / task.name
            writer = engines.of_batch(max(scale.batches))
            task = unseen_prompts(writer, task, arguments.cache)
            texts = own_texts(writer, task, arguments.cache)
            pools = pools_of(writer, task, arguments.cache, folder, [POOL])
            pools |= relaxed_pools(writer, pools, task, list(SPECULATIONS.values()))
            ours = serve_ours(folder, model, task, texts, cost, environment, dtype)
            for server in (*peers.values(), ours):  # they start while texts are written, not while anything is measured
                server.ready()
            if VLLM_SUFFIX in peers:
                peers[VLLM_SUFFIX].run(task.pool_prompts, max(scale.batches), task.max_new_tokens, is_pool=True)
            for batch in scale.batches:
                systems = peers | {VLLM_OURS: ours} | of_our_engine(engines, batch, pools, task, scale.max_new_tokens)
                rows += measure(systems, task, batch, scale)
                speeds = [f"{row['system']} {row['tokens_per_s']:.0f}" for row in rows[-len(systems) :]]
                logger.info("%s, batch %d, tokens per second: %s", task.name, batch, ", ".join(speeds))
            ours.close()
        for server in peers.values():
            server.close()
    table = [
        f"{row['task']:15} batch {row['batch']:2}  {row['system']:15}  {row['tokens_per_s']:6.0f} tokens/s, "
        f"{row['ratio_to_vllm']} of vLLM plain, {row['tokens_per_step']:.2f} per step, "
        f"{row['num_texts_as_undrafted']} of {row['num_texts']} texts as undrafted"
        for row in rows
    ]
    content = {"rows": rows, "step_cost": step_cost, "engine": engine, "model": model.name}
    finish(arguments.json, [*figures_of(rows, dtype), *figures_beside_best(rows)], ["\n".join(table)], content)


if __name__ == "__main__":
    main()
