"""The drafter that settings name: it drafts from earlier texts, and with drafters that other packages provide."""

from collections.abc import Sequence

from laserbatch.pipeline.decoding.drafters.blended import BlendedDrafter
from laserbatch.pipeline.decoding.drafters.drafter import Drafter, NoDrafter
from laserbatch.pipeline.decoding.kv_cache import UNBOUNDED
from laserbatch.pipeline.decoding.model.load import LoadedModel
from laserbatch.pipeline.decoding.plugins import LoadedDrafter, drafter_plugin
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.token_tree import MAX_DEPTH, TokenTree, TreeBatch


def load_plugin_drafters(settings: DecodingSettings, target: LoadedModel | None) -> list[LoadedDrafter]:
    """Load the drafters of other packages for a target, in the order in which the settings name them.

    Raises ModelError: one cannot be read, or does not fit the target.
    """
    names = settings.plugin_drafters
    return [drafter_plugin(name).load(settings.options_of(name), settings, target) for name in names]


def drafter_from(
    settings: DecodingSettings, pool=None, budget: Budget | None = None, num_threads: int = 1,
    plugins: Sequence[LoadedDrafter] | None = None, max_tokens: int = UNBOUNDED,
) -> Drafter:  # fmt: skip
    """The drafter that the settings name, over a pool if there is one.

    `budget` : None: the settings' budget.
    `plugins` : None loads the plug-in drafters without a target model.
    `max_tokens` : bound on the tokens of each drafter's KV cache.
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


class RetrievalDrafter(Drafter):
    """Proposes continuations from a pool, the entity's previous text, its prompt and output (LASER; SuffixDecoding).

    `pool` : `retrieval_pools` pool, or None to draft from the sequence's own text alone.
    `sources` : which of "previous", "prompt", "output", "pool" may be drafted from.
    `max_nodes`, `min_acceptance` : limits on a draft's tokens, and on the estimated acceptance of a node's path.
    `num_threads` : threads that draft in parallel (`Engine.num_draft_threads` says how many are worth while).
    """

    def __init__(
        self, pool=None, sources: tuple[str, ...] = ("previous", "prompt", "output", "pool"), max_nodes: int = 16,
        min_acceptance: float = 0.07, num_threads: int = 1,
    ) -> None:  # fmt: skip
        from laserbatch.retrieval_pools.draft import DraftOptions, draft_batch  # compiled; plain decoding goes without

        self._draft_batch = draft_batch
        self._pool = pool if "pool" in sources else None
        request_sources = ("prompt" in sources, "output" in sources, "previous" in sources)
        self._options, self._num_threads = DraftOptions(max_nodes, min_acceptance, *request_sources), num_threads

    def draft(self, sequence: DecodingSequence) -> TokenTree:
        return self.draft_all([sequence], [MAX_DEPTH])[0]

    def draft_all(self, sequences: list[DecodingSequence], max_depths: list[int]) -> TreeBatch:
        drafts = self._draft_batch(
            self._pool, [sequence.context for sequence in sequences], [sequence.num_prompt for sequence in sequences],
            [sequence.previous_ids for sequence in sequences], [sequence.group for sequence in sequences], max_depths,
            self._options, self._num_threads,
        )  # fmt: skip
        return TreeBatch(*drafts.joined())
