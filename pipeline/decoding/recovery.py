"""What is done where a step fails: fewer sequences go on, or only those fail that cannot be run alone."""

import logging
from typing import Protocol

import torch

from laserbatch.pipeline.decoding.acceptance import Acceptance
from laserbatch.pipeline.decoding.endings import Ending
from laserbatch.pipeline.decoding.memory.device_memory import is_out_of_memory
from laserbatch.pipeline.decoding.memory.kv_cache import KVCache
from laserbatch.pipeline.decoding.requests import GenerationFailure
from laserbatch.pipeline.decoding.sequence import Sequence
from laserbatch.pipeline.decoding.step import Step, Stream
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers.verifier import Verifier
from laserbatch.pipeline.errors import first_line

logger = logging.getLogger(__name__)

Outcomes = dict[int, Ending | GenerationFailure]  # of the sequences that ended, by `id`


class Hops(Protocol):
    """What is asked of an engine: its memory, and the hops of a step after the draft."""

    cache: KVCache
    device: torch.device

    def _forward(self, step: Step) -> None: ...

    def _verify(self, step: Step, verifier: Verifier) -> list[Acceptance | None]: ...

    def _commit(self, step: Step, accepted: list[Acceptance | None], stream: Stream) -> Outcomes: ...


def recover(engine: Hops, step: Step, stream: Stream, error: Exception) -> Outcomes:
    """A step failed: where memory ran out, fewer sequences go on; else those fail that cannot be run alone."""
    scheduler = stream.scheduler
    if is_out_of_memory(error) and len(scheduler.live) > 1:
        scheduler.preempt(len(scheduler.live) // 2)
        engine.cache.drop_unused()
        _free_memory(engine.device)
        return {}
    _free_memory(engine.device)
    logger.warning("a step of %d sequences failed (%s); trying them one at a time", len(step.sequences), error)
    alone = [
        Step([sequence], [feed], TreeBatch.of([tree]))
        for sequence, feed, tree in zip(step.sequences, step.feeds, step.trees, strict=True)
    ]
    return _one_by_one(engine, alone, stream)


def without_drafts(engine: Hops, step: Step, accepted: list[Acceptance | None], stream: Stream) -> Outcomes:
    """Where logits are not finite, a draft may have spoiled them: such a sequence takes the step again without one.

    It fails where it had none.
    """
    outcomes, alone = {}, []
    for i, (sequence, feed) in enumerate(zip(step.sequences, step.feeds, strict=True)):
        if accepted[i] is not None:
            continue
        if step.trees.sizes[i]:
            alone.append(Step([sequence], [feed], TreeBatch.empty(1)))
        else:
            reason = "not-finite: the model's logits are not finite"
            outcomes[id(sequence)] = GenerationFailure(sequence.request.request_id, reason)
    return outcomes | _one_by_one(engine, alone, stream)


def fail_alone(cache: KVCache, sequence: Sequence) -> Outcomes:
    """A lone sequence has no room, since memory for what its limit promised could not be had.

    Raises
    ------
    RuntimeError : another stream of the same engine holds the room.
    """
    if cache.num_live_rows > 1:
        raise RuntimeError("the engine's KV cache is held by another, unfinished generate()")
    reason = f"too-long: prompt and answer exceed the KV cache of {cache.max_tokens} tokens"
    return {id(sequence): GenerationFailure(sequence.request.request_id, reason)}


def _one_by_one(engine: Hops, steps: list[Step], stream: Stream) -> Outcomes:
    """Steps of one sequence each, so that only those fail that cannot be run."""
    outcomes: Outcomes = {}
    for step in steps:
        try:
            engine._forward(step)
            accepted = engine._verify(step, stream.verifier)
        except Exception as error:
            _free_memory(engine.device)
            reason = f"model-error: {type(error).__name__}: {first_line(error)}"
            (sequence,) = step.sequences
            outcomes[id(sequence)] = GenerationFailure(sequence.request.request_id, reason)
            continue
        outcomes |= engine._commit(step, accepted, stream)
    return outcomes


def _free_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
