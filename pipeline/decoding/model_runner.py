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
from pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, ancestor_matrix, node_depths
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

    def __len__(self) -> int:
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
        feeds_by_row = sorted(range(len(feeds)), key=lambda i: feeds[i].row)
        slots = [self.store.reserve(feed.row, len(feed)) for feed in feeds]
        sizes = np.array([len(feed) for feed in feeds])
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        lengths = self.store.lengths
        token_ids = np.concatenate([part for feed in feeds for part in (feed.chain_ids, feed.tree.token_ids)])
        positions = np.concatenate([feed_positions(feed, int(lengths[feed.row])) for feed in feeds])
        write_slots = np.concatenate([feed.row * self.store.width + s for feed, s in zip(feeds, slots, strict=True)])
        groups = [
            self._group([feeds[i] for i in rows], [slots[i] for i in rows], [offsets[i] for i in rows], positions)
            for rows in self._cut(feeds, slots, feeds_by_row)
        ]
        kept, starts = [], np.zeros(len(feeds), np.int64)
        num_kept = 0
        for i, feed in enumerate(feeds):
            starts[i] = num_kept
            if feed.wants_logits:
                first = offsets[i] + len(feed.chain_ids) - 1
                kept.append(np.arange(first, offsets[i + 1]))
                num_kept += len(feed.tree) + 1
        # A forward with no wanted logits still needs one row of them.
        keep = np.concatenate(kept) if kept else np.zeros(1, np.int64)

        to_device = lambda array: torch.from_numpy(array).to(self.device)  # noqa: E731
        plan = StepPlan(self.store, len(token_ids), to_device(write_slots), groups)
        arguments = {"logits_to_keep": to_device(keep)} if self._selects_logits and len(keep) < len(token_ids) else {}
        token = step_plan.set(plan)
        try:
            with torch.inference_mode():
                logits = self.model(
                    input_ids=to_device(token_ids.astype(np.int64))[None],
                    position_ids=to_device(positions.astype(np.int64))[None],
                    use_cache=False,
                    **arguments,
                ).logits[0]
                if len(logits) != len(keep):
                    logits = logits.index_select(0, to_device(keep))
        finally:
            step_plan.reset(token)
        self.last_plan = plan
        return StepOutput(logits, starts, slots)

    def _cut(self, feeds: list[Feed], slots: list[np.ndarray], order: list[int]) -> list[list[int]]:
        """Feeds in groups of neighbouring rows; a group is closed where a separate call is cheaper than padding."""
        groups: list[list[int]] = []
        cost = 0

        def cost_of(num_rows: int, num_padded: int, width: int) -> int:
            return self._call_cost + num_rows * (ROW_COST + num_padded) * width

        padded = width = 0
        for i in order:
            n, w = len(feeds[i]), self._width(feeds[i].row, slots[i])
            alone = cost_of(1, n, w)
            if groups and feeds[groups[-1][-1]].row + 1 == feeds[i].row:
                together = cost_of(len(groups[-1]) + 1, max(padded, n), max(width, w))
                if together <= cost + alone:
                    groups[-1].append(i)
                    padded, width, cost = max(padded, n), max(width, w), together
                    continue
            groups.append([i])
            padded, width, cost = n, w, alone
        return groups

    def _width(self, row: int, slots: np.ndarray) -> int:
        """Slots of a row that attention has to look at, rounded up."""
        needed = max(int(self.store.extents[row]), int(slots[-1]) + 1)
        return min(self.store.width, -(-needed // WIDTH_STEP) * WIDTH_STEP)

    def _group(self, feeds: list[Feed], slots: list[np.ndarray], offsets: list[int], positions: np.ndarray):
        """Index and mask arrays of one group of feeds in neighbouring rows."""
        store = self.store
        first_row, num_rows = feeds[0].row, len(feeds)
        num_padded = max(len(feed) for feed in feeds)
        width = max(self._width(feed.row, s) for feed, s in zip(feeds, slots, strict=True))
        rows = slice(first_row, first_row + num_rows)
        sees = np.repeat(store.committed[rows, None, :width], num_padded, axis=1)
        slot_positions = store.positions[rows, :width].copy()
        queries = np.repeat(np.array(offsets, np.int64)[:, None], num_padded, axis=1)
        sizes = np.array([len(feed.tree) for feed in feeds])
        parents = np.full((num_rows, int(sizes.max())), -1, np.int64)
        for r, feed in enumerate(feeds):
            parents[r, : sizes[r]] = feed.tree.parents
        sees_tree = ancestor_matrix(parents)
        for r, feed in enumerate(feeds):
            chain, size, tree_slots = len(feed.chain_ids), len(feed), slots[r]
            queries[r, :size] += np.arange(size)
            slot_positions[r, tree_slots] = positions[offsets[r] : offsets[r] + size]
            if size == 1:
                sees[r, :, tree_slots[0]] = True  # also for the padding, which must see something
                continue
            among = np.zeros((size, size), bool)
            among[:chain, :chain] = np.tri(chain, dtype=bool)
            among[chain:, :chain] = True
            among[chain:, chain:] = sees_tree[r, : size - chain, : size - chain]
            sees[r, :size, tree_slots] = among.T
            sees[r, size:, tree_slots[0]] = True
        return AttentionGroup(first_row, queries, sees, positions[queries], slot_positions)


def feed_positions(feed: Feed, num_committed: int) -> np.ndarray:
    """Absolute position of each token of a feed: int32[m + n]."""
    last = num_committed + len(feed.chain_ids) - 1
    chain = np.arange(num_committed, last + 1, dtype=np.int32)
    return chain if len(feed.tree) == 0 else np.concatenate((chain, last + node_depths(feed.tree.parents)))
