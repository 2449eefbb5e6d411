"""The drafts of one step laid end to end, so that what is asked of every node of every tree is asked once.

Knows trees alone: no sequences, no logits.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, MAX_NODES, ROOT, TokenTree, prune


class PackedTrees:
    """Arrays over the n nodes of several trees, one tree after another.

    `sizes` and `starts` int64[num_trees]: a tree's nodes, and the first of them here. Of nodes, as the trees have them:
    `token_ids` and `parents` int32[n], `log_acceptance` float32[n], `source` uint8[n].
    """

    def __init__(
        self,
        sizes: np.ndarray,
        token_ids: np.ndarray,
        parents: np.ndarray,
        log_acceptance: np.ndarray,
        source: np.ndarray,
    ) -> None:
        self.sizes = sizes
        self.starts = np.cumsum(sizes) - sizes
        self.token_ids, self.parents, self.log_acceptance, self.source = token_ids, parents, log_acceptance, source

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> "PackedTrees":
        """Trees in their order.

        Raises
        ------
        ValueError : a tree's arrays differ in length. A drafter's own mistake.
        """
        for tree in trees:
            if not len(tree.token_ids) == len(tree.parents) == len(tree.log_acceptance) == len(tree.source):
                raise ValueError(
                    f"a draft's arrays differ in length: {len(tree)} tokens, {len(tree.parents)} parents, "
                    f"{len(tree.log_acceptance)} log_acceptance, {len(tree.source)} source"
                )
        if not any(map(len, trees)):
            return cls.empty(len(trees))
        return cls(
            np.array([len(tree) for tree in trees], np.int64),
            np.concatenate([tree.token_ids for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            np.concatenate([tree.log_acceptance for tree in trees]),
            np.concatenate([tree.source for tree in trees]),
        )

    @classmethod
    def empty(cls, num_trees: int) -> "PackedTrees":
        """Trees without nodes: plain decoding."""
        nothing = EMPTY_TREE
        sizes = np.zeros(num_trees, np.int64)
        return cls(sizes, nothing.token_ids, nothing.parents, nothing.log_acceptance, nothing.source)

    def __len__(self) -> int:
        """Nodes of all trees."""
        return len(self.token_ids)

    @property
    def num_trees(self) -> int:
        return len(self.sizes)

    def nodes_of(self, number: int) -> slice:
        """A tree's nodes."""
        start = int(self.starts[number])
        return slice(start, start + int(self.sizes[number]))

    def __getitem__(self, number: int) -> TokenTree:
        """One tree, a view."""
        nodes = self.nodes_of(number)
        return TokenTree(self.token_ids[nodes], self.parents[nodes], self.log_acceptance[nodes], self.source[nodes])

    def __iter__(self) -> Iterator[TokenTree]:
        return map(self.__getitem__, range(self.num_trees))

    def spread(self, places: Sequence[int], num_trees: int) -> "PackedTrees":
        """So many trees, of which those at some rising places are these; the others have no nodes."""
        if len(places) == num_trees:
            return self
        sizes = np.zeros(num_trees, np.int64)
        sizes[places] = self.sizes
        return PackedTrees(sizes, self.token_ids, self.parents, self.log_acceptance, self.source)

    def gathered(self, places: np.ndarray) -> "PackedTrees":
        """The trees at some rising places, int64[m], where the others have no nodes."""
        if len(places) == self.num_trees:
            return self
        assert self.sizes[places].sum() == len(self), "a tree that has nodes is left out"
        return PackedTrees(self.sizes[places], self.token_ids, self.parents, self.log_acceptance, self.source)

    @cached_property
    def tree_of(self) -> np.ndarray:
        """int64[n]: the number of a node's tree."""
        return np.repeat(np.arange(self.num_trees), self.sizes)

    @cached_property
    def places(self) -> np.ndarray:
        """int64[n]: a node's index in its tree."""
        return np.arange(len(self)) - self.starts[self.tree_of]

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


def prune_all(
    trees: PackedTrees, *, max_nodes: int, max_depths: Sequence[int], min_log_acceptance: float, vocab_size: int
) -> PackedTrees:
    """`prune` for each of many trees, one of `max_depths` for each. Trees within all limits, the rule, cost little.

    Raises
    ------
    ValueError : as `prune`.
    """
    limits = {"max_nodes": max_nodes, "min_log_acceptance": min_log_acceptance, "vocab_size": vocab_size}
    if len(trees) == 0 or _are_within(trees, max_depths=np.asarray(max_depths), **limits):
        return trees
    pruned = [prune(tree, max_depth=most, **limits) for tree, most in zip(trees, max_depths, strict=True)]
    return PackedTrees.of(pruned)


def _are_within(
    trees: PackedTrees, *, max_nodes: int, max_depths: np.ndarray, min_log_acceptance: float, vocab_size: int
) -> bool:
    """Whether `prune` would find nothing to drop and no mistake."""
    return bool(
        trees.sizes.max() <= max_nodes
        and trees.token_ids.min() >= 0
        and trees.token_ids.max() < vocab_size
        and (trees.log_acceptance >= min_log_acceptance).all()
        and (trees.parents < trees.places).all()
        and trees.parents.min() >= ROOT
        and (trees.depths <= max_depths[trees.tree_of]).all()
    )
