"""What a drafter is: it proposes and never decides; the engine cuts its tree to the budget and has it verified."""

from typing import Protocol

from laserbatch.pipeline.decoding.sequence import Sequence
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, TreeBatch


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
