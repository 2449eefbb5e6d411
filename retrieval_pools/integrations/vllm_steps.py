"""Preparing vLLM for `vllm.PoolProposer`: its configuration, and measuring the cost of its steps.

No compiled code is imported here: vLLM 0.32 on a CPU cannot start in a process that has loaded llvmlite. vLLM itself
imports the proposer's file later.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from laserbatch.retrieval_pools.atomic import atomic_path
from laserbatch.retrieval_pools.errors import PoolError

PROPOSERS = "laserbatch.retrieval_pools.integrations.vllm"
TIMER = "laserbatch.retrieval_pools.integrations.vllm_steps.StepTimer"
TIMES_VARIABLE = "LASERBATCH_STEP_TIMES"
PROMPT_TOKENS, NUM_ROUNDS = 256, 15  # of a measurement; each round has a step of every draft size


def speculative_config(model: Path | str, num_speculative_tokens: int = 8) -> dict[str, Any]:
    """vLLM's `speculative_config`; first checks all that the proposer needs, so that faults show before a model loads.

    `model` is the folder of the model, with its tokenizer. Raises PoolError as `vllm.PoolProposer` does, or if this
    vLLM takes no proposers.
    """
    try:
        spec = find_spec("vllm.v1.spec_decode.custom_class_proposer")
    except ModuleNotFoundError:  # one of its parent packages is missing
        spec = None
    if spec is None:
        raise PoolError("vLLM is not installed, or has no `custom_class` proposers; install vLLM 0.32, which has them")
    checked = subprocess.run([sys.executable, "-m", PROPOSERS, str(model)], capture_output=True, text=True, check=False)
    if checked.returncode:
        raise PoolError(checked.stderr.strip().splitlines()[-1])
    return _config_of(f"{PROPOSERS}.PoolProposer", num_speculative_tokens)


def _config_of(proposer: str, num_speculative_tokens: int) -> dict[str, Any]:
    return {"method": "custom_class", "model": proposer, "num_speculative_tokens": num_speculative_tokens}


class StepTimer:
    """Proposes random tokens for each row, in each draft size in turn, and writes the durations of steps to a file."""

    def __init__(self, vllm_config: Any) -> None:
        self._rng = np.random.default_rng(0)
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._sizes = draft_sizes(vllm_config.speculative_config.num_speculative_tokens)
        self._path = Path(os.environ[TIMES_VARIABLE])
        self._lengths = np.empty(0)
        self._size, self._num_steps, self._end_s = 0, 0, 0.0

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Does nothing: there is no model."""

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None) -> list[list[int]]:
        """Like `vllm.PoolProposer.propose`, but proposes random tokens."""
        seconds = time.perf_counter() - self._end_s
        num_rows = len(sampled_token_ids)
        lengths = np.array(num_tokens_no_spec[:num_rows])
        before = lengths - [len(sampled) for sampled in sampled_token_ids]
        if np.array_equal(before, self._lengths):  # no text came or left, and no prompt was read
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{num_rows} {self._size} {seconds}\n")
        self._size = self._sizes[self._num_steps % len(self._sizes)]
        self._num_steps += 1
        drafts = self._rng.integers(self._vocab_size, size=(num_rows, self._size)).tolist()
        self._lengths, self._end_s = lengths, time.perf_counter()
        return drafts


def draft_sizes(longest: int) -> list[int]:
    """The numbers of draft tokens per text that are timed: 0, powers of two, and `longest`."""
    return [0, *(1 << power for power in range(longest.bit_length()) if 1 << power < longest), longest]


def measure_step_cost(
    out: Path, model: str, batch_sizes: Sequence[int] = (1, 4, 16), num_speculative_tokens: int = 8, **engine: Any
) -> None:
    """Time the steps of an engine, and write a file that `StepCost` reads. Among steps of a size the fastest counts.

    `engine` has arguments of `vllm.LLM`: those of the engine that the cost will be used for.
    """
    # The checker takes vllm.py of this folder for the engine.
    from vllm import LLM, SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        os.environ[TIMES_VARIABLE] = str(times)  # the engine may be another process
        llm = LLM(model, **engine, speculative_config=_config_of(TIMER, num_speculative_tokens))
        rng, vocab_size = np.random.default_rng(0), llm.llm_engine.model_config.get_vocab_size()
        for batch_size in batch_sizes:
            prompts = rng.integers(vocab_size, size=(batch_size, PROMPT_TOKENS)).tolist()
            most = 2 * NUM_ROUNDS * len(draft_sizes(num_speculative_tokens))  # a random token may be accepted
            sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        rows = [line.split() for line in times.read_text(encoding="utf-8").splitlines()]
    durations: dict[tuple[int, int], list[float]] = {}
    for batch_size, size, seconds in rows:
        durations.setdefault((int(batch_size), int(size)), []).append(float(seconds))
    steps = []
    for batch_size in batch_sizes:
        least_s = 0.0  # durations must not fall with the number of tokens, even if they were timed so
        for size in draft_sizes(num_speculative_tokens):
            least_s = max(least_s, min(durations[batch_size, size]))
            steps.append({"batch_size": batch_size, "num_tokens": batch_size * (1 + size), "seconds": least_s})
    text = json.dumps({"name": "measured in vLLM", "steps": steps}, indent=1)
    with atomic_path(out) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Measure the cost of an engine's steps."""
    parser = argparse.ArgumentParser(description=measure_step_cost.__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--out", type=Path, required=True, help="step cost to write")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16], help="numbers of sequences in a batch")
    parser.add_argument("--tokens", type=int, default=8, help="num_speculative_tokens")
    parser.add_argument("--engine", type=json.loads, default={}, help="other arguments of vllm.LLM, a JSON object")
    options = parser.parse_args()
    measure_step_cost(options.out, options.model, options.batch, options.tokens, **options.engine)


if __name__ == "__main__":
    main()
