"""The drafter that settings name: it drafts from texts, together with drafters that other packages provide."""

from collections.abc import Sequence

from laserbatch.pipeline.decoding.drafters.blended import BlendedDrafter
from laserbatch.pipeline.decoding.drafters.drafter import Drafter, NoDrafter
from laserbatch.pipeline.decoding.drafters.retrieval import RetrievalDrafter
from laserbatch.pipeline.decoding.kv_cache import UNBOUNDED
from laserbatch.pipeline.decoding.model.load import LoadedModel
from laserbatch.pipeline.decoding.plugins import LoadedDrafter, drafter_plugin
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings


def load_plugin_drafters(settings: DecodingSettings, target: LoadedModel | None) -> list[LoadedDrafter]:
    """Load the drafters of other packages for a target, in the order in which the settings name them.

    Raises ModelError: one cannot be read, or does not fit the target.
    """
    names = settings.plugin_drafters
    return [drafter_plugin(name).load(settings.options_of(name), settings, target) for name in names]


def drafter_from(
    settings: DecodingSettings,
    pool=None,
    budget: Budget | None = None,
    num_threads: int = 1,
    plugins: Sequence[LoadedDrafter] | None = None,
    max_tokens: int = UNBOUNDED,
) -> Drafter:
    """The drafter that the settings name, over a pool if there is one.

    Parameters
    ----------
    budget : None: the settings' budget.
    plugins : None loads the plug-in drafters without a target model.
    max_tokens : bound on the tokens of each drafter's KV cache.
    """
    budget = budget or Budget.of(settings)
    if budget.max_draft_tokens == 0:
        return NoDrafter()
    plugins = plugins or load_plugin_drafters(settings, None)
    drafters = [drafter for plugin in plugins for drafter in plugin.drafters(settings, budget, max_tokens)]
    if settings.text_sources:
        limits = budget.max_draft_tokens, budget.min_acceptance
        drafters.append(RetrievalDrafter(pool, settings.text_sources, *limits, num_threads))
    if len(drafters) > 1:
        return BlendedDrafter(drafters, budget.max_draft_tokens)
    return drafters[0] if drafters else NoDrafter()
