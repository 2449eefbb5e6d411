"""The plan of a step over the row store: neighbouring rows share an attention call, which reads a view of them.

Knows the store and the feeds; no model.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.attention_plan import WIDTH_STEP, AttentionGroup, StepPlan, cut_groups
from laserbatch.pipeline.decoding.attention.single_attention import SingleTokens
from laserbatch.pipeline.decoding.feed import Pack, PackedFeed
from laserbatch.pipeline.decoding.memory.kv_store import KVStore, LayerCache

# Tokens of a prompt whose attention is one call: each block looks at the slots up to its own last token only.
BLOCK_TOKENS = 128


@dataclass
class RowGroup(AttentionGroup):
    """Neighbouring rows of the store, from `first_row` on."""

    first_row: int

    def read(self, cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(self.first_row, self.first_row + self.num_rows)
        return cache.keys[rows, :, : self.width], cache.values[rows, :, : self.width]


def row_plan(store: KVStore, pack: Pack, setup_cost: int) -> StepPlan:
    """Where a pack's tokens go and what they see, in groups of neighbouring rows.

    A group is closed where a further call, of cost `setup_cost`, is cheaper than padding.
    """

    def build_groups() -> list[AttentionGroup]:
        blocks = _blocks(pack, setup_cost)
        may_join = [False, *(after.may_join(before) for before, after in pairwise(blocks))]
        sizes, widths = [block.size for block in blocks], [_width(store, block) for block in blocks]
        members = cut_groups(sizes, widths, may_join, setup_cost)
        return [_group(store, pack, [blocks[i] for i in group]) for group in members]

    def build_single() -> SingleTokens:
        return _single_tokens(store, pack.rows, pack.slots, pack.positions)

    one_a_row = len(pack) == len(pack.rows)
    return StepPlan(store, pack, build_groups, build_single=build_single if one_a_row else None)


def _single_tokens(store: KVStore, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> SingleTokens:
    """What one new token in each of the rows sees: what its row has committed, and itself."""
    num_slots = np.maximum(store.extents[rows], slots + 1)
    width = int(num_slots.max())
    sees, slot_positions = store.committed[rows, :width], store.positions[rows, :width]
    every = np.arange(len(rows))
    sees[every, slots] = True
    slot_positions[every, slots] = positions
    return SingleTokens(rows, sees, num_slots, positions, slot_positions)


@dataclass(frozen=True, slots=True)
class _Block:
    """Tokens [begin, end) of feed `number`: they see no slots of its later tokens."""

    number: int
    part: PackedFeed
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def may_join(self, before: "_Block") -> bool:
        """Whether one view of the store has both."""
        return self.begin == before.begin and self.part.feed.row == before.part.feed.row + 1


def _blocks(pack: Pack, setup_cost: int) -> list[_Block]:
    """The feeds by row; long ones cut where a further call is cheaper than looking at what comes later in a prompt."""
    most = BLOCK_TOKENS if setup_cost < BLOCK_TOKENS**2 else int(pack.sizes.max())
    blocks = [
        _Block(number, part, begin, min(begin + most, part.size))
        for number, part in enumerate(pack.parts)
        for begin in range(0, part.size, most)
    ]
    return sorted(blocks, key=lambda block: (block.begin, block.part.feed.row))


def _width(store: KVStore, block: _Block) -> int:
    """Slots of a row that attention has to look at, rounded up."""
    needed = max(int(store.extents[block.part.feed.row]), int(block.part.slots[block.end - 1]) + 1)
    return min(store.width, -(-needed // WIDTH_STEP) * WIDTH_STEP)


def _group(store: KVStore, pack: Pack, blocks: list[_Block]) -> RowGroup:
    """Index and mask arrays of blocks in neighbouring rows."""
    positions, trees = pack.positions, pack.trees
    first_row, num_rows = blocks[0].part.feed.row, len(blocks)
    num_padded = max(block.size for block in blocks)
    width = max(_width(store, block) for block in blocks)
    rows = slice(first_row, first_row + num_rows)
    sees = np.repeat(store.committed[rows, None, :width], num_padded, axis=1)
    slot_positions = store.positions[rows, :width].copy()
    first_queries = np.array([block.part.offset + block.begin for block in blocks])
    queries = np.repeat(first_queries[:, None], num_padded, axis=1)
    if all(block.part.size == 1 for block in blocks):
        new_slots = np.array([block.part.slots[0] for block in blocks])
        every = np.arange(num_rows)
        slot_positions[every, new_slots] = positions[queries[:, 0]]
        sees[every, 0, new_slots] = True
        return RowGroup(queries, sees, positions[queries], slot_positions, first_row)
    for r, block in enumerate(blocks):
        part, end, size, chain = block.part, block.end, block.size, len(block.part.feed.chain_ids)
        queries[r, :size] += np.arange(size)
        slot_positions[r, part.slots[:end]] = positions[part.offset : part.offset + end]
        among = np.tri(size, end, block.begin, dtype=bool)  # which of the feed's tokens sees which: first as a chain
        if end > chain:
            first_node = max(block.begin, chain)
            start = trees.starts[block.number]
            ancestors = trees.ancestors[start + first_node - chain : start + end - chain]
            among[first_node - block.begin :, chain:] = (ancestors[:, None] >> np.arange(end - chain)) & 1
        sees[r, :size, part.slots[:end]] = among.T
        sees[r, size:, part.slots[0]] = True  # padding must see something
    return RowGroup(queries, sees, positions[queries], slot_positions, first_row)
