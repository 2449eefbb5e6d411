"""The KV cache: memory of single tokens that the engine owns, whatever the longest sequence.

A live sequence has a row: a list of slots in text order, anywhere in memory. Where there is room they lie in runs,
which are read the fastest: a row goes on behind its last slot, or in a block of slots that are all free. What a forward
writes is kept only once it is committed: committing an accepted branch keeps its slots, those of the rejected nodes are
free again. A prompt's prefix is computed once: sequences that share it name the same slots, which are counted, not
copied. Prompts of sequences that ended stay shareable until their place is needed, those that ended first going first
(what a later one shared with them stays with it). Memory grows by doubling, up to a bound, and shrinks to what live
rows hold when a forward runs out of memory.
"""

import itertools
import logging
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.device_memory import is_out_of_memory, to_device
from laserbatch.pipeline.decoding.free_slots import FreeSlots
from laserbatch.pipeline.decoding.prefix_index import PrefixIndex

logger = logging.getLogger(__name__)

MIN_SHARED_TOKENS = 8  # a shorter common prefix costs more to share than to compute
GROWTH_STEP = 1024  # capacities are multiples of this, below the bound
MIN_EXPECTED_REST = 16  # tokens that a live sequence is expected to need still, at least
SHRUNK_SHARE = 0.75  # of the bound on slots, that stays when a forward has run out of memory
UNBOUNDED = 1 << 60


@dataclass(frozen=True)
class RowLease:
    """A row given to a sequence, of whose text the first `num_shared` tokens are already cached."""

    row: int
    num_shared: int


@dataclass
class LayerMemory:
    """Keys and values of one layer: (num_kv_heads, capacity + 1, head_dim), the last slot being scratch."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class _Prefix:
    """Tokens whose keys and values lie in `slots`, int32 both."""

    token_ids: np.ndarray
    slots: np.ndarray


_NO_SLOTS = np.empty(0, np.int32)


class KVCache:
    """Token slots over all layers, of up to `max_rows` live sequences.

    Parameters
    ----------
    max_rows : sequences that can be live at once; also how many ended prompts are kept.
    max_tokens : bound on slots.
    """

    def __init__(self, max_rows: int, max_tokens: int = UNBOUNDED) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.lengths = np.zeros(max_rows, np.int64)  # number of committed tokens of each row
        self.num_committed_slots = 0  # that live rows hold, a shared one counted once
        self._live = np.zeros(max_rows, bool)
        self._expected = np.zeros(max_rows, np.int64)  # length that each live row is expected to reach
        self._prefixes: PrefixIndex[_Prefix] = PrefixIndex()  # of live rows, by row
        self._ended_names = itertools.count()
        self._forget_slots()

    def _forget_slots(self) -> None:
        """No slot is there any more, and nothing is held in one."""
        self.free = FreeSlots()
        self.layers: dict[int, LayerMemory] = {}
        self._table = np.zeros((self.max_rows, 0), np.int32)  # of each row, its slots in text order
        self._row_counts = np.zeros(0, np.int32)  # live rows that hold each slot
        self._prefix_counts = np.zeros(0, np.int32)  # remembered prefixes that hold each slot
        self._reserved = np.empty(0, np.int64)  # not free for as long as a forward runs
        self._ended: PrefixIndex[_Prefix] = PrefixIndex()  # of rows that ended

    @property
    def capacity(self) -> int:
        return self.free.capacity

    @property
    def num_live_rows(self) -> int:
        return int(self._live.sum())

    @property
    def scratch_slot(self) -> int:
        """A slot that no sequence ever holds, for padding to write to; another one after the memory has grown."""
        return self.capacity

    def acquire(self, token_ids: np.ndarray, num_expected: int, shares: bool = True) -> RowLease | None:
        """Give a row to a sequence that will probably have `num_expected` tokens.

        None while there is none free, or no room for what is expected of all. `num_shared` is less than the text's
        length: its last token is always computed, for its logits; without `shares` it is 0.
        """
        shared, slots = self.longest_prefix(token_ids[:-1]) if shares else (0, _NO_SLOTS)
        num_held = int((self._row_counts[slots] > 0).sum())
        if self._live.all() or not self._expects_room(num_expected - num_held):
            return None
        row = int(np.flatnonzero(~self._live)[0])
        self._live[row] = True
        self._expected[row] = num_expected
        self._widen_table(shared)
        self._table[row, :shared] = slots
        self.lengths[row] = shared
        self.num_committed_slots += shared - num_held
        self._row_counts[slots] += 1
        self._prefix_counts[slots] += 1
        self._remember(row, token_ids[:shared], slots.copy())
        return RowLease(row, shared)

    def longest_prefix(self, token_ids: np.ndarray) -> tuple[int, np.ndarray]:
        """How many leading tokens of a text are cached, and their slots; a live row's where it has as many."""
        live, ended = self._prefixes.longest(token_ids), self._ended.longest(token_ids)
        num_shared, donor = ended if ended[0] > live[0] else live
        if donor is None or num_shared < MIN_SHARED_TOKENS:
            return 0, _NO_SLOTS
        return num_shared, donor.slots[:num_shared]

    def slots_of(self, row: int) -> np.ndarray:
        """Slots of a row's committed tokens in text order: int32 view."""
        return self._table[row, : self.lengths[row]]

    def make_room(self, num_tokens: int) -> bool:
        """Whether this many slots are free, after forgetting ended prompts and growing as far as that is needed."""
        self._give_back_reserved()
        while self.free.num_free < num_tokens and self._ended:
            self._forget_first()
        return self.free.num_free >= num_tokens or self._grow(num_tokens - self.free.num_free)

    def grow_to(self, num_tokens: int) -> None:
        """Have so many slots now, as far as bound and device allow it: later growth moves keys, which voids graphs."""
        bound = self.max_tokens
        missing = min(num_tokens, bound) - self.capacity
        if missing > 0 and not self._grow(missing):
            self.max_tokens = bound  # less may still be had, when it is needed

    def reserve(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Free slots, int64[sum of counts]: for the next forward to write, free until committed.

        Raises MemoryError: there are not as many, which `make_room` would have said.
        """
        counts = np.asarray(counts)
        total = int(counts.sum())
        if not self.make_room(total):
            raise MemoryError(f"the KV cache of {self.max_tokens} tokens has no room for {total} more")
        self._widen_table(1)
        lengths, first = self.lengths[rows], np.cumsum(counts) - counts
        starts = np.where(lengths > 0, self._table[rows, lengths - 1].astype(np.int64) + 1, self.capacity)
        slots = np.arange(total) + np.repeat(starts - first, counts)
        goes_on = np.logical_and.reduceat(self.free.are_free(slots), first)
        if len(rows) > 1:  # rows that have only shared tokens may end in the same slot
            alone = np.zeros(len(rows), bool)
            alone[np.unique(starts, return_index=True)[1]] = True
            goes_on &= alone
        is_placed = np.repeat(goes_on, counts)
        self.free.take(slots[is_placed])
        if not goes_on.all():
            slots[~is_placed] = self.free.take_runs(counts[~goes_on])
        self._reserved = slots
        return slots

    def commit(self, rows: np.ndarray, counts: np.ndarray, slots: np.ndarray) -> None:
        """Keep what was written to so many `slots` of each row, in text order; other reserved slots are free again."""
        lengths = self.lengths[rows]
        columns = np.arange(len(slots)) + np.repeat(lengths - (np.cumsum(counts) - counts), counts)
        self._widen_table(int((lengths + counts).max()))
        self._table[np.repeat(rows, counts), columns] = slots
        self.lengths[rows] = lengths + counts
        self.num_committed_slots += len(slots)
        self._row_counts[slots] += 1
        assert (self._row_counts[slots] == 1).all(), "a slot was committed twice"
        self._reserved = self._reserved[self._row_counts[self._reserved] == 0]
        self._give_back_reserved()

    def remember_prefix(self, row: int, token_ids: np.ndarray) -> None:
        """State that a row's text begins with these tokens, so that later ones may share their slots."""
        assert len(token_ids) <= self.lengths[row]
        previous = self._prefixes[row]
        new = self._table[row, len(previous.slots) : len(token_ids)].copy()
        self._prefix_counts[new] += 1
        self._remember(row, token_ids, np.concatenate((previous.slots, new)))

    def release(self, row: int) -> None:
        """End a sequence. Its remembered prefix stays shareable until its place is needed."""
        assert self._live[row], "a row was released twice"
        slots = self.slots_of(row)
        self._row_counts[slots] -= 1
        unheld = slots[self._row_counts[slots] == 0]
        self.num_committed_slots -= len(unheld)
        self.free.give(unheld[self._prefix_counts[unheld] == 0])
        self._live[row] = False
        self.lengths[row] = self._expected[row] = 0
        ended = self._prefixes.pop(row)
        self._ended.put(next(self._ended_names), ended.token_ids, ended)
        if len(self._ended) > self.max_rows:
            self._forget_first()

    def drop_prefixes(self) -> None:
        """Share nothing any more of sequences that have ended; their slots are free."""
        while self._ended:
            self._forget_first()

    @torch.inference_mode()
    def shrink(self, min_tokens: int = 0) -> None:
        """Give memory back that live rows do not need, after a forward that ran out of it.

        Ended prompts are forgotten, and slots of live rows move to the beginning of the memory. The bound on slots
        sinks, so that later growth leaves room for forwards; but not below `min_tokens`. Slots that a caller still has
        of a forward are void.
        """
        self._give_back_reserved()
        self.drop_prefixes()
        least = max(int(SHRUNK_SHARE * self.max_tokens), self.num_committed_slots, min_tokens)
        self.max_tokens = min(self.max_tokens, least)
        capacity = min(-(-self.num_committed_slots // GROWTH_STEP) * GROWTH_STEP, self.max_tokens)
        if capacity == 0:
            self._forget_slots()
        elif capacity < self.capacity:
            try:
                self._move_below(capacity)
                self._cut(capacity)
            except Exception as error:  # both leave a cache that is whole
                if not is_out_of_memory(error):
                    raise
                logger.warning("the KV cache cannot give memory back: there is none for a copy of a layer's")

    @torch.inference_mode()  # as the forwards that write here
    def write(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> LayerMemory:
        """Store new keys and values, (num_kv_heads, num_tokens, head_dim) each, at an index on their device."""
        cache = self.layers.get(layer)
        if cache is None:
            empty = [new.new_zeros(new.shape[0], self.capacity + 1, new.shape[2]) for new in (keys, values)]
            cache = self.layers[layer] = LayerMemory(*empty)
        cache.keys.index_copy_(1, index, keys)
        cache.values.index_copy_(1, index, values)
        return cache

    def bytes_per_token(self) -> int:
        """Memory of one slot over all layers that were written so far."""
        return sum(tensor[:, 0].numel() * tensor.element_size() for tensor in self._tensors())

    def _expects_room(self, num_tokens: int) -> bool:
        """Whether so many more tokens fit beside what the live rows are expected to grow to."""
        if not self._live.any():
            return True
        expected_growth = np.maximum(self._expected - self.lengths, MIN_EXPECTED_REST)[self._live].sum()
        return self.num_committed_slots + int(expected_growth) + num_tokens <= self.max_tokens

    def _remember(self, row: int, token_ids: np.ndarray, slots: np.ndarray) -> None:
        self._prefixes.put(row, token_ids, _Prefix(np.array(token_ids, np.int32), slots))

    def _forget_first(self) -> None:
        """Free the slots that only the first prefix to end still held."""
        slots = self._ended.pop_first().slots
        self._prefix_counts[slots] -= 1
        unheld = (self._prefix_counts[slots] == 0) & (self._row_counts[slots] == 0)
        self.free.give(slots[unheld])

    def _give_back_reserved(self) -> None:
        self.free.give(self._reserved)
        self._reserved = self._reserved[:0]

    def _widen_table(self, width: int) -> None:
        held = self._table.shape[1]
        if width > held:
            more = np.zeros((len(self._table), max(width - held, held)), self._table.dtype)
            self._table = np.hstack((self._table, more))

    def _grow(self, num_tokens: int) -> bool:
        """Add at least so many slots, if bound and device allow it; if the device does not, the bound sinks."""
        least = self.capacity + num_tokens
        if least > self.max_tokens:
            return False
        rounded = -(-max(least, 2 * self.capacity) // GROWTH_STEP) * GROWTH_STEP
        for capacity in (min(rounded, self.max_tokens), least):
            try:
                self._resize(capacity)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                continue
            self._row_counts, self._prefix_counts = (
                np.pad(counts, (0, capacity - self.capacity)) for counts in (self._row_counts, self._prefix_counts)
            )
            self.free.grow_to(capacity)
            return True
        logger.warning("memory for a KV cache of %d tokens cannot be had; it stays at %d", least, self.capacity)
        self.max_tokens = self.capacity
        return False

    @torch.inference_mode()
    def _resize(self, capacity: int) -> None:
        for cache in self.layers.values():  # one tensor at a time, so that little is held twice
            for name in ("keys", "values"):
                old = getattr(cache, name)
                if old.shape[1] <= capacity:
                    grown = old.new_zeros(old.shape[0], capacity + 1, old.shape[2])
                    grown[:, : old.shape[1]] = old
                    setattr(cache, name, grown)

    def _move_below(self, capacity: int) -> None:
        """Move what is held in slots from `capacity` on to free ones below it, of which there are enough."""
        sources = self.free.held_from(capacity)
        targets = self.free.free_below(capacity)[: len(sources)]
        if tensors := self._tensors():
            old, new = to_device(np.stack((sources, targets)), tensors[0].device)
            for tensor in tensors:
                tensor.index_copy_(1, new, tensor.index_select(1, old))
        moved = np.arange(self.capacity, dtype=np.int32)
        moved[capacity:] = 0  # what rows of the table still name behind their ends
        moved[sources] = targets
        self._table = moved[self._table]
        for prefix in self._prefixes.values():
            prefix.slots = moved[prefix.slots]
        for counts in (self._row_counts, self._prefix_counts):
            counts[targets], counts[sources] = counts[sources], 0
        self.free.take(targets)
        self.free.give(sources)

    def _cut(self, capacity: int) -> None:
        """Drop the slots from `capacity` on, which are free; a layer that finds no memory for its copy stays larger."""
        self.free.cut_to(capacity)
        self._row_counts, self._prefix_counts = self._row_counts[:capacity], self._prefix_counts[:capacity]
        for cache in self.layers.values():  # one tensor at a time, so that little is held twice
            cache.keys = cache.keys[:, : capacity + 1].clone()
            cache.values = cache.values[:, : capacity + 1].clone()

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for cache in self.layers.values() for tensor in (cache.keys, cache.values)]
