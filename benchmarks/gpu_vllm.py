"""Compare vLLM with our engine on one GPU: the same weights, prompts and minutes, with one deadline.

    python benchmarks/gpu_vllm.py --texts .dev/texts --out OUT --deadline 420

A process of our engine makes the large model on the device and writes its folder to main memory. Then vLLM starts
twice: plain, and with drafts from our pools (chains of at most `--draft-tokens`, whose costs are not measured). If no
batch is above 64, a third vLLM drafts n-grams in its own way. All processes have equal parts of the device's memory.
Systems take turns; only one computes at a time. Each pass has a row, except warm-up passes.

All systems get the whole list of prompts, with at most as many live requests as the batch size. Our engine is made for
that size; vLLM gets a new request when it returns a finished one. Its own scheduler would fill the place a step or two
earlier, which is less than 1 % of these texts' steps; in return one vLLM serves all batch sizes. vLLM's options are its
defaults except for memory: CUDA graphs, torch.compile, the engine core in a separate process, and asynchronous
scheduling, which it turns off for custom proposers. Both engines empty their prefix caches before each pass.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import DEFAULT_MODEL, Figure, begin, finish, turns
from gpu_gains import PLANS, WARM_TOKENS, Plan
from gpu_rows import Rows
from gpu_run import Deadline
from gpu_workers import Worker, WorkerError, device_memory_mb
from peers import NGRAM, ON_A_CPU, PROPOSERS, SETTINGS_VARIABLE, VLLM, VLLM_NGRAM, VLLM_OURS, write_drafts
from pool_texts import read_task
from systems import MIN_ACCEPTANCE

from laserbatch.retrieval_pools.index.manifest import tokenizer_hash

TASK = "reki"
OURS, PLAIN = "ours", "plain"
VLLMS = (VLLM, VLLM_NGRAM, VLLM_OURS)  # each in a separate process
ALWAYS = (PLAIN, *VLLMS)  # measured first in a round, so that a round that is cut off has ratios
BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2  # bytes of keys and values in geometry 8b-gqa
WEIGHT_BYTES, WORK_BYTES = 16.1e9, 6e9  # of each process; the rest of its memory on the device
MAX_CACHE_TOKENS = 150_000
MAX_NGRAM_BATCH = 64  # larger batches do not fit in the caches if a fourth process runs
START_LIMIT_S, PASS_LIMIT_S, WARM_LIMIT_S = 300.0, 90.0, 120.0
NUM_ROUNDS = 2
ENGINE = {
    "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 256, "seed": 0,
    "gpu_memory_utilization": 0.28, "attention_config": {"backend": "FLASH_ATTN"},
}  # fmt: skip
ON_A_GPU = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",  # the machine has no network
}  # fmt: skip
SMOKE_ENGINE = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "seed": 0, "enforce_eager": True}
SMOKE = Plan(6, 24, (("greedy", 4), ("relaxed", 8)), 1)


@dataclass
class Contest:
    """The processes that still answer, the rows, and the texts to compare with."""

    options: argparse.Namespace
    deadline: Deadline
    rows: Rows
    workers: dict[str, Worker]  # OURS and those of VLLMS
    end_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        self._texts: dict[tuple[str, int], list[list[int]]] = {}
        self._seconds: dict[tuple[str, int], float] = {}
        self._warm: set[tuple[str, int]] = set()

    def drop(self, worker: Worker, reason: str, **where: Any) -> None:
        """Drop a failed process, and thereby all its systems."""
        self.rows.add("vllm", worker.name, failed=reason[:2000], **where)
        print(f"{worker.name}: {reason[-1500:]}", flush=True)
        worker.close()
        self.workers.pop(worker.name, None)

    def worker_of(self, system: str) -> Worker | None:
        """The process that a system is in, if it still answers."""
        return self.workers.get(system if system in VLLMS else OURS)

    def run(self, name: str, batch: int, number: int, prompts: list[list[int]], max_tokens: int) -> None:
        """Run a pass of one system and write its row; number -1 is the warm-up, which has a row only if it fails."""
        is_warm_up, worker = number < 0, self.worker_of(name)
        if worker is None:
            return
        limit_s = min(WARM_LIMIT_S if is_warm_up else PASS_LIMIT_S, self.deadline.left())
        try:
            request = {"system": name, "batch": batch, "prompts": prompts, "max_tokens": max_tokens}
            answer = worker.ask(limit_s, **request)
        except WorkerError as error:
            self.drop(worker, str(error), batch=batch, system=name, round=number)
            return
        if is_warm_up:
            return
        texts, num_tokens = answer["texts"], answer.get("num_tokens", sum(map(len, answer["texts"])))
        texts = [text[:-1] if text and text[-1] in self.end_ids else text for text in texts]
        self._texts.setdefault((name, batch), texts)
        self._seconds[name, batch] = answer["seconds"]
        values = {
            "system": name, "batch": batch, "round": number, "seconds": answer["seconds"], "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / answer["seconds"], "num_texts": len(texts), "num_steps": answer["num_steps"],
            "tokens_per_step": num_tokens / max(1, answer["num_steps"]), "device_used_mb": device_memory_mb(),
        }  # fmt: skip
        for other, key in ((VLLM, "equal_to_vllm"), (PLAIN, "equal_to_plain")):
            if (other, batch) in self._texts:
                values[key] = sum(map(list.__eq__, texts, self._texts[other, batch])) / len(texts)
        self.rows.add("vllm", f"pass/{batch}/{name}", **values, **answer.get("facts", {}))
        speed, growth, left_s = values["tokens_per_s"], values["tokens_per_step"], self.deadline.left()
        print(f"[{left_s:4.0f} s left] {batch} {name}: {speed:.0f} tokens/s, {growth:.2f} per step", flush=True)

    def warm_up(self, batch: int, prompts: list[list[int]], plan: Plan, names: Iterable[str]) -> None:
        """Run a batch on each system; ours writes whole texts, since it captures CUDA graphs when first needed."""
        for name in names:
            is_ours = name not in VLLMS
            if self.deadline.left() > 0 and (name, batch) not in self._warm:
                max_tokens = plan.max_new_tokens if is_ours else min(WARM_TOKENS, plan.max_new_tokens)
                self.run(name, batch, -1, prompts[:batch], max_tokens)
        # Our engine of any other batch size is freed.
        self._warm = {warmed for warmed in self._warm if warmed[1] == batch} | {(name, batch) for name in names}

    def batch(self, batch: int, prompts: list[list[int]], plan: Plan, rounds: range) -> None:
        """Warm up every system, then run rounds as time allows."""
        self.warm_up(batch, prompts, plan, (*ALWAYS, *drafted_systems(plan)))
        orders = turns(drafted_systems(plan))
        for number in rounds:
            first = ALWAYS if number % 2 == 0 else ALWAYS[::-1]
            for name in (*first, *next(orders)):
                if self.deadline.left() > 1.15 * self._seconds.get((name, batch), 8.0):
                    self.run(name, batch, number, prompts, plan.max_new_tokens)


def drafted_systems(plan: Plan) -> list[str]:
    """The names of our engine's drafting systems."""
    return [f"{verifier} K{size}" for verifier, size in plan.systems]


def start_vllm(options: argparse.Namespace, name: str, cache_tokens: int, drafts: Path | None) -> Worker:
    """Start a vLLM with its own cache of compiled code; with our proposer unless `drafts` is None."""
    # The KV cache has a fixed size, since vLLM cannot measure free memory while other processes start.
    engine = ENGINE | {"kv_cache_memory_bytes": cache_tokens * BYTES_PER_TOKEN}
    config, environment = None, dict(ON_A_GPU)
    if options.smoke:
        environment, engine = ON_A_CPU | {"OMP_NUM_THREADS": "1"}, SMOKE_ENGINE
    environment["VLLM_CACHE_ROOT"] = str(Path(os.environ.get("VLLM_CACHE_ROOT", "/tmp/vllm-cache")) / name)
    if name == VLLM_NGRAM:
        config = NGRAM | {"num_speculative_tokens": options.draft_tokens}
    if drafts is not None:
        proposer = f"{PROPOSERS}.PoolProposer"
        config = {"method": "custom_class", "model": proposer, "num_speculative_tokens": options.draft_tokens}
        environment |= {SETTINGS_VARIABLE: str(drafts), "NUMBA_NUM_THREADS": "1" if options.smoke else "4"}
    paths = (os.environ.get("PYTHONPATH"), options.vllm_path)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    payload = {"model": str(options.folder), "engine": engine, "speculative_config": config}
    script = str(Path(__file__).with_name("peers_worker.py"))
    return Worker(name, [options.vllm_python, script, json.dumps(payload)], options.out, environment)


def start_ours(options: argparse.Namespace, cache_tokens: int | None, num_prompts: int) -> Worker:
    """Start our engine's process, which makes the model."""
    names = ("model", "texts", "folder", "out")
    payload = {name: str(getattr(options, name)) for name in names} | {"num_prompts": num_prompts}
    payload |= {"geometry": options.geometry, "max_cache_tokens": cache_tokens, "threads": 1 if options.smoke else 4}
    script = str(Path(__file__).with_name("gpu_vllm_ours.py"))
    return Worker(OURS, [sys.executable, script, json.dumps(payload)], options.out, {})


def vllms_of(batches: Iterable[int]) -> tuple[str, ...]:
    """The vLLMs that are measured at some batch sizes."""
    return tuple(name for name in VLLMS if name != VLLM_NGRAM or max(batches) <= MAX_NGRAM_BATCH)


def cache_tokens_of_each(num_caches: int) -> int:
    """Tokens that each of some caches holds."""
    total_bytes = device_memory_mb("total") * 2**20
    if not total_bytes:
        return MAX_CACHE_TOKENS
    return min(MAX_CACHE_TOKENS, int((total_bytes / num_caches - WEIGHT_BYTES - WORK_BYTES) / BYTES_PER_TOKEN))


def start_all(contest: Contest, plans: dict[int, Plan]) -> list[list[int]]:
    """Start all processes and wait for them; returns the prompts. Ours warms up while vLLM starts."""
    options, vllms = contest.options, vllms_of(plans)
    cache_tokens = cache_tokens_of_each(1 + len(vllms))
    num_prompts = max(plan.num_prompts for plan in plans.values())
    ours = start_ours(options, None if options.smoke else cache_tokens, num_prompts)
    contest.workers[OURS] = ours
    saved = read_task(options.texts, TASK)
    drafts = write_drafts(
        options.scratch, options.model, saved.task, saved.pool_texts, options.draft_tokens,
        min_acceptance=MIN_ACCEPTANCE,
    )  # fmt: skip
    facts = ours.answer(contest.deadline.limit(START_LIMIT_S))
    contest.rows.add("vllm", "start/model", cache_tokens=cache_tokens, **facts)
    assert tokenizer_hash(options.folder) == tokenizer_hash(options.model)
    for name in vllms:
        contest.workers[name] = start_vllm(options, name, cache_tokens, drafts if name == VLLM_OURS else None)
    prompts = [prompt.tolist() for prompt in saved.task.held_out]  # without our process there are fewer
    for worker in list(contest.workers.values()):
        try:
            prompts = worker.answer(contest.deadline.limit(START_LIMIT_S)).get("prompts", prompts)
        except WorkerError as error:
            contest.drop(worker, f"did not start: {error}")
            continue
        seconds = worker.answered_s - worker.begun_s
        contest.rows.add("vllm", f"start/{worker.name}", seconds=seconds, device_used_mb=device_memory_mb())
        print(f"[{contest.deadline.left():4.0f} s left] {worker.name} was ready at {seconds:.0f} s", flush=True)
        if worker is ours:
            batch, plan = next(iter(plans.items()))
            contest.warm_up(batch, prompts, plan, (PLAIN, *drafted_systems(plan)))
    return prompts


def medians_of(rows: list[dict]) -> dict[int, dict[str, float]]:
    """Median tokens per second of each system, by batch size."""
    speeds: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        if "tokens_per_s" in row:
            speeds.setdefault(row["batch"], {}).setdefault(row["system"], []).append(row["tokens_per_s"])
    return {
        batch: {name: statistics.median(values) for name, values in of_batch.items()}
        for batch, of_batch in speeds.items()
    }


def figures_of(rows: list[dict]) -> Iterator[Figure]:
    """The figures that compare our engine with vLLM, plain and with the same pools."""
    for batch, medians in medians_of(rows).items():
        relaxed = max((speed for name, speed in medians.items() if name.startswith("relaxed")), default=None)
        for system, speed, other, wanted in (
            (PLAIN, medians.get(PLAIN), VLLM, 0.95),
            ("relaxed drafts", relaxed, VLLM, 1.3),
            ("relaxed drafts", relaxed, VLLM_OURS, 1.1),
        ):
            if speed and other in medians:
                about = f"batch {batch}: {system} over {other}, tokens per second"
                yield Figure.at_least(about, speed / medians[other], wanted)


def print_table(rows: list[dict]) -> None:
    """Print median tokens per second and their ratios to plain vLLM by batch size; then starts and failures."""
    for batch, medians in medians_of(rows).items():
        for name, speed in medians.items():
            ratio = f"{speed / medians[VLLM]:.2f} of vLLM" if VLLM in medians else ""
            print(f"batch {batch:3}  {name:15}  {speed:8.0f} tokens/s  {ratio}")
    for row in rows:
        if row.get("item", "").startswith("start/") or "failed" in row:
            print({key: row[key] for key in row if key not in ("phase", "failed")} | {"failed": "failed" in row})


def main(words: list[str] | None = None) -> None:
    """Start all processes, let them take turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl and logs")
    parser.add_argument("--texts", type=Path, required=True, help="folder that pool_texts.py wrote")
    parser.add_argument("--deadline", type=float, default=420.0, help="seconds of the whole run")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the small model")
    parser.add_argument("--geometry", default="8b-gqa")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/widened"), help="model folder to write")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/gpu-vllm"), help="folder of the drafts' pool")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256, 1, 32], help="batch sizes, in this order")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="rounds per batch size; more if time is left")
    parser.add_argument("--draft-tokens", type=int, default=4, help="draft tokens of our proposer in vLLM")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--vllm-path", help="additional folder of packages for vLLM's processes")
    parser.add_argument("--json", type=Path, help="write the rows and figures to this file")
    parser.add_argument("--smoke", action="store_true", help="everything once, on a CPU with a tiny model")
    options = parser.parse_args(words)
    deadline = Deadline(options.deadline)
    begin(1)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        options.geometry, options.batch = "tiny", [2, 4]
    plans = {batch: SMOKE if options.smoke else PLANS[TASK, batch] for batch in options.batch}
    ends = json.loads((options.model / "config.json").read_text())["eos_token_id"]
    end_ids = (ends,) if isinstance(ends, int) else tuple(ends)
    contest = Contest(options, deadline, Rows(options.out / "rows.jsonl"), {}, end_ids)
    try:
        prompts = start_all(contest, plans)
        rounds = range(1 if options.smoke else options.rounds)
        while deadline.left() > 0 and contest.workers:
            for batch, plan in plans.items():
                if deadline.left() > 0:
                    contest.batch(batch, prompts[: plan.num_prompts], plan, rounds)
            if options.smoke:
                break
            rounds = range(rounds.stop, rounds.stop + 1)
    except WorkerError as error:
        contest.rows.add("vllm", "ours", failed=str(error)[:2000])
        print(f"our engine's process: {error}", flush=True)
    finally:
        for worker in list(contest.workers.values()):
            worker.close()
        rows = contest.rows.read()
        print_table(rows)
        finish(options.json, list(figures_of(rows)), [], {"rows": rows})


if __name__ == "__main__":
    main()
