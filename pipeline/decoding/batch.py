"""The tokens that sequences add to a forward, and the batch of them: one flat array of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.token_tree import TreeBatch


@dataclass(frozen=True)
class Feed:
    """The tokens that one sequence adds to a forward.

    `chain_ids` int32[m], m >= 1, follow the row's committed tokens; a draft tree may follow the last of them.
    """

    row: int
    chain_ids: np.ndarray


class Batch:
    """The N tokens of B feeds and their `trees`, end to end: each feed's chain, then the nodes of its tree.

    Per feed, int64[B]: `rows`; `num_committed` and `num_chain`, the row's tokens before and in the chain; `sizes`,
    tokens of chain and tree; `offsets`, the first token in the batch. Per token [N]: `feed_of` int64, `is_node` bool
    (in a tree), `token_ids` int32, `positions` int32 in the text, `slot_mapping` int64, the reserved cache slots.
    """

    def __init__(self, feeds: Sequence[Feed], trees: TreeBatch, cache: KVCache) -> None:
        self.feeds = feeds
        self.trees = trees
        self.rows = np.array([feed.row for feed in feeds])
        self.num_chain = np.array([len(feed.chain_ids) for feed in feeds])
        self.num_committed = cache.lengths[self.rows]
        self.sizes = self.num_chain + self.trees.sizes
        self.offsets = np.cumsum(self.sizes) - self.sizes
        self.slot_mapping = cache.reserve(self.rows, self.sizes)

        self.feed_of = np.repeat(np.arange(len(feeds)), self.sizes)
        places = np.arange(len(self.feed_of)) - self.offsets[self.feed_of]  # within the feed
        self.is_node = places >= self.num_chain[self.feed_of]
        self.token_ids = np.concatenate([feed.chain_ids for feed in feeds])
        if len(self.trees):
            chains, self.token_ids = self.token_ids, np.empty(len(self.feed_of), np.int32)
            self.token_ids[~self.is_node], self.token_ids[self.is_node] = chains, self.trees.token_ids
            places[self.is_node] = (self.num_chain - 1)[self.feed_of[self.is_node]] + self.trees.depths
        self.positions = (self.num_committed[self.feed_of] + places).astype(np.int32)

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.feed_of)

    @cached_property
    def logit_indices(self) -> np.ndarray:
        """int64[K]: the tokens whose logits the verifier reads: the last of each chain, and all nodes."""
        is_last = np.zeros(len(self), bool)
        is_last[self.offsets + self.num_chain - 1] = True
        return np.flatnonzero(is_last | self.is_node)

    @cached_property
    def logit_starts(self) -> np.ndarray:
        """int64[B]: the index of each feed's first token in `logit_indices`."""
        counts = self.trees.sizes + 1
        return np.cumsum(counts) - counts

    def committed_mask(self, feeds: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """bool[N]: the tokens to commit: the chains of `feeds` int64[n], and `nodes` int64[m] of all trees."""
        is_committed = ~self.is_node
        if len(feeds) < len(self.feeds):
            is_committed &= np.isin(self.feed_of, feeds)
        if len(nodes):
            trees = self.trees.tree_of[nodes]
            is_committed[(self.offsets + self.num_chain)[trees] + self.trees.places[nodes]] = True
        return is_committed
