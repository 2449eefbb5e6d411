"""The plan of a step over the row store: neighbouring rows share an attention call, which reads a view of them.

Knows the store and the feeds; no model.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from pipeline.decoding.forward.attention_plan import WIDTH_STEP, AttentionGroup, StepPlan, cut_groups
from pipeline.decoding.forward.feed import PackedFeed
from pipeline.decoding.forward.single_attention import SingleTokens
from pipeline.decoding.memory.kv_store import KVStore, LayerCache
from pipeline.decoding.token_tree import ancestor_matrix, padded_parents


@dataclass
class RowGroup(AttentionGroup):
    """Neighbouring rows of the store, from `first_row` on."""

    first_row: int

    def read(self, cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(self.first_row, self.first_row + self.num_rows)
        return cache.keys[rows, :, : self.width], cache.values[rows, :, : self.width]


def row_plan(store: KVStore, packed: list[PackedFeed], positions: np.ndarray, setup_cost: int) -> StepPlan:
    """Where a pack's tokens go and what they see, in groups of neighbouring rows.

    A group is closed where a further call, of cost `setup_cost`, is cheaper than padding. `positions` int32[num_tokens]
    are absolute.
    """
    by_row = sorted(packed, key=lambda part: part.feed.row)
    rows = [part.feed.row for part in by_row]
    neighbours = [False, *(after == row + 1 for row, after in pairwise(rows))]

    def build_groups() -> list[AttentionGroup]:
        members = cut_groups([p.size for p in by_row], [_width(store, p) for p in by_row], neighbours, setup_cost)
        return [_group(store, [by_row[i] for i in group], positions) for group in members]

    rows_of_tokens = np.repeat([part.feed.row for part in packed], [part.size for part in packed])
    slots = np.concatenate([part.slots for part in packed])
    build_single = None
    if len(slots) == len(packed):

        def build_single() -> SingleTokens:
            return _single_tokens(store, rows_of_tokens, slots, positions)

    return StepPlan(store, len(slots), rows_of_tokens, slots, build_groups, build_single=build_single)


def _single_tokens(store: KVStore, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> SingleTokens:
    """What one new token in each of the rows sees: what its row has committed, and itself."""
    num_slots = np.maximum(store.extents[rows], slots + 1)
    width = int(num_slots.max())
    sees, slot_positions = store.committed[rows, :width], store.positions[rows, :width]
    every = np.arange(len(rows))
    sees[every, slots] = True
    slot_positions[every, slots] = positions
    return SingleTokens(rows, sees, num_slots, positions, slot_positions)


def _width(store: KVStore, part: PackedFeed) -> int:
    """Slots of a row that attention has to look at, rounded up."""
    needed = max(int(store.extents[part.feed.row]), int(part.slots[-1]) + 1)
    return min(store.width, -(-needed // WIDTH_STEP) * WIDTH_STEP)


def _group(store: KVStore, packed: list[PackedFeed], positions: np.ndarray) -> RowGroup:
    """Index and mask arrays of feeds in neighbouring rows."""
    first_row, num_rows = packed[0].feed.row, len(packed)
    num_padded = max(part.size for part in packed)
    width = max(_width(store, part) for part in packed)
    rows = slice(first_row, first_row + num_rows)
    sees = np.repeat(store.committed[rows, None, :width], num_padded, axis=1)
    slot_positions = store.positions[rows, :width].copy()
    queries = np.repeat(np.array([part.offset for part in packed])[:, None], num_padded, axis=1)
    if num_padded == 1:
        new_slots = np.array([part.slots[0] for part in packed])
        every = np.arange(num_rows)
        slot_positions[every, new_slots] = positions[queries[:, 0]]
        sees[every, 0, new_slots] = True
        return RowGroup(queries, sees, positions[queries], slot_positions, first_row)
    sees_tree = ancestor_matrix(padded_parents([part.feed.tree for part in packed]))
    for r, part in enumerate(packed):
        size, chain = part.size, len(part.feed.chain_ids)
        queries[r, :size] += np.arange(size)
        slot_positions[r, part.slots] = positions[part.offset : part.offset + size]
        among = np.zeros((size, size), bool)  # which of the feed's tokens sees which
        among[:chain, :chain] = np.tri(chain, dtype=bool)
        among[chain:, :chain] = True
        among[chain:, chain:] = sees_tree[r, : size - chain, : size - chain]
        sees[r, :size, part.slots] = among.T
        sees[r, size:, part.slots[0]] = True  # padding must see something
    return RowGroup(queries, sees, positions[queries], slot_positions, first_row)
