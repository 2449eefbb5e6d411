"""Where drafts come from.

A drafter proposes; it never decides. It sees one sequence and returns a tree; the engine cuts the tree to its budget
and has it verified. Knows no model and no batch: what a sequence is offered does not depend on what shares its batch.
"""

from typing import Protocol

import numpy as np

from pipeline.decoding.budget import Budget
from pipeline.decoding.sequence import Sequence
from pipeline.decoding.settings import DecodingSettings
from pipeline.decoding.token_tree import EMPTY_TREE, TokenTree

__all__ = ["Drafter", "NoDrafter", "RetrievalDrafter", "Sequence", "drafter_from"]


class Drafter(Protocol):
    """Proposes what may follow a sequence's last committed token."""

    def draft(self, sequence: Sequence) -> TokenTree:
        """A tree of at most `token_tree.MAX_NODES` tokens; may be empty. Must not change the sequence."""
        ...


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
    """

    def __init__(
        self,
        pool=None,
        sources: tuple[str, ...] = ("previous", "prompt", "output", "pool"),
        max_nodes: int = 16,
        min_probability: float = 0.07,
    ) -> None:
        from retrieval_pools.query import draft  # compiled code; a plain decoder need not load it

        self._draft = draft
        self._pool = pool if "pool" in sources else None
        self._use_previous = "previous" in sources
        self._use_prompt = "prompt" in sources
        self._use_output = "output" in sources
        self._max_nodes = max_nodes
        self._min_probability = min_probability

    def draft(self, sequence: Sequence) -> TokenTree:
        found = self._draft(
            self._pool,
            sequence.context,
            sequence.num_prompt,
            sequence.previous_ids,
            sequence.group,
            max_nodes=self._max_nodes,
            min_probability=self._min_probability,
            use_prompt=self._use_prompt,
            use_output=self._use_output,
            use_previous=self._use_previous,
        )
        return TokenTree(found.token_ids, found.parents, found.log_acceptance, found.source.astype(np.uint8))


def drafter_from(settings: DecodingSettings, pool=None, budget: Budget | None = None) -> Drafter:
    """The drafter that the settings name, over a pool or none; `budget` None is that of the settings."""
    budget = budget or Budget.of(settings)
    if not settings.drafters or budget.max_draft_tokens == 0:
        return NoDrafter()
    return RetrievalDrafter(pool, settings.drafters, budget.max_draft_tokens, budget.min_acceptance)
