"""Drafts: a small tree of tokens below a sequence's last committed token, and the trees of a step laid end to end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from laserbatch.retrieval_pools.sources import NUM_SOURCES

MAX_NODES = 64  # a node's ancestors fit one 64-bit mask
MAX_DEPTH = MAX_NODES
ROOT = -1  # parent of a node that follows the last committed token


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens; parents precede their children."""

    token_ids: np.ndarray  # int32[n]
    parents: np.ndarray  # int32[n], index of the parent node, -1 for the last committed token
    log_acceptance: np.ndarray  # float32[n], estimated log probability that the whole path to this node is accepted
    source: np.ndarray  # uint8[n], a code of `retrieval_pools.sources`

    def __len__(self) -> int:
        return len(self.token_ids)


EMPTY_TREE = TokenTree(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8))


@dataclass(frozen=True)
class Proposals:
    """The distributions from which sampled nodes were drawn: m draws; draws after the same node are in their order.

    `nodes` int64[m], the node that each draw gave, an index over all trees; two draws may give the same node. `rows`
    int64[m], each draw's row of `log_q` float32 (num_rows, vocab_size) on the drafter's device.
    """

    nodes: np.ndarray
    rows: np.ndarray
    log_q: torch.Tensor

    def select(self, keep: np.ndarray) -> "Proposals":
        """The draws of the nodes where `keep`, bool[n]."""
        stays = keep[self.nodes]
        return Proposals((np.cumsum(keep) - 1)[self.nodes[stays]], self.rows[stays], self.log_q)


class TreeBatch:
    """Arrays over the n nodes of several trees, one tree after another.

    `sizes` and `starts` int64[num_trees]: each tree's number of nodes, and the index of its first. Per node, as in
    `TokenTree`: `token_ids` and `parents` int32[n], `log_acceptance` float32[n], `source` uint8[n]. `proposals` is None
    if the nodes were not sampled.
    """

    def __init__(self, sizes, token_ids, parents, log_acceptance, source, proposals: Proposals | None = None) -> None:
        self.sizes = sizes
        self.starts = np.cumsum(sizes) - sizes
        self.token_ids, self.parents, self.log_acceptance, self.source = token_ids, parents, log_acceptance, source
        self.proposals = proposals

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> "TreeBatch":
        """The batch of some trees. Raises ValueError: a tree's arrays differ in length, a mistake of its drafter."""
        for tree in trees:
            if not len(tree.token_ids) == len(tree.parents) == len(tree.log_acceptance) == len(tree.source):
                raise ValueError(
                    f"a draft's arrays differ in length: {len(tree)} tokens, {len(tree.parents)} parents, "
                    f"{len(tree.log_acceptance)} log_acceptance, {len(tree.source)} source"
                )
        if not any(map(len, trees)):
            return cls.empty(len(trees))
        sizes = np.array([len(tree) for tree in trees], np.int64)
        token_ids, parents, log_acceptance, source = (  # `np.array([])` of a drafter is float64
            np.concatenate([getattr(tree, name) for tree in trees]).astype(empty.dtype, copy=False)
            for name, empty in vars(EMPTY_TREE).items()
        )
        return cls(sizes, token_ids, parents, log_acceptance, source)

    @classmethod
    def empty(cls, num_trees: int) -> "TreeBatch":
        """Trees without nodes: plain decoding."""
        return cls(np.zeros(num_trees, np.int64), *vars(EMPTY_TREE).values())

    def __len__(self) -> int:
        """The number of nodes of all trees."""
        return len(self.token_ids)

    @property
    def num_trees(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> TokenTree:
        """A view of one tree."""
        start = int(self.starts[number])
        nodes = slice(start, start + int(self.sizes[number]))
        return TokenTree(self.token_ids[nodes], self.parents[nodes], self.log_acceptance[nodes], self.source[nodes])

    def __iter__(self) -> Iterator[TokenTree]:
        return map(self.__getitem__, range(self.num_trees))

    def scatter(self, places: Sequence[int], num_trees: int) -> "TreeBatch":
        """A batch of `num_trees` trees: these at the ascending `places`, and trees without nodes elsewhere."""
        if len(places) == num_trees:
            return self
        sizes = np.zeros(num_trees, np.int64)
        sizes[places] = self.sizes
        return TreeBatch(sizes, self.token_ids, self.parents, self.log_acceptance, self.source, self.proposals)

    def select(self, keep: np.ndarray) -> "TreeBatch":
        """The same trees with the nodes where `keep`, bool[n], which must be true for the ancestors of kept nodes."""
        if keep.all():
            return self
        number = np.cumsum(keep) - 1  # a kept node's index over all trees, then in its own
        sizes = np.bincount(self.tree_of[keep], minlength=self.num_trees)
        number -= (np.cumsum(sizes) - sizes)[self.tree_of]
        above = number[np.maximum(self.starts[self.tree_of] + self.parents, 0)]
        parents = np.where(self.parents == ROOT, ROOT, above).astype(np.int32)
        arrays = (self.token_ids[keep], parents[keep], self.log_acceptance[keep], self.source[keep])
        return TreeBatch(sizes, *arrays, self.proposals and self.proposals.select(keep))

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
        return self.scan_from_root(np.add, np.ones(len(self), np.int64))

    @cached_property
    def ancestors(self) -> np.ndarray:
        """int64[n]: bit j is set for node j of the same tree if that is the node itself or above it."""
        assert self.sizes.max(initial=0) <= MAX_NODES, "a tree's nodes do not fit a mask"
        own_bits = np.left_shift(np.uint64(1), self.places.astype(np.uint64))
        return self.scan_from_root(np.bitwise_or, own_bits).view(np.int64)

    def scan_from_root(self, join: np.ufunc, values: np.ndarray) -> np.ndarray:
        """Each node's value [n] joined with the values of all its ancestors, by `np.add`, `np.logical_and`, ..."""
        joined = np.empty(len(self) + 1, values.dtype)
        joined[:-1], joined[-1] = values, join.identity
        for above in self._levels_up:  # each pass joins twice as many levels
            joined = join(joined, joined[above])
        return joined[:-1]

    @cached_property
    def _levels_up(self) -> list[np.ndarray]:
        """Arrays int64[n + 1] of the node that is 1, 2, 4, ... levels above each node, n where there is none."""
        num_nodes = len(self)
        above = np.full(num_nodes + 1, num_nodes)
        above[:-1] = np.where(self.parents < 0, num_nodes, self.starts[self.tree_of] + self.parents)
        levels = []
        while above.min() < num_nodes:
            levels.append(above)
            above = above[above]
        return levels


def prune(
    trees: TreeBatch, *, max_nodes: int, max_depths: Sequence[int], min_log_acceptance: float, vocab_size: int
) -> TreeBatch:
    """The drafts without the nodes that exceed a limit.

    Nodes that are deeper than their tree's entry of `max_depths`, less likely than `min_log_acceptance` or outside the
    vocabulary are dropped with all nodes below them. Of the others each tree keeps the first `max_nodes` in its order.

    Raises ValueError for mistakes of the drafter: another number of trees than of `max_depths`, a parent that does not
    precede its child, an unknown source.
    """
    if trees.num_trees != len(max_depths):
        raise ValueError(f"found {trees.num_trees} drafts for {len(max_depths)} texts")
    if len(trees) == 0:
        return trees
    if trees.source.max() >= NUM_SOURCES:
        raise ValueError(f"a draft's source must be a code below {NUM_SOURCES}, found {trees.source.max()}")
    if (trees.parents >= trees.places).any() or trees.parents.min() < ROOT:
        raise ValueError(f"a draft's parents must precede their children, found {trees.parents.tolist()}")
    keep = (trees.token_ids >= 0) & (trees.token_ids < vocab_size) & (trees.log_acceptance >= min_log_acceptance)
    keep &= trees.depths <= np.asarray(max_depths)[trees.tree_of]
    if keep.all() and trees.sizes.max() <= max_nodes:
        return trees
    keep = trees.scan_from_root(np.logical_and, keep)
    rank = np.cumsum(keep)  # a kept node's rank over all trees, then in its own
    rank -= np.append(0, rank)[trees.starts][trees.tree_of]
    return trees.select(keep & (rank <= max_nodes))  # parents come first, so those of kept nodes are kept
