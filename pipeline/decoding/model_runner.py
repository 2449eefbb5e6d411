"""One forward of a model over the nodes of several sequences, packed raggedly into one row of tokens.

A sequence feeds a chain (its committed tokens that are not cached yet, at least the last) and a draft tree below it.
Logits come back for the chain's last token and for every node of the tree, and for nothing else.

Knows no request, no verifier and no drafter.
"""

import inspect
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.decoding.kv_store import KVStore
from pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, ancestor_matrix, node_depths, padded_parents
from pipeline.decoding.tree_attention import AttentionGroup, StepPlan, step_plan

WIDTH_STEP = 16  # attention widths are rounded up to this many slots: aligned, and fewer distinct shapes
# Cost of an attention call, and of a padded query, in the time that one (row, slot) takes with one query; measured on
# CPU with heads of 128. Groups of rows are cut where padding would cost more than a further call.
CALL_COST_CPU, CALL_COST_CUDA, ROW_COST = 1000, 100_000, 7


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


@dataclass(frozen=True)
class StepOutput:
    """Result of one forward.

    `logits`: (num_kept, vocab_size) on the device. Of feed i, rows `starts[i]` (after the chain) and the following
    `len(tree)` are its own, where it wants any. `slots[i]`: int64, the row's slots its tokens were written to.
    """

    logits: torch.Tensor
    starts: np.ndarray
    slots: list[np.ndarray]


class ModelRunner:
    """Runs packed steps of a transformers model whose attention is `tree_attention`, over one KV store."""

    def __init__(self, model, store: KVStore, device: torch.device) -> None:
        self.model = model
        self.store = store
        self.device = device
        self.last_plan: StepPlan | None = None  # of the newest forward, for checks
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._call_cost = CALL_COST_CPU if device.type == "cpu" else CALL_COST_CUDA

    def forward(self, feeds: list[Feed]) -> StepOutput:
        """Run the model over all feeds at once. Nothing is committed: the caller commits the slots it keeps."""
        store = self.store
        sizes = [len(feed.chain_ids) + len(feed.tree.token_ids) for feed in feeds]
        offsets = np.cumsum([0, *sizes])
        num_tokens = int(offsets[-1])
        slots = [store.reserve(feed.row, size) for feed, size in zip(feeds, sizes, strict=True)]
        token_ids = np.concatenate([part for feed in feeds for part in (feed.chain_ids, feed.tree.token_ids)])
        positions = np.concatenate([feed_positions(feed, int(store.lengths[feed.row])) for feed in feeds])
        rows = np.repeat([feed.row for feed in feeds], sizes)
        packed = [_Packed(*parts) for parts in zip(feeds, slots, offsets[:-1].tolist(), sizes, strict=True)]
        plan = StepPlan(store, num_tokens, rows, np.concatenate(slots), self._groups(packed, positions))

        starts = np.zeros(len(feeds), np.int64)
        kept: list[np.ndarray] = []
        num_kept = 0
        for i, part in enumerate(packed):
            starts[i] = num_kept
            if part.feed.wants_logits:
                first = part.offset + len(part.feed.chain_ids) - 1
                kept.append(np.arange(first, part.offset + part.size))
                num_kept += part.offset + part.size - first
        # A forward with no wanted logits still needs one row of them.
        keep = np.concatenate(kept) if kept else np.zeros(1, np.int64)
        logits = self._run(plan, token_ids, positions, keep)
        self.last_plan = plan
        return StepOutput(logits, starts, slots)

    @torch.inference_mode()
    def _run(self, plan: StepPlan, token_ids: np.ndarray, positions: np.ndarray, keep: np.ndarray) -> torch.Tensor:
        """The model's logits of the tokens `keep` of a pack: (len(keep), vocab_size)."""
        selects = self._selects_logits and len(keep) < plan.num_tokens
        arguments = {"logits_to_keep": self._on_device(keep)} if selects else {}
        token = step_plan.set(plan)
        try:
            logits = self.model(
                input_ids=self._on_device(token_ids)[None],
                position_ids=self._on_device(positions)[None],
                use_cache=False,
                **arguments,
            ).logits[0]
        finally:
            step_plan.reset(token)
        return logits if len(logits) == len(keep) else logits.index_select(0, self._on_device(keep))

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self.device)

    def _groups(self, packed: list["_Packed"], positions: np.ndarray) -> list[AttentionGroup]:
        """Neighbouring rows together; a group is closed where a further call is cheaper than padding."""
        members: list[list[_Packed]] = []
        padded = width = cost = 0
        for part in sorted(packed, key=lambda part: part.feed.row):
            part_width = self._width(part)
            alone = self._cost(1, part.size, part_width)
            if members and members[-1][-1].feed.row + 1 == part.feed.row:
                padded_together, width_together = max(padded, part.size), max(width, part_width)
                together = self._cost(len(members[-1]) + 1, padded_together, width_together)
                if together <= cost + alone:
                    members[-1].append(part)
                    padded, width, cost = padded_together, width_together, together
                    continue
            members.append([part])
            padded, width, cost = part.size, part_width, alone
        return [self._group(group, positions) for group in members]

    def _cost(self, num_rows: int, num_padded: int, width: int) -> int:
        return self._call_cost + num_rows * (ROW_COST + num_padded) * width

    def _width(self, part: "_Packed") -> int:
        """Slots of a row that attention has to look at, rounded up."""
        needed = max(int(self.store.extents[part.feed.row]), int(part.slots[-1]) + 1)
        return min(self.store.width, -(-needed // WIDTH_STEP) * WIDTH_STEP)

    def _group(self, packed: list["_Packed"], positions: np.ndarray) -> AttentionGroup:
        """Index and mask arrays of feeds in neighbouring rows."""
        store = self.store
        first_row, num_rows = packed[0].feed.row, len(packed)
        num_padded = max(part.size for part in packed)
        width = max(self._width(part) for part in packed)
        rows = slice(first_row, first_row + num_rows)
        sees = np.repeat(store.committed[rows, None, :width], num_padded, axis=1)
        slot_positions = store.positions[rows, :width].copy()
        queries = np.repeat(np.array([part.offset for part in packed])[:, None], num_padded, axis=1)
        if num_padded == 1:
            new_slots = np.array([part.slots[0] for part in packed])
            every = np.arange(num_rows)
            slot_positions[every, new_slots] = positions[queries[:, 0]]
            sees[every, 0, new_slots] = True
            return AttentionGroup(first_row, queries, sees, positions[queries], slot_positions)
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
        return AttentionGroup(first_row, queries, sees, positions[queries], slot_positions)


@dataclass(frozen=True, slots=True)
class _Packed:
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
