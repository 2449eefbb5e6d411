"""Ways to draft: a drafter proposes and never decides; the engine cuts its tree to the budget and has it verified."""

from typing import Protocol

from laserbatch.pipeline.decoding.sequence import Sequence
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, MAX_DEPTH, TokenTree, TreeBatch


class Drafter(Protocol):
    """Proposes what may follow a sequence's last committed token, whatever shares its batch."""

    def draft(self, sequence: Sequence) -> TokenTree:
        """A tree of at most `token_tree.MAX_NODES` tokens; may be empty. Must not change the sequence."""
        ...


def draft_all(drafter: Drafter, sequences: list[Sequence], max_depths: list[int]) -> TreeBatch:
    """A tree for each sequence, in one call where the drafter has a method of this name.

    `max_depths` : of each sequence, how many tokens of a draft it has room for.
    """
    together = getattr(drafter, "draft_all", None)
    if together is None:
        return TreeBatch.of([drafter.draft(one) for one in sequences])
    return together(sequences, max_depths)


class NoDrafter:
    """Proposes nothing: plain decoding, one token a step."""

    def draft(self, sequence: Sequence) -> TokenTree:
        return EMPTY_TREE


class RetrievalDrafter:
    """Proposes what follows in a pool, the entity's previous text, its prompt and its output (LASER; SuffixDecoding).

    Parameters
    ----------
    pool : `retrieval_pools` pool, or None to draft from the sequence's own text alone.
    sources : which of "previous", "prompt", "output", "pool" may be drafted from.
    max_nodes, min_acceptance : limit of a draft's tokens, and of the estimated acceptance of a node's path.
    num_threads : threads that draft side by side (`Engine.num_draft_threads` says how many gain anything).
    """

    def __init__(
        self,
        pool=None,
        sources: tuple[str, ...] = ("previous", "prompt", "output", "pool"),
        max_nodes: int = 16,
        min_acceptance: float = 0.07,
        num_threads: int = 1,
    ) -> None:
        from laserbatch.retrieval_pools.draft import draft_batch  # compiled code; a plain decoder need not load it

        self._draft_batch = draft_batch
        self._pool = pool if "pool" in sources else None
        self._options = {
            "max_nodes": max_nodes,
            "min_acceptance": min_acceptance,
            "use_previous": "previous" in sources,
            "use_prompt": "prompt" in sources,
            "use_output": "output" in sources,
            "num_threads": num_threads,
        }

    def draft(self, sequence: Sequence) -> TokenTree:
        return self.draft_all([sequence], [MAX_DEPTH])[0]

    def draft_all(self, sequences: list[Sequence], max_depths: list[int]) -> TreeBatch:
        drafts = self._draft_batch(
            self._pool,
            [one.context for one in sequences],
            [one.num_prompt for one in sequences],
            [one.previous_ids for one in sequences],
            [one.group for one in sequences],
            max_depths,
            **self._options,
        )
        return TreeBatch(*drafts.joined())


def drafter_from(settings: DecodingSettings, pool=None, budget: Budget | None = None, num_threads: int = 1) -> Drafter:
    """The drafter over a pool or none; `budget` None is that of the settings."""
    budget = budget or Budget.of(settings)
    if not settings.drafters or budget.max_draft_tokens == 0:
        return NoDrafter()
    return RetrievalDrafter(pool, settings.drafters, budget.max_draft_tokens, budget.min_acceptance, num_threads)
