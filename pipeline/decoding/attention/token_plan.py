"""The plan of a step over the token store: ragged arrays that a kernel reads, and padded groups made of them.

A sequence's keys are named by slot, in text order: its committed tokens, then the step's new ones in the order of the
pack. Nothing here loops over tokens.

Knows the store and the feeds; no model.
"""

from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.attention_plan import WIDTH_STEP, AttentionGroup, StepPlan, cut_groups
from laserbatch.pipeline.decoding.device_copy import to_device
from laserbatch.pipeline.decoding.feed import Pack
from laserbatch.pipeline.decoding.memory.token_store import TokenLayer, TokenStore


@dataclass
class RaggedStep:
    """A step of B sequences and N new tokens, with no padding.

    Of sequence b, `slots[slot_starts[b] : slot_starts[b + 1]]` hold first its `num_committed[b]` committed tokens, then
    its new ones, which are tokens `query_starts[b]` to `query_starts[b + 1]` of the pack. A new token sees all that is
    committed. The first `num_chain[b]` new ones are a causal chain; the others are nodes of a tree, which see the whole
    chain and each node j of their tree whose bit j is set in `ancestors` (their own among them).

    Shapes: slots int32[total], slot_starts and query_starts int32[B + 1], num_committed and num_chain int32[B],
    ancestors int64[N] (0 in chains), node_positions int32[N], absolute.
    """

    slots: np.ndarray
    slot_starts: np.ndarray
    num_committed: np.ndarray
    query_starts: np.ndarray
    num_chain: np.ndarray
    ancestors: np.ndarray
    node_positions: np.ndarray


@dataclass
class TokenGroup(AttentionGroup):
    """Sequences whose keys are gathered: `slots` int64[num_rows, width], padding repeats the row's last slot."""

    slots: np.ndarray
    _index: torch.Tensor | None = None

    def read(self, cache: TokenLayer) -> tuple[torch.Tensor, torch.Tensor]:
        if self._index is None:
            self._index = to_device(self.slots.reshape(-1), cache.keys.device)
        shape = (self.num_rows, self.width, *cache.keys.shape[1:-1], -1)
        keys, values = (memory.index_select(0, self._index).view(shape) for memory in (cache.keys, cache.values))
        return keys.transpose(1, 2), values.transpose(1, 2)


def token_plan(store: TokenStore, pack: Pack, setup_cost: int) -> StepPlan:
    """Where a pack's tokens go and what they see.

    Groups join sequences with like numbers of new tokens, until a further call, of cost `setup_cost`, is cheaper.
    """
    ragged = ragged_step(store, pack)
    return StepPlan(store, pack, lambda: token_groups(ragged, setup_cost), ragged)


def ragged_step(store: TokenStore, pack: Pack) -> RaggedStep:
    """The arrays of a pack over a store."""
    ends = np.cumsum(pack.num_committed + pack.sizes)
    slots = np.empty(ends[-1], np.int32)
    first_new = ends - pack.sizes
    slots[np.arange(len(pack)) + (first_new - pack.offsets)[pack.feed_of]] = pack.slots
    committed = zip(pack.rows.tolist(), (first_new - pack.num_committed).tolist(), first_new.tolist(), strict=True)
    for row, start, end in committed:
        slots[start:end] = store.slots_of(row)
    ancestors = np.zeros(len(pack), np.int64)
    if len(pack.trees):
        ancestors[pack.is_node] = pack.trees.ancestors
    return RaggedStep(
        slots=slots,
        slot_starts=np.append(0, ends).astype(np.int32),
        num_committed=pack.num_committed.astype(np.int32),
        query_starts=np.append(pack.offsets, len(pack)).astype(np.int32),
        num_chain=pack.num_chain.astype(np.int32),
        ancestors=ancestors,
        node_positions=pack.positions,
    )


def token_groups(step: RaggedStep, setup_cost: int) -> list[AttentionGroup]:
    """The step in padded groups, for attention that gathers keys."""
    sizes, widths = np.diff(step.query_starts), np.diff(step.slot_starts)
    order = np.argsort(sizes, kind="stable")
    may_join = [True] * len(order)
    groups = cut_groups(sizes[order].tolist(), widths[order].tolist(), may_join, setup_cost)
    return [_group(step, order[members]) for members in groups]


def _group(step: RaggedStep, members: np.ndarray) -> TokenGroup:
    """Index and mask arrays of some of a step's sequences."""
    committed, chain = step.num_committed[members, None], step.num_chain[members, None]  # (num_rows, 1)
    first_query, first_slot = step.query_starts[members, None], step.slot_starts[members, None]
    size = step.query_starts[members + 1, None] - first_query
    columns = np.arange(-(-int((committed + size).max()) // WIDTH_STEP) * WIDTH_STEP)
    nodes = np.arange(int(size.max()))
    local = np.where(nodes < size, nodes, 0)  # (num_rows, num_padded)
    queries = (first_query + local).astype(np.int64)
    fresh = columns - committed  # (num_rows, width): which new token a column holds; below 0: a committed one
    # A chain's token sees what is before it and itself, a tree's node the whole chain, both all that is committed.
    sees = fresh[:, None, :] <= np.minimum(local, chain - 1)[:, :, None]
    num_nodes = size - chain
    if num_nodes.any():
        rows, bits = np.nonzero(np.arange(int(num_nodes.max())) < num_nodes)
        is_ancestor = (step.ancestors[queries[rows]] >> bits[:, None]) & 1  # (all nodes of the group, num_padded)
        sees[rows, :, (committed + chain)[rows, 0] + bits] = is_ancestor.astype(bool)
    slots = step.slots[first_slot + np.minimum(columns, committed + size - 1)].astype(np.int64)
    new_positions = step.node_positions[first_query + np.clip(fresh, 0, size - 1)]
    slot_positions = np.where(fresh < 0, columns, new_positions)
    return TokenGroup(queries, sees, step.node_positions[queries], slot_positions, slots)
