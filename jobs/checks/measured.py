"""Texts written plainly for a limited time, and how fast they came."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.verifiers import verifier_from
from laserbatch.pipeline.engines.own import OwnEngine


@dataclass
class Measured:
    """Texts by the place of their prompt, those that ended in time.

    `prompts_s`: seconds until each text had a token; `tokens_per_s`: of all texts from then on, while all were being
    written. Both are None if the time was too short for that.
    """

    texts: dict[int, GenerationResult | GenerationFailure] = field(default_factory=dict)
    prompts_s: float | None = None
    tokens_per_s: float | None = None


def write_for(
    engine: OwnEngine,
    decoding: DecodingSettings,
    requests: Sequence[GenerationRequest],
    max_s: float,
    speed_s: float | None = None,
) -> Measured:
    """Write a text for each request, whose id is its place, all at once.

    Parameters
    ----------
    decoding : settings of plain decoding, with room for all requests in a batch.
    max_s : texts that have not ended by then are given up.
    speed_s : all are given up once the speed has been measured for so long; None goes on.
    """
    decoder, measured = engine.engine, Measured()
    decoder.reset_prefix_cache()
    stream = decoder.open_stream(requests, NoDrafter(), verifier_from(decoding), Budget(0, 0.0))
    began_s = now_s = time.perf_counter()
    num_at_first = 0
    try:
        while now_s - began_s < max_s:
            measured.texts |= {int(failure.request_id): failure for failure in stream.scheduler.admit()}
            live = stream.scheduler.live
            if not live:
                break
            num_tokens = sum(sequence.num_output for sequence in live)
            if measured.prompts_s is None and len(live) + len(measured.texts) == len(requests):
                if all(sequence.num_steps for sequence in live):
                    measured.prompts_s, num_at_first = now_s - began_s, num_tokens
            elif measured.prompts_s is not None and not measured.texts:
                writing_s = now_s - began_s - measured.prompts_s
                measured.tokens_per_s = (num_tokens - num_at_first) / writing_s
                if speed_s is not None and writing_s >= speed_s:
                    break
            for sequence, outcome in decoder.finish_step(decoder.submit_step(stream), stream):
                place = int(sequence.request.request_id)
                measured.texts[place] = engine.result(sequence, outcome)
            now_s = time.perf_counter()
    finally:
        stream.scheduler.close()
    return measured
