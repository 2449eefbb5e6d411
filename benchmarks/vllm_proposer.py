"""vLLM plain, with its own n-gram and suffix drafts, and with drafts from our pools: tokens a second, in turns.

    make .venv-vllm/.installed
    .venv-vllm/bin/python benchmarks/vllm_proposer.py --quick --json vllm.json

Long answers to held-out prompts; the pool has the model's own answers to other prompts. Each vLLM is a process of its
own with one thread, and they answer the same prompts in an order that is drawn anew: trust ratios within one run. Texts
are compared token by token. The exit code is 0 whether figures are met or not.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from common import Figure, Spread, benchmark_parser, finish, scale_of, show_progress, turns
from tasks import Task, TaskSize, reki_task
from transformers import AutoTokenizer
from vllm_worker import MARK

from laserbatch.retrieval_pools.calibration.calibrate import calibrate
from laserbatch.retrieval_pools.calibration.replay import DraftOptions, ReplayText
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.integrations.vllm import SETTINGS_VARIABLE
from laserbatch.retrieval_pools.integrations.vllm_steps import PROPOSERS, speculative_config

logger = logging.getLogger("benchmarks")

BATCHES = (1, 4, 16)
MAX_DRAFT_TOKENS = 8
ENGINE = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": max(BATCHES), "enforce_eager": True, "seed": 0}
ON_A_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": MAX_DRAFT_TOKENS, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": MAX_DRAFT_TOKENS}
OURS = "vllm-laserbatch"
POOL_TOKENS = {"full": 512, "quick": 384, "smoke": 24}  # of an answer in the pool
WARM_UP_TOKENS = 32
WANTED = {1: 2.0}  # over plain; elsewhere LEAST
LEAST = 0.98


class Served:
    """A vLLM in a process of its own."""

    def __init__(self, model: Path, speculative: dict | None) -> None:
        told = {"model": str(model), "engine": ENGINE, "speculative_config": speculative}
        command = [sys.executable, str(Path(__file__).with_name("vllm_worker.py")), json.dumps(told)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self._process = subprocess.Popen(command, env=os.environ | ON_A_CPU, **pipes)
        self._answer()

    def write(self, prompts: Sequence[np.ndarray], batch: int, max_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the texts."""
        asked = {"prompts": [prompt.tolist() for prompt in prompts], "batch": batch, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer["texts"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict:
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise SystemExit(f"a vLLM ended with {self._process.wait()}")


def prepare(folder: Path, model: Path, task: Task, texts: list[list[int]]) -> None:
    """A pool of answers, calibrated by some of them, the cost of steps, and the settings that name both."""
    rows = [np.asarray(text[:-1], np.int32) for text in texts]
    names = {"side": "user", "tokenizer_hash": tokenizer_hash(model), "model_id": model.name}
    held_back = list(zip(task.pool_prompts, rows, strict=True))[::4]
    others = build_pool([PoolText(row, "") for k, row in enumerate(rows) if k % 4], folder / "others", **names)
    options = DraftOptions(max_nodes=MAX_DRAFT_TOKENS, min_acceptance=0.01, use_previous=False)
    calibration = calibrate(others, [ReplayText(*one) for one in held_back], options)
    with PoolStore(folder / "pools").publish("v1") as version:
        build_pool([PoolText(row, "") for row in rows], version / "user", calibration=calibration, **names)
    command = [sys.executable, "-m", f"{PROPOSERS}_steps", str(model), "--out", str(folder / "cost.json")]
    command += ["--tokens", str(MAX_DRAFT_TOKENS), "--engine", json.dumps(ENGINE), "--batch", *map(str, BATCHES)]
    subprocess.run(command, env=os.environ | ON_A_CPU, check=True, capture_output=True)
    settings = {"pools": "pools", "side": "user", "step_cost": "cost.json"}
    (folder / "drafts.json").write_text(json.dumps(settings))
    os.environ[SETTINGS_VARIABLE] = str(folder / "drafts.json")


def measure(served: dict[str, Served], task: Task, max_tokens: int, num_rounds: int) -> list[dict]:
    """Rows by system and batch; ratios are within a round."""
    found: dict[tuple[str, int], list[tuple[float, int, list]]] = {}
    orders = turns(list(served))
    for system in served:  # what is compiled when it is first called
        for batch in BATCHES:
            served[system].write(task.held_out[:batch], batch, WARM_UP_TOKENS)
    for number in range(num_rounds):
        for batch in BATCHES:
            prompts = task.held_out[: max(batch, 4)]
            for system in next(orders):
                seconds, texts = served[system].write(prompts, batch, max_tokens)
                found.setdefault((system, batch), []).append((seconds, sum(map(len, texts)), texts))
            speeds = {system: found[system, batch][-1] for system in served}
            told = [f"{system} {num_tokens / seconds:.0f}" for system, (seconds, num_tokens, _) in speeds.items()]
            logger.info("round %d, batch %d, tokens a second: %s", number + 1, batch, ", ".join(told))
    rows = []
    for (system, batch), passes in found.items():
        plain = found["vllm", batch]
        speeds = [num_tokens / seconds for seconds, num_tokens, _ in passes]
        of_plain = [one / (base[1] / base[0]) for one, base in zip(speeds, plain, strict=True)]
        same = [text == other for text, other in zip(passes[0][2], plain[0][2], strict=True)]
        rows.append(
            {
                "system": system,
                "task": task.name,
                "batch": batch,
                "tokens_per_s": Spread.of(speeds),
                "ratio_to_vllm": Spread.of(of_plain),
                "num_texts": len(same),
                "num_texts_as_plain": sum(same),
            }
        )
    return rows


def figures_of(rows: Sequence[dict]) -> list[Figure]:
    """What was asked for of ours."""
    ours = [row for row in rows if row["system"] == OURS]
    return [
        Figure.at_least(
            f"{row['task']}, batch {row['batch']}: vLLM with our drafts over vLLM plain, tokens a second",
            row["ratio_to_vllm"].median, WANTED.get(row["batch"], LEAST),
        )
        for row in ours
    ] + [
        Figure.at_least(
            f"{row['task']}, batch {row['batch']}: share of texts that are those of vLLM plain",
            row["num_texts_as_plain"] / row["num_texts"], 1.0,
        )
        for row in ours
    ]  # fmt: skip


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    return benchmark_parser(__doc__, "data", "model").parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Write the pool's texts, prepare ours, and measure all."""
    arguments = parse_arguments(words)
    show_progress()
    size, max_tokens, num_rounds = scale_of(
        arguments,
        (TaskSize(16, 400), 512, 5),
        (TaskSize(16, 64), 160, 2),
        (TaskSize(16, 12), 24, 1),
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    task = reki_task(tokenizer, arguments.data, size)
    missing = [] if find_spec("arctic_inference") else ["vllm-suffix: arctic-inference is not installed"]
    with tempfile.TemporaryDirectory() as name:
        served = {"vllm": Served(arguments.model, None)}
        texts = served["vllm"].write(task.pool_prompts, max(BATCHES), POOL_TOKENS[arguments.size])[1]
        logger.info("%d texts of the pool are written", len(texts))
        prepare(Path(name), arguments.model, task, texts)
        logger.info("steps are measured: %s", " ".join((Path(name) / "cost.json").read_text().split()))
        served["vllm-ngram"] = Served(arguments.model, NGRAM)
        if not missing:
            served["vllm-suffix"] = Served(arguments.model, SUFFIX)
        served[OURS] = Served(arguments.model, speculative_config(arguments.model, MAX_DRAFT_TOKENS))
        rows = measure(served, task, max_tokens, num_rounds)
        cost = json.loads((Path(name) / "cost.json").read_text())
        for one in served.values():
            one.close()
    table = [
        f"{row['system']:16} batch {row['batch']:2}: {row['tokens_per_s'].median:7.0f} tokens/s, "
        f"{row['ratio_to_vllm']} of plain, {row['num_texts_as_plain']} of {row['num_texts']} texts as plain"
        for row in rows
    ]
    content = {"rows": rows, "step_cost": cost, "missing": missing, "engine": ENGINE}
    finish(arguments.json, figures_of(rows), ["\n".join([*table, *missing])], content)


if __name__ == "__main__":
    main()
