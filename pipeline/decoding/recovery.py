"""Recovery from a failed step: fewer sequences go on, or only the sequences fail that cannot be run alone.

It calls the engine's `_execute`, `_verify` and `_update` again, and reads its cache.
"""

import logging
import traceback

import torch

from laserbatch.pipeline.decoding.acceptance import Acceptance
from laserbatch.pipeline.decoding.device_memory import DeviceLost, is_device_lost, is_out_of_memory
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.sequence import DecodingSequence, GenerationFailure
from laserbatch.pipeline.decoding.step import Step, Stream
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.errors import first_line

logger = logging.getLogger(__name__)

Outcomes = dict[DecodingSequence, str | GenerationFailure]  # of the sequences that ended: finish reasons, failures


def recover(engine, step: Step, stream: Stream, error: Exception) -> Outcomes:
    """Recover from a failed step: if memory ran out, fewer sequences go on; otherwise each sequence is run alone.

    Raises DeviceLost: no step can be run any more, whatever the sequence.
    """
    require_device(error)
    scheduler = stream.scheduler
    if is_out_of_memory(error):
        is_alone = len(scheduler.live) == 1
        if not is_alone:
            scheduler.preempt(len(scheduler.live) // 2)
        # The activations of the forward that failed, graphs, and what the cache holds beyond live sequences are freed.
        step.output = None
        traceback.clear_frames(error.__traceback__)
        if engine.runner.buffered is not None:
            engine.runner.buffered.drop_graphs()
        engine.cache.shrink(scheduler.max_tokens_of_a_text())
        engine.num_forwards += 1  # a step that another stream submitted runs again, since its slots were moved
        torch.cuda.empty_cache()
        if not is_alone:
            return {}
    message = "a step of %d sequences failed (%s); each sequence is tried alone"
    logger.warning(message, len(step.sequences), error, exc_info=error)
    whole = zip(step.sequences, step.feeds, step.trees, strict=True)
    steps = [Step([sequence], [feed], TreeBatch.of([tree])) for sequence, feed, tree in whole]
    return _one_by_one(engine, steps, stream)


def without_drafts(engine, step: Step, accepted: list[Acceptance | None], stream: Stream) -> Outcomes:
    """Repeat the step without a draft for sequences whose logits are not finite, since a draft may have spoiled them.

    A sequence that had no draft fails.
    """
    outcomes, alone = {}, []
    for i in (i for i, acceptance in enumerate(accepted) if acceptance is None):
        sequence = step.sequences[i]
        if step.trees.sizes[i]:
            alone.append(Step([sequence], [step.feeds[i]], TreeBatch.empty(1)))
        else:
            outcomes |= _failed(sequence, "not-finite: the model's logits are not finite")
    return outcomes | _one_by_one(engine, alone, stream)


def fail_alone(cache: KVCache, sequence: DecodingSequence) -> Outcomes:
    """Fail a lone sequence that has no room, because the device lacks the memory that the cache's bound promised.

    Raises RuntimeError: another stream of the same engine holds the room.
    """
    if cache.num_live_rows > 1:
        raise RuntimeError("the engine's KV cache is held by another, unfinished generate()")
    return _failed(sequence, f"too-long: prompt and answer exceed the KV cache of {cache.max_tokens} tokens")


def _one_by_one(engine, steps: list[Step], stream: Stream) -> Outcomes:
    """Run steps of one sequence each, so that only the sequences fail whose step cannot be run."""
    outcomes: Outcomes = {}
    for step in steps:
        torch.cuda.empty_cache()
        try:
            engine._execute(step)
            accepted = engine._verify(step, stream.verifier)
        except Exception as error:  # whatever the error, only this text fails; others go on
            require_device(error)
            outcomes |= _failed(step.sequences[0], f"model-error: {type(error).__name__}: {first_line(error)}")
            continue
        outcomes |= engine._update(step, accepted, stream)
    return outcomes


def require_device(error: Exception) -> None:
    """Raise DeviceLost if an error leaves no device to go on with, so that no text is to blame for it."""
    if isinstance(error, DeviceLost):
        raise error
    if is_device_lost(error):
        raise DeviceLost(f"this process cannot use its CUDA device any more: {first_line(error)}") from error


def _failed(sequence: DecodingSequence, reason: str) -> Outcomes:
    return {sequence: GenerationFailure(sequence.request.request_id, reason)}
