"""The drafts of one step laid end to end, so that what is asked of every node of every tree is asked once.

Knows trees alone: no sequences, no logits.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from pipeline.decoding.token_tree import MAX_NODES, TokenTree


class PackedTrees:
    """Arrays over the n nodes of several trees, one tree after another.

    `sizes` and `starts` int64[num_trees]: a tree's nodes, and the first of them here. `tree_of` and `places` int64[n]:
    a node's tree, and its index in that. `token_ids` and `parents` int32[n], as the trees have them.
    """

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        self.sizes = np.array([len(tree.token_ids) for tree in trees], np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.tree_of = np.repeat(np.arange(len(trees)), self.sizes)
        self.places = np.arange(len(self.tree_of)) - self.starts[self.tree_of]
        self.token_ids = _joined([tree.token_ids for tree in trees])
        self.parents = _joined([tree.parents for tree in trees])

    def __len__(self) -> int:
        """Nodes of all trees."""
        return len(self.tree_of)

    @cached_property
    def depths(self) -> np.ndarray:
        """int64[n]: 1 for a node that follows the last committed token."""
        return self.along_paths(np.add, np.ones(len(self), np.int64))

    @cached_property
    def ancestors(self) -> np.ndarray:
        """int64[n]: bit j is set for node j of the same tree if that is the node itself or above it."""
        assert self.sizes.max(initial=0) <= MAX_NODES, "a tree's nodes do not fit a mask"
        own = np.left_shift(np.uint64(1), self.places.astype(np.uint64))
        return self.along_paths(np.bitwise_or, own).view(np.int64)

    def along_paths(self, join: np.ufunc, values: np.ndarray) -> np.ndarray:
        """For each node, its value [n] joined with those of all nodes above it: `np.add`, `np.logical_and`, ..."""
        joined = np.empty(len(self) + 1, values.dtype)
        joined[:-1], joined[-1] = values, join.identity
        for above in self._levels_up:  # each time, of twice as many levels
            joined = join(joined, joined[above])
        return joined[:-1]

    @cached_property
    def _levels_up(self) -> list[np.ndarray]:
        """Each int64[n + 1]: the node 1, 2, 4, ... levels above a node, n where there is none."""
        num_nodes = len(self)
        above = np.full(num_nodes + 1, num_nodes)
        above[:-1] = np.where(self.parents < 0, num_nodes, self.starts[self.tree_of] + self.parents)
        found = []
        while above.min() < num_nodes:
            found.append(above)
            above = above[above]
        return found


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int32)
