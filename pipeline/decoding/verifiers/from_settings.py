"""The verifier that the settings name."""

from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers.greedy import Greedy
from laserbatch.pipeline.decoding.verifiers.probability import ProbabilityThreshold
from laserbatch.pipeline.decoding.verifiers.relaxed import Relaxed
from laserbatch.pipeline.decoding.verifiers.top_k import TopK
from laserbatch.pipeline.decoding.verifiers.verifier import Verifier


def verifier_from(settings: DecodingSettings) -> Verifier:
    """The verifier that the settings name."""
    if settings.verifier == "greedy":
        return Greedy()
    if settings.verifier == "top_k":
        return TopK(settings.top_k)
    if settings.verifier == "probability":
        return ProbabilityThreshold(settings.min_probability)
    return Relaxed(settings.top_k, settings.min_probability)
