"""What a sequence adds to a forward, and its place in the pack.

Knows no store and no model.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, node_depths


@dataclass(frozen=True)
class Feed:
    """What one sequence adds to a forward.

    `chain_ids` int32[m], m >= 1, follow the row's committed tokens; `tree` hangs below the last of them. `wants_logits`
    is false for a part of a long prompt.
    """

    row: int
    chain_ids: np.ndarray
    tree: TokenTree = EMPTY_TREE
    wants_logits: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.chain_ids) + len(self.tree)


@dataclass(frozen=True, slots=True)
class PackedFeed:
    """A feed in its place: its row's slots int64[size], and tokens [offset, offset + size) of the pack."""

    feed: Feed
    slots: np.ndarray
    offset: int
    size: int


def feed_positions(feed: Feed, num_committed: int) -> np.ndarray:
    """Absolute position of each token of a feed: int32[m + n]."""
    last = num_committed + len(feed.chain_ids) - 1
    chain = np.arange(num_committed, last + 1, dtype=np.int32)
    if len(feed.tree.token_ids) == 0:
        return chain
    return np.concatenate((chain, last + node_depths(feed.tree.parents)))
