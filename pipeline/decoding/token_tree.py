"""A draft for one sequence: a small tree of tokens below its last committed token.

Knows numbers only: no model, no pool, no batch.
"""

from dataclasses import dataclass

import numpy as np

from laserbatch.retrieval_pools.sources import SOURCE_TARGET

MAX_NODES = 64  # a node's ancestors fit one 64-bit mask
MAX_DEPTH = MAX_NODES
ROOT = -1  # parent of a node that follows the last committed token


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens; parents precede their children.

    Parameters
    ----------
    token_ids : int32[n]
    parents : int32[n], index of the parent node, -1 for the last committed token.
    log_acceptance : float32[n], estimated log probability that the whole path to this node is accepted.
    source : uint8[n], a code of `retrieval_pools.sources`.
    """

    token_ids: np.ndarray
    parents: np.ndarray
    log_acceptance: np.ndarray
    source: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depths(self) -> np.ndarray:
        """int32[n]: 1 for a child of the last committed token."""
        return node_depths(self.parents)


EMPTY_TREE = TokenTree(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8))


def chain_tree(token_ids, source: int = SOURCE_TARGET) -> TokenTree:
    """One branch: each token follows the one before it, with log acceptance 0."""
    ids = np.asarray(token_ids, np.int32)
    n = len(ids)
    return TokenTree(ids, np.arange(-1, n - 1, dtype=np.int32), np.zeros(n, np.float32), np.full(n, source, np.uint8))


def node_depths(parents: np.ndarray) -> np.ndarray:
    """Depth of each node, from int32[n] parents that precede their children: int32[n], 1 for a root's child.

    Slow and obvious; `PackedTrees.depths` is the same for many trees.
    """
    depths = []
    for parent in parents.tolist():
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return np.array(depths, np.int32)


def prune(tree: TokenTree, *, max_nodes: int, max_depth: int, min_log_acceptance: float, vocab_size: int) -> TokenTree:
    """The part of a draft worth verifying: nodes over a limit go, and all below them.

    Nodes are dropped that are deeper than `max_depth`, less likely than `min_log_acceptance`, or not of the vocabulary;
    of the rest the first `max_nodes` in the tree's own order stay.

    Raises
    ------
    ValueError : a parent does not precede its child, or the arrays differ in length. A drafter's own mistake.
    """
    num_nodes = len(tree)
    if num_nodes == 0 or max_nodes <= 0 or max_depth <= 0:
        return EMPTY_TREE
    if not len(tree.parents) == len(tree.log_acceptance) == len(tree.source) == num_nodes:
        raise ValueError(f"a draft's arrays differ in length: {num_nodes} tokens, {len(tree.parents)} parents")
    parents = tree.parents
    if (parents >= np.arange(num_nodes)).any() or (parents < ROOT).any():
        raise ValueError(f"a draft's parents must precede their children, found {parents.tolist()}")
    keep = (tree.token_ids >= 0) & (tree.token_ids < vocab_size) & (tree.log_acceptance >= min_log_acceptance)
    keep &= tree.depths <= max_depth
    if num_nodes <= max_nodes and keep.all():
        return tree
    new_index = [0] * num_nodes  # of a kept node, its place in the result
    kept: list[int] = []
    for i, (ok, parent) in enumerate(zip(keep.tolist(), parents.tolist(), strict=True)):
        alive = ok and len(kept) < max_nodes and (parent < 0 or new_index[parent] >= 0)
        new_index[i] = len(kept) if alive else ROOT
        if alive:
            kept.append(i)
    new_parents = np.array([ROOT if parents[i] < 0 else new_index[parents[i]] for i in kept], np.int32)
    return TokenTree(tree.token_ids[kept], new_parents, tree.log_acceptance[kept], tree.source[kept])
