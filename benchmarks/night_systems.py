"""The four systems of `night.py`, each reduced to one call: a list of prompts in, one `Pass` out.

All hold the same weights in float32 and count the same tokens: everything the model wrote, end token included. Knows
no task and keeps no time statistics.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pipeline.decoding.drafters import Drafter, NoDrafter, drafter_from
from pipeline.decoding.engine import Engine, GenerationFailure, GenerationRequest, GenerationResult
from pipeline.decoding.settings import DecodingSettings
from pipeline.decoding.verifiers import Verifier, verifier_from
from retrieval_pools.pool import Pool

MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True)
class Pass:
    """One system's run over a list of prompts.

    `texts` are token ids without the end token, in prompt order; `num_steps` are verify steps summed over texts.
    """

    wall_s: float
    num_tokens: int
    num_steps: int
    texts: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens written a second, prefill included."""
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens a text grows by in one step, bonus token included."""
        return self.num_tokens / self.num_steps


class TransformersGenerate:
    """`transformers.generate`, greedy, in static left-padded batches."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        config = self._model.generation_config
        ends = config.eos_token_id
        self._end_ids = {ends} if isinstance(ends, int) else set(ends)
        self._pad_id = config.pad_token_id if config.pad_token_id is not None else min(self._end_ids)

    def run(self, prompts: Sequence[np.ndarray], batch: int, max_new_tokens: int) -> Pass:
        """Answer all prompts, `batch` at a time."""
        texts: list[tuple[int, ...]] = []
        num_tokens = 0
        start_s = time.perf_counter()
        for start in range(0, len(prompts), batch):
            for row in self._batch(prompts[start : start + batch], max_new_tokens):
                end = next((i for i, token in enumerate(row) if token in self._end_ids), None)
                texts.append(tuple(row[:end]))
                num_tokens += len(row) if end is None else end + 1
        wall_s = time.perf_counter() - start_s
        return Pass(wall_s, num_tokens, num_tokens, tuple(texts))

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[np.ndarray], max_new_tokens: int) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self._pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=self._pad_id,
            eos_token_id=sorted(self._end_ids),
        )
        return output[:, width:].tolist()


class EngineSystem:
    """Our engine with one drafter and one verifier; `drafter` None decodes plainly."""

    def __init__(self, engine: Engine, pool: Pool | None, verifier_name: str) -> None:
        self._engine = engine
        self._drafter = NoDrafter() if pool is None else drafter_from(engine.settings, pool)
        self._verifier = verifier_from(engine.settings.model_copy(update={"verifier": verifier_name}))

    def run(self, prompts: Sequence[np.ndarray], batch: int, max_new_tokens: int) -> Pass:
        """Answer all prompts; `batch` is the engine's own and only checked."""
        assert batch == self._engine.settings.batch_size
        start_s = time.perf_counter()
        results = {
            result.request_id: result
            for result in generate(self._engine, prompts, max_new_tokens, self._drafter, self._verifier)
        }
        wall_s = time.perf_counter() - start_s
        ordered = [results[str(number)] for number in range(len(prompts))]
        return Pass(
            wall_s=wall_s,
            num_tokens=sum(len(result.token_ids) + (result.finish_reason == "end_of_text") for result in ordered),
            num_steps=sum(result.num_steps for result in ordered),
            texts=tuple(tuple(result.token_ids.tolist()) for result in ordered),
        )


def generate(
    engine: Engine, prompts: Sequence[np.ndarray], max_new_tokens: int, drafter: Drafter, verifier: Verifier
) -> Iterator[GenerationResult]:
    """The engine's results on prompts numbered from 0; a prompt that fails ends the benchmark."""
    requests = (
        GenerationRequest(
            request_id=str(number), prompt_ids=prompt, previous_ids=None, group=None, max_new_tokens=max_new_tokens
        )
        for number, prompt in enumerate(prompts)
    )
    for result in engine.generate(requests, drafter, verifier):
        if isinstance(result, GenerationFailure):
            raise SystemExit(f"prompt {result.request_id} failed: {result.reason}")
        yield result


def load_engine(model_dir: Path, batch: int, num_threads: int) -> Engine:
    """Our engine in float32 on the CPU."""
    settings = DecodingSettings(
        dtype="float32", batch_size=batch, num_threads=num_threads, max_draft_tokens=MAX_DRAFT_TOKENS
    )
    return Engine.from_pretrained(model_dir, settings, device="cpu")
