"""vLLM as a peer of `engine.py`: plain, or with its own n-gram drafts. Needs vllm, which nothing else here does.

It answers the same token ids with the same weights, greedily, and its continuous batching has as many places as our
batch. Its cache of prompts is emptied before each pass, as ours is.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from engine_systems import Contestant
from night_systems import Pass

VLLM_SYSTEMS = {
    "vllm": None,
    "vllm-ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
}
MEMORY_SHARE = 0.45  # of the device: our engine works beside it


class Vllm:
    """One loaded vLLM.

    Parameters
    ----------
    system : a name of VLLM_SYSTEMS.
    max_tokens : of a prompt and its answer.
    """

    def __init__(self, model_dir: Path, dtype: str, system: str, batch: int, max_tokens: int) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=str(model_dir),
            dtype=dtype,
            max_num_seqs=batch,
            max_model_len=max_tokens,
            gpu_memory_utilization=MEMORY_SHARE,
            speculative_config=VLLM_SYSTEMS[system],
            disable_log_stats=True,
        )

    def run(self, prompts: Sequence[np.ndarray], batch: int, max_new_tokens: int) -> Pass:
        """Answer all prompts."""
        from vllm import SamplingParams

        self._llm.reset_prefix_cache()
        parameters = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)
        asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        start_s = time.perf_counter()
        outputs = self._llm.generate(asked, parameters, use_tqdm=False)
        wall_s = time.perf_counter() - start_s
        written = [output.outputs[0] for output in outputs]
        text_tokens = tuple(len(one.token_ids) for one in written)  # the end token is one of them
        texts = tuple(tuple(one.token_ids[: len(one.token_ids) - (one.finish_reason == "stop")]) for one in written)
        num_tokens = sum(text_tokens)
        return Pass(wall_s, num_tokens, num_tokens, texts, text_tokens=text_tokens)


class VllmPeer:
    """vLLM in the place of `engine_systems.Peers`; one batch size a run, since it is loaded for that one."""

    def __init__(self, model_dir: Path, dtype: str, system: str, batch: int, max_tokens: int) -> None:
        self.left_out: dict[str, str] = {}
        self._contestant = Contestant(system, None, Vllm(model_dir, dtype, system, batch, max_tokens))

    def at_batch(self, batch: int) -> Iterator[Contestant]:
        """The one system."""
        yield self._contestant
