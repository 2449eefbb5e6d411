"""Where drafts come from.

A drafter proposes; it never decides. It sees one sequence and returns a tree; the engine cuts the tree to its budget
and has it verified. Knows no model and no batch: what a sequence is offered does not depend on what shares its batch.
"""

from typing import Protocol

from laserbatch.pipeline.decoding.packed_trees import PackedTrees
from laserbatch.pipeline.decoding.sequence import Sequence
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, MAX_DEPTH, TokenTree

__all__ = ["BatchDrafter", "Drafter", "NoDrafter", "RetrievalDrafter", "Sequence", "draft_all", "drafter_from"]


class Drafter(Protocol):
    """Proposes what may follow a sequence's last committed token."""

    def draft(self, sequence: Sequence) -> TokenTree:
        """A tree of at most `token_tree.MAX_NODES` tokens; may be empty. Must not change the sequence."""
        ...


class BatchDrafter(Drafter, Protocol):
    """A drafter that has one call for all sequences of a step."""

    def draft_all(self, sequences: list[Sequence], max_depths: list[int]) -> PackedTrees:
        """What `draft` gives for each, knowing how many tokens of it the sequence has room for."""
        ...


def draft_all(drafter: Drafter | BatchDrafter, sequences: list[Sequence], max_depths: list[int]) -> PackedTrees:
    """A tree for each sequence, in one call where the drafter has one."""
    together = getattr(drafter, "draft_all", None)
    if together is None:
        return PackedTrees.of([drafter.draft(one) for one in sequences])
    return together(sequences, max_depths)


class NoDrafter:
    """Proposes nothing: plain decoding, one token a step."""

    def draft(self, sequence: Sequence) -> TokenTree:
        return EMPTY_TREE


class RetrievalDrafter:
    """Proposes continuations found in earlier texts: a pool, the entity's previous text, its prompt and its output.

    Parameters
    ----------
    pool : `retrieval_pools` pool, or None to draft from the sequence's own text alone.
    sources : which of "previous", "prompt", "output", "pool" may be drafted from.
    max_nodes : limit of a draft's tokens.
    min_probability : nodes of a lower estimated path acceptance are not drafted.
    num_threads : threads that draft side by side for many sequences; an engine says how many gain anything
        (`Engine.num_draft_threads`).
    """

    def __init__(
        self,
        pool=None,
        sources: tuple[str, ...] = ("previous", "prompt", "output", "pool"),
        max_nodes: int = 16,
        min_probability: float = 0.07,
        num_threads: int = 1,
    ) -> None:
        from laserbatch.retrieval_pools.query import (
            draft_batch,  # compiled code; a plain decoder need not load it
        )

        self._draft_batch = draft_batch
        self._pool = pool if "pool" in sources else None
        self._options = {
            "max_nodes": max_nodes,
            "min_probability": min_probability,
            "use_previous": "previous" in sources,
            "use_prompt": "prompt" in sources,
            "use_output": "output" in sources,
            "num_threads": num_threads,
        }

    def draft(self, sequence: Sequence) -> TokenTree:
        return self.draft_all([sequence], [MAX_DEPTH])[0]

    def draft_all(self, sequences: list[Sequence], max_depths: list[int]) -> PackedTrees:
        drafts = self._draft_batch(
            self._pool,
            [one.context for one in sequences],
            [one.num_prompt for one in sequences],
            [one.previous_ids for one in sequences],
            [one.group for one in sequences],
            max_depths,
            **self._options,
        )
        return PackedTrees(*drafts.joined())


def drafter_from(settings: DecodingSettings, pool=None, budget: Budget | None = None, num_threads: int = 1) -> Drafter:
    """The drafter that the settings name, over a pool or none; `budget` None is that of the settings."""
    budget = budget or Budget.of(settings)
    if not settings.drafters or budget.max_draft_tokens == 0:
        return NoDrafter()
    return RetrievalDrafter(pool, settings.drafters, budget.max_draft_tokens, budget.min_acceptance, num_threads)
