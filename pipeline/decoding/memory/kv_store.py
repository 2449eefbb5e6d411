"""The KV cache: memory that the engine owns, a row of token slots for each live sequence.

A row is one contiguous range of slots, so that attention reads a view and gathers nothing (measured on a CPU at batch
16: a third of the time of gathering scattered slots). Within its row a sequence's slots are of single-token
granularity: the nodes of a draft take the lowest free slots, committing an accepted branch marks its slots as
committed, and the slots of the rejected ones are simply free again. Nothing is moved.

A freed row keeps its prompt's keys and values until it is used again. A new sequence takes the longest prefix that any
row, live or freed, shares with its prompt: in place if it is in the row it gets, else as one copy. Nothing is computed
twice.

Knows nothing of models, tokens' meaning, or drafts. Keys and values are shaped by the first write to each layer.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.memory.kv_cache import MIN_SHARED_TOKENS, RowLease, common_prefix, is_out_of_memory

logger = logging.getLogger(__name__)

ROW_STEP = 256  # rows grow by this many slots


@dataclass
class LayerCache:
    """Keys and values of one layer: (num_rows, num_kv_heads, width, head_dim), so that a head reads one stream."""

    keys: torch.Tensor
    values: torch.Tensor


class KVStore:
    """Rows of token slots over all layers.

    Parameters
    ----------
    max_rows : sequences that can be live at once.
    max_tokens : bound on rows x width, or None. Longer rows then mean fewer of them, while a sequence needs them.
    """

    def __init__(self, max_rows: int, max_tokens: int | None = None) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.width = 0
        self.num_rows = 0  # that there is memory for; grows with the number of live sequences
        self.layers: dict[int, LayerCache] = {}
        self.committed = np.zeros((max_rows, 0), bool)  # this slot holds a token of its row's sequence
        self.positions = np.zeros((max_rows, 0), np.int32)  # absolute position of the token in each slot
        self.extents = np.zeros(max_rows, np.int64)  # one past the last committed slot of each row
        self.lengths = np.zeros(max_rows, np.int64)  # number of committed tokens of each row
        self._live = np.zeros(max_rows, bool)
        self._widths = np.zeros(max_rows, np.int64)  # that each live row has to have
        # Tokens whose keys and values lie in slots 0, 1, 2, ... of a row, in order; outlives the lease.
        self._prefixes: list[np.ndarray] = [np.empty(0, np.int32)] * max_rows

    @property
    def num_live_rows(self) -> int:
        return int(self._live.sum())

    @property
    def num_committed_slots(self) -> int:
        return int(self.committed.sum())

    def rows_at(self, width: int) -> int:
        """How many rows there may be when each has `width` slots."""
        return self.max_rows if self.max_tokens is None else min(self.max_rows, self.max_tokens // width)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` could be held at all, were it alone."""
        return self.rows_at(num_tokens) > 0

    @torch.inference_mode()  # as the forwards that write here
    def acquire(self, prompt_ids: np.ndarray, num_tokens: int, num_expected: int | None = None) -> RowLease | None:
        """Give a row of at least `num_tokens` slots to a new sequence, or None while there is none free.

        `num_shared` is less than the prompt's length: its last token is always computed, for its logits. Where memory
        for the row cannot be had, the bound sinks to what there is. What is expected does not matter: a row is whole.
        """
        own_width = -(-num_tokens // ROW_STEP) * ROW_STEP
        if self.rows_at(own_width) == 0:
            own_width = num_tokens
        width = max(self.width, own_width)
        if self._live[: self.rows_at(width)].all():  # a longer sequence that has ended may have made the rows wide
            width = max(own_width, int(self._widths.max()))
        most_rows = self.rows_at(width)
        if self._live[most_rows:].any() or self._live[:most_rows].all():
            return None
        row = int(np.flatnonzero(~self._live[:most_rows])[0])
        if width != self.width or row >= self.num_rows:
            num_rows = self.num_rows if row < self.num_rows else max(row + 1, 2 * self.num_rows)
            least = max(row + 1, min(most_rows, self.num_rows))
            if not (self._resize(min(most_rows, num_rows), width) or self._resize(least, width)):
                self.max_tokens = self.num_rows * self.width
                found = f"there are {self.num_rows} of {self.width}"
                logger.warning("memory for %d rows of %d tokens cannot be had; %s", row + 1, width, found)
                return None
        shared, donor = self._longest_prefix(prompt_ids[:-1], row)
        if donor != row:
            for cache in self.layers.values():
                cache.keys[row, :, :shared] = cache.keys[donor, :, :shared]
                cache.values[row, :, :shared] = cache.values[donor, :, :shared]
        self._live[row], self._widths[row] = True, own_width
        self.committed[row] = False
        self.committed[row, :shared] = True
        self.positions[row, :shared] = np.arange(shared)
        self.extents[row] = self.lengths[row] = shared
        self._prefixes[row] = np.array(prompt_ids[:shared], np.int32)
        return RowLease(row, shared)

    def longest_prefix(self, prompt_ids: np.ndarray) -> int:
        """How many leading tokens of a prompt are cached."""
        return self._longest_prefix(prompt_ids, 0)[0]

    def make_room(self, num_tokens: int) -> bool:
        """Always: a row has room for its whole sequence."""
        return True

    def _longest_prefix(self, prompt_ids: np.ndarray, row: int) -> tuple[int, int]:
        """Longest cached prefix of a prompt: its length and the row that holds it (`row` where it is as long)."""
        best, donor = common_prefix(self._prefixes[row], prompt_ids), row
        for other, prefix in enumerate(self._prefixes):
            if len(prefix) > max(best, MIN_SHARED_TOKENS - 1):
                length = common_prefix(prefix, prompt_ids)
                if length > best and length >= MIN_SHARED_TOKENS:
                    best, donor = length, other
        return best, donor

    def reserve(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The lowest free slots of each row, one row's after another's: int64[sum of counts].

        They are for the next forward to write, free until committed.
        """
        extents, ends = self.extents[rows], np.cumsum(counts)
        slots = np.arange(ends[-1]) + np.repeat(extents - (ends - counts), counts)
        for i in np.flatnonzero(self.lengths[rows] != extents).tolist():  # rows with holes
            free = np.flatnonzero(~self.committed[rows[i], : extents[i] + counts[i]])
            slots[ends[i] - counts[i] : ends[i]] = free[: counts[i]]
        assert slots.max() < self.width, "a row is shorter than its sequence"
        return slots

    def commit(self, rows: np.ndarray, counts: np.ndarray, slots: np.ndarray) -> None:
        """Keep what was written to so many `slots` of each row, in text order: it continues the row's sequence.

        A row's slots are ascending, as `reserve` gave them and as paths go through a draft.
        """
        lengths, ends, all_rows = self.lengths[rows], np.cumsum(counts), np.repeat(rows, counts)
        self.committed[all_rows, slots] = True
        self.positions[all_rows, slots] = np.arange(ends[-1]) + np.repeat(lengths - (ends - counts), counts)
        self.lengths[rows] = lengths + counts
        self.extents[rows] = np.maximum(self.extents[rows], slots[ends - 1] + 1)

    def remember_prefix(self, row: int, token_ids: np.ndarray) -> None:
        """State that slots 0, 1, ... of a row hold these tokens in order, so that later prompts may share them."""
        assert self.committed[row, : len(token_ids)].all()
        self._prefixes[row] = np.array(token_ids, np.int32)

    def release(self, row: int) -> None:
        """End a sequence. Its prompt stays shareable until the row is given away again."""
        assert self._live[row], "a row was released twice"
        self._live[row] = False
        self.committed[row] = False
        self.extents[row] = self.lengths[row] = self._widths[row] = 0

    def forget_ended(self) -> None:
        """Share nothing any more of sequences that have ended."""
        for row in np.flatnonzero(~self._live).tolist():
            self._prefixes[row] = np.empty(0, np.int32)

    @torch.inference_mode()
    def erase(self, row: int) -> None:
        """Overwrite what a row has not committed: attention multiplies masked values by zero, which keeps NaN."""
        is_free = torch.from_numpy(~self.committed[row])
        for cache in self.layers.values():
            for memory in (cache.keys, cache.values):
                memory[row, :, is_free.to(memory.device)] = 0

    def drop_unused(self) -> None:
        """Give all memory back if no live row has a token in it: after a first forward that it was too much for."""
        if not self.committed.any():
            self.layers.clear()
            self.num_rows = int(np.flatnonzero(self._live).max(initial=-1)) + 1
            self._prefixes = [np.empty(0, np.int32)] * self.max_rows

    def flat_index(self, rows: np.ndarray, slots: np.ndarray, num_kv_heads: int) -> np.ndarray:
        """Where `write` puts tokens: int64[num_kv_heads * num_tokens] for rows and slots int64[num_tokens]."""
        heads = np.arange(num_kv_heads)[:, None]
        return ((rows * num_kv_heads + heads) * self.width + slots).reshape(-1)

    @torch.inference_mode()
    def write(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> LayerCache:
        """Store new keys and values, (num_kv_heads, num_tokens, head_dim) each, at a flat index on their device."""
        cache = self.layers.get(layer)
        if cache is None:
            cache = self.layers[layer] = LayerCache(self._empty(keys), self._empty(values))
        for memory, new in ((cache.keys, keys), (cache.values, values)):
            head_dim = new.shape[-1]
            memory.view(-1, head_dim).index_copy_(0, index, new.reshape(-1, head_dim))
        return cache

    def bytes_per_token(self) -> int:
        """Memory of one slot over all layers that were written so far."""
        tensors = [t for cache in self.layers.values() for t in (cache.keys, cache.values)]
        return sum(t[0, :, 0].numel() * t.element_size() for t in tensors)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, since a masked slot's value is still multiplied by zero, and zero times NaN is not.
        return like.new_zeros(self.num_rows, like.shape[0], self.width, like.shape[2])

    def _resize(self, num_rows: int, width: int) -> bool:
        """Give every layer this shape; False, and all as before, where there is no memory for it."""
        old_rows, old_width = self.num_rows, self.width
        self._prefixes = [prefix[: width * (row < num_rows)] for row, prefix in enumerate(self._prefixes)]
        try:
            for cache in self.layers.values():  # one tensor at a time, so that little is held twice
                _reshape(cache, num_rows, width)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for cache in self.layers.values():
                _reshape(cache, old_rows, old_width)
            return False
        self.num_rows, self.width = num_rows, width
        padding = (0, 0), (0, max(0, width - old_width))
        self.committed = np.pad(self.committed[:, :width], padding)
        self.positions = np.pad(self.positions[:, :width], padding)
        return True


def _reshape(cache: LayerCache, num_rows: int, width: int) -> None:
    """Copy a layer to another number of rows and width."""
    for name in ("keys", "values"):
        old = getattr(cache, name)
        if (old.shape[0], old.shape[2]) != (num_rows, width):
            new = old.new_zeros(num_rows, old.shape[1], width, old.shape[3])
            rows, columns = min(num_rows, old.shape[0]), min(width, old.shape[2])
            new[:rows, :, :columns] = old[:rows, :, :columns]
            setattr(cache, name, new)
