"""The drafter that settings name."""

from laserbatch.pipeline.decoding.drafters.drafter import Drafter, NoDrafter
from laserbatch.pipeline.decoding.drafters.retrieval import RetrievalDrafter
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings


def drafter_from(settings: DecodingSettings, pool=None, budget: Budget | None = None, num_threads: int = 1) -> Drafter:
    """The drafter over a pool or none; `budget` None is that of the settings."""
    budget = budget or Budget.of(settings)
    if not settings.drafters or budget.max_draft_tokens == 0:
        return NoDrafter()
    return RetrievalDrafter(pool, settings.drafters, budget.max_draft_tokens, budget.min_acceptance, num_threads)
