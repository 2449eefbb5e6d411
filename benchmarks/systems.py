"""The measured systems, ours and peers, each with one method `run`: a list of prompts in, one `Pass` out.

All have the same weights and count the same tokens: everything that the model wrote, with end tokens.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from laserbatch.pipeline.decoding.drafters import Drafter, NoDrafter, Observation
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.sequence import (
    DecodingSequence,
    GenerationFailure,
    GenerationRequest,
    GenerationResult,
    Outcome,
)
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.decoding.step import Step, Stream
from laserbatch.pipeline.decoding.step_budget import StepBudget
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy, Verifier
from laserbatch.retrieval_pools.step_cost import StepCost

logger = logging.getLogger("benchmarks")

MIN_ACCEPTANCE = 0.07


@dataclass(frozen=True)
class Pass:
    """One system's run over a list of prompts.

    `texts` are token ids without end tokens, in the order of prompts. `num_steps`, `num_drafted` and `num_accepted` are
    verify steps and tokens summed over texts. `drafting_s` is the part of `wall_s` spent on drafting, if it was
    watched. `text_tokens` divides `num_tokens` among the texts. `tree_sizes` are the draft tokens of each step of a
    text, if they were watched.
    """

    wall_s: float
    num_tokens: int
    num_steps: int
    texts: tuple[tuple[int, ...], ...]
    num_drafted: int = 0
    num_accepted: int = 0
    drafting_s: float = 0.0
    text_tokens: tuple[int, ...] = ()
    tree_sizes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def joined(cls, passes: Sequence["Pass"]) -> "Pass":
        """Join several runs over different prompts."""
        columns = {field.name: [getattr(each, field.name) for each in passes] for field in fields(cls)}
        sums: dict[str, Any] = {name: sum(column[1:], column[0]) for name, column in columns.items()}
        return cls(**sums)

    @property
    def tokens_per_s(self) -> float:
        """Written tokens per second, with the time of prompts."""
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a text gains per step, with the bonus token."""
        return self.num_tokens / self.num_steps


class TransformersGenerate:
    """`transformers.generate` in static left-padded batches: greedy, or sampled at a temperature above 0.

    `options` are further arguments of `generate`; assisted decoding needs batches of one prompt.
    """

    def __init__(self, model, temperature: float = 0.0, **options) -> None:
        self._model, self._options = model, options
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self._choice = sampling if temperature else {"do_sample": False}
        self._forwards: list[int] = []  # number of tokens of each forward of the current batch
        self._num_layers = model.config.num_hidden_layers
        model.register_forward_pre_hook(self._watch, with_kwargs=True)
        config = self._model.generation_config
        ends = config.eos_token_id
        self._end_ids = {ends} if isinstance(ends, int) else set(ends)
        self._pad_id = config.pad_token_id if config.pad_token_id is not None else min(self._end_ids)

    @classmethod
    def load(cls, model_dir: Path, temperature: float = 0.0) -> "TransformersGenerate":
        """Load a model folder, in float32 on the CPU."""
        return cls(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval(), temperature)

    def run(self, prompts: Sequence[np.ndarray], batch: int, max_new_tokens: int) -> Pass:
        """Answer all prompts, `batch` at a time."""
        texts: list[tuple[int, ...]] = []
        text_tokens: list[int] = []
        num_steps = num_drafted = 0
        start_s = time.perf_counter()
        for start in range(0, len(prompts), batch):
            chosen = prompts[start : start + batch]
            self._forwards.clear()
            rows = self._batch(chosen, max_new_tokens)
            if self._options:
                num_steps += len(self._forwards)
                num_drafted += sum(self._forwards) - len(chosen[0]) - (len(self._forwards) - 1)
            for row in rows:
                end = next((i for i, token in enumerate(row) if token in self._end_ids), None)
                texts.append(tuple(row[:end]))
                text_tokens.append(len(row) if end is None else end + 1)
        wall_s = time.perf_counter() - start_s
        num_tokens = sum(text_tokens)
        num_steps = num_steps if self._options else num_tokens
        return Pass(
            wall_s,
            num_tokens,
            num_steps,
            tuple(texts),
            num_drafted,
            num_accepted=num_tokens - num_steps,
            text_tokens=tuple(text_tokens),
        )

    def _watch(self, model, arguments: tuple, options: dict) -> None:
        if model.config.num_hidden_layers == self._num_layers:  # otherwise its first layers draft
            self._forwards.append(options["input_ids"].shape[1])

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[np.ndarray], max_new_tokens: int) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), self._pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        device = self._model.device
        output = self._model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            num_beams=1,  # our engine follows or refuses all else that the model's generation_config.json asks for
            max_new_tokens=max_new_tokens,
            pad_token_id=self._pad_id,
            eos_token_id=sorted(self._end_ids),
            **self._choice,
            **self._options,
        )
        return output[:, width:].tolist()


class TimedDrafter(Drafter):
    """Wraps a drafter and sums the seconds that it takes to draft and to observe steps."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.observes, self.forget = drafter, drafter.observes, drafter.forget
        self.seconds = 0.0

    def observe(self, observation: Observation) -> None:
        start_s = time.perf_counter()
        self._drafter.observe(observation)
        self.seconds += time.perf_counter() - start_s

    def draft_all(self, sequences: list[DecodingSequence], max_depths: list[int]) -> TreeBatch:
        start_s = time.perf_counter()
        trees = self._drafter.draft_all(sequences, max_depths)
        self.seconds += time.perf_counter() - start_s
        return trees


class EngineSystem:
    """Our engine with one drafter and one verifier.

    Parameters
    ----------
    budget : the limits of drafts; None: those of the engine's settings.
    groups : the pool group that a prompt's drafts prefer, by the prompt's bytes; None: no group.
    step_cost : the cost by which each step drafts only as much of the budget as pays; None: all of it.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter,
        verifier: Verifier,
        budget: Budget | None = None,
        groups: Mapping[bytes, str] | None = None,
        step_cost: StepCost | None = None,
    ) -> None:
        self._engine = engine
        self._drafter = TimedDrafter(drafter)
        self._verifier = verifier
        self._budget = budget
        self._groups = groups
        self._step_cost = step_cost

    @classmethod
    def plain(cls, engine: Engine) -> "EngineSystem":
        """Greedy decoding without drafts."""
        return cls(engine, NoDrafter(), Greedy())

    def run(self, prompts: Sequence[np.ndarray], batch: int, max_new_tokens: int) -> Pass:
        """Answer all prompts; `batch` must be the engine's batch size."""
        assert batch == self._engine.settings.batch_size
        self._engine.reset_prefix_cache()
        return self.timed(prompts, max_new_tokens)

    def timed(self, prompts: Sequence[np.ndarray], max_new_tokens: int) -> Pass:
        """Like `run`, but without emptying the engine's prefix cache."""
        groups = [self._groups[prompt.tobytes()] if self._groups else None for prompt in prompts]
        tree_sizes: list[list[int]] = [[] for _ in prompts]

        def watched(step: Step | None, stream: Stream):
            if step is None:  # no room for even one text, which then fails
                return finish_step(step, stream)
            before = [sequence.num_steps for sequence in step.sequences]
            ended = finish_step(step, stream)
            for sequence, was, size in zip(step.sequences, before, step.trees.sizes.tolist(), strict=True):
                if sequence.num_steps > was:
                    tree_sizes[int(sequence.request.request_id)].append(size)
            return ended

        finish_step, self._engine.finish_step = self._engine.finish_step, watched
        self._drafter.seconds = 0.0
        budget = self._budget, self._step_cost and StepBudget(self._step_cost)
        start_s = time.perf_counter()
        ordered = generate(self._engine, prompts, max_new_tokens, self._drafter, self._verifier, *budget, groups)
        self._engine.finish_step = finish_step
        wall_s = time.perf_counter() - start_s
        text_tokens = [len(result.token_ids) + (result.finish_reason == "end_of_text") for result in ordered]
        return Pass(
            wall_s=wall_s,
            num_tokens=sum(text_tokens),
            num_steps=sum(result.num_steps for result in ordered),
            texts=tuple(tuple(result.token_ids.tolist()) for result in ordered),
            num_drafted=sum(result.num_drafted for result in ordered),
            num_accepted=sum(result.num_accepted for result in ordered),
            drafting_s=self._drafter.seconds,
            text_tokens=tuple(text_tokens),
            tree_sizes=tuple(map(tuple, tree_sizes)),
        )


def generate(
    engine: Engine,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    drafter: Drafter,
    verifier: Verifier,
    budget: Budget | None = None,
    step_budget: StepBudget | None = None,
    groups: Sequence[str | None] | None = None,
) -> list[GenerationResult]:
    """The engine's results, in the order of the prompts; a prompt that fails ends the benchmark."""
    requests = (
        GenerationRequest(
            request_id=str(number), prompt_ids=prompt, previous_ids=None, group=group, max_new_tokens=max_new_tokens
        )
        for number, (prompt, group) in enumerate(zip(prompts, groups or [None] * len(prompts), strict=True))
    )
    return in_order(engine.generate(requests, drafter, verifier, budget, step_budget))


def in_order(outcomes: Iterable[Outcome]) -> list[GenerationResult]:
    """The results of numbered prompts, in their order; a prompt that fails ends the benchmark."""
    results = []
    for outcome in outcomes:
        if isinstance(outcome, GenerationFailure):
            raise SystemExit(f"prompt {outcome.request_id} failed: {outcome.reason}")
        results.append(outcome)
        if len(results) % 100 == 0:
            logger.info("%d texts written", len(results))
    return sorted(results, key=lambda result: int(result.request_id))
