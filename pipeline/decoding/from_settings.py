"""The drafter and the verifier that the settings name."""

from laserbatch.pipeline.decoding.drafters.drafter import Drafter, NoDrafter
from laserbatch.pipeline.decoding.drafters.retrieval import RetrievalDrafter
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.verifiers.greedy import Greedy
from laserbatch.pipeline.decoding.verifiers.probability import ProbabilityThreshold
from laserbatch.pipeline.decoding.verifiers.relaxed import Relaxed
from laserbatch.pipeline.decoding.verifiers.top_k import TopK
from laserbatch.pipeline.decoding.verifiers.verifier import Verifier


def drafter_from(settings: DecodingSettings, pool=None, budget: Budget | None = None, num_threads: int = 1) -> Drafter:
    """The drafter over a pool or none; `budget` None is that of the settings."""
    budget = budget or Budget.of(settings)
    if not settings.drafters or budget.max_draft_tokens == 0:
        return NoDrafter()
    return RetrievalDrafter(pool, settings.drafters, budget.max_draft_tokens, budget.min_acceptance, num_threads)


def verifier_from(settings: DecodingSettings) -> Verifier:
    if settings.verifier == "greedy":
        return Greedy()
    if settings.verifier == "top_k":
        return TopK(settings.top_k)
    if settings.verifier == "probability":
        return ProbabilityThreshold(settings.min_probability)
    return Relaxed(settings.top_k, settings.min_probability)
