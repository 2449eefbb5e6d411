"""The KV cache: slots of one token each, owned by the engine and independent of the longest sequence.

A live sequence has a row: a list of slots in text order, anywhere in memory. Consecutive slots are read the fastest, so
where there is room a row continues after its last slot, or in a block of free slots. A forward's writes are kept only
once they are committed: committing an accepted branch keeps its slots and frees those of the rejected nodes. A prompt's
prefix is computed once: sequences that share it refer to the same slots, which are counted, not copied. Prompts of
ended sequences stay shareable until their slots are needed, and the first to end is forgotten first; slots that a later
prompt shares with it stay with that prompt. Memory grows by doubling, up to a bound, and shrinks to the slots of live
rows when a forward runs out of memory.
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
MIN_EXPECTED_REST = 16  # a live sequence is expected to need at least this many more tokens
SHRUNK_SHARE = 0.75  # share of the bound on slots that stays after a forward ran out of memory
UNBOUNDED = 1 << 60


@dataclass(frozen=True)
class RowLease:
    """A row given to a sequence; the first `num_shared` tokens of its text are already cached."""

    row: int
    num_shared: int


@dataclass
class LayerMemory:
    """Keys and values of one layer: (num_kv_heads, capacity + 1, head_dim); the last slot is scratch."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class _Prefix:
    """Tokens whose keys and values lie in `slots`, int32 both."""

    token_ids: np.ndarray
    slots: np.ndarray


_NO_SLOTS = np.empty(0, np.int32)


class KVCache:
    """Token slots over all layers, for up to `max_rows` live sequences.

    `max_rows` : the most sequences that can be live at once, and the most ended prompts that are remembered.
    `max_tokens` : bound on the number of slots.
    """

    def __init__(self, max_rows: int, max_tokens: int = UNBOUNDED) -> None:
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.lengths = np.zeros(max_rows, np.int64)  # number of committed tokens of each row
        self.num_committed_slots = 0  # slots that live rows hold; a shared slot counts once
        self._live = np.zeros(max_rows, bool)
        self._expected = np.zeros(max_rows, np.int64)  # length that each live row is expected to reach
        self._prefixes: PrefixIndex[_Prefix] = PrefixIndex()  # prefixes of live rows, by row
        self._ended_names = itertools.count()
        self._forget_slots()

    def _forget_slots(self) -> None:
        self.free = FreeSlots()
        self.layers: dict[int, LayerMemory] = {}
        self._table = np.zeros((self.max_rows, 0), np.int32)  # each row's slots in text order
        self._row_counts = np.zeros(0, np.int32)  # live rows that hold each slot
        self._prefix_counts = np.zeros(0, np.int32)  # remembered prefixes that hold each slot
        self._reserved = np.empty(0, np.int64)  # slots of the running forward, not free meanwhile
        self._ended: PrefixIndex[_Prefix] = PrefixIndex()  # prefixes of ended sequences

    @property
    def capacity(self) -> int:
        return self.free.capacity

    @property
    def num_live_rows(self) -> int:
        return int(self._live.sum())

    @property
    def scratch_slot(self) -> int:
        """A slot that no sequence ever holds, for padding to write to; it changes when the memory grows."""
        return self.capacity

    def acquire(self, token_ids: np.ndarray, num_expected: int, shares: bool = True) -> RowLease | None:
        """Give a row to a sequence that will probably have `num_expected` tokens.

        Returns None if no row is free, or if the expected lengths of all live sequences would not fit. `num_shared` is
        less than the text's length, as the last token is always computed for its logits; without `shares` it is 0.
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
        """The number of leading tokens of a text that are cached, and their slots, a live row's if it has as many."""
        live, ended = self._prefixes.longest(token_ids), self._ended.longest(token_ids)
        num_shared, donor = ended if ended[0] > live[0] else live
        if donor is None or num_shared < MIN_SHARED_TOKENS:
            return 0, _NO_SLOTS
        return num_shared, donor.slots[:num_shared]

    def slots_of(self, row: int) -> np.ndarray:
        """Slots of a row's committed tokens in text order: int32 view."""
        return self._table[row, : self.lengths[row]]

    def make_room(self, num_tokens: int) -> bool:
        """Forget ended prompts and grow until `num_tokens` slots are free; return whether they are."""
        self._give_back_reserved()
        while self.free.num_free < num_tokens and self._ended:
            self._forget_first()
        return self.free.num_free >= num_tokens or self._grow(num_tokens - self.free.num_free)

    def grow_to(self, num_tokens: int) -> None:
        """Grow to `num_tokens` slots, as far as bound and device allow: growing later moves keys and voids graphs."""
        bound = self.max_tokens
        missing = min(num_tokens, bound) - self.capacity
        if missing > 0 and not self._grow(missing):
            self.max_tokens = bound  # a smaller growth may still succeed when it is needed

    def reserve(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Reserve free slots for the next forward to write, int64[sum of counts]; those not committed are freed.

        Raises MemoryError: there are not enough, in which case `make_room` returns False.
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
        """Append `counts` of `slots`, in text order, to each of `rows`; the other reserved slots become free."""
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
        """Record that a row's text begins with these tokens, so that later texts may share their slots."""
        assert len(token_ids) <= self.lengths[row]
        previous = self._prefixes[row]
        new = self._table[row, len(previous.slots) : len(token_ids)].copy()
        self._prefix_counts[new] += 1
        self._remember(row, token_ids, np.concatenate((previous.slots, new)))

    def release(self, row: int) -> None:
        """End a sequence. Its remembered prefix stays shareable until its slots are needed."""
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
        """Forget the prefixes of ended sequences, which frees their slots."""
        while self._ended:
            self._forget_first()

    @torch.inference_mode()
    def shrink(self, min_tokens: int = 0) -> None:
        """Release memory that live rows do not need, after a forward that ran out of it.

        Ended prompts are forgotten, and slots of live rows move to the beginning of the memory. The bound on slots
        falls, though not below `min_tokens`, so that later growth leaves room for forwards. Slots that were reserved
        for an earlier forward become invalid.
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
            except Exception as error:  # either failure leaves the cache consistent
                if not is_out_of_memory(error):
                    raise
                logger.warning("the KV cache does not shrink: there is too little memory to copy a layer's part")

    @torch.inference_mode()  # like the forwards that write here
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
        """Bytes of one slot over all layers that were written so far."""
        return sum(tensor[:, 0].numel() * tensor.element_size() for tensor in self._tensors())

    def _expects_room(self, num_tokens: int) -> bool:
        """Whether `num_tokens` more fit besides the lengths that the live rows are expected to reach."""
        if not self._live.any():
            return True
        expected_growth = np.maximum(self._expected - self.lengths, MIN_EXPECTED_REST)[self._live].sum()
        return self.num_committed_slots + int(expected_growth) + num_tokens <= self.max_tokens

    def _remember(self, row: int, token_ids: np.ndarray, slots: np.ndarray) -> None:
        self._prefixes.put(row, token_ids, _Prefix(np.array(token_ids, np.int32), slots))

    def _forget_first(self) -> None:
        """Forget the prefix that ended first, and free the slots that only it held."""
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
        """Add at least `num_tokens` slots if bound and device allow it; if the device does not, lower the bound."""
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
        logger.warning("there is no memory for a KV cache of %d tokens; it stays at %d tokens", least, self.capacity)
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
        """Move the contents of held slots from `capacity` on to free slots below it; there must be enough of these."""
        sources = self.free.held_from(capacity)
        targets = self.free.free_below(capacity)[: len(sources)]
        if tensors := self._tensors():
            old, new = to_device(np.stack((sources, targets)), tensors[0].device)
            for tensor in tensors:
                tensor.index_copy_(1, new, tensor.index_select(1, old))
        moved = np.arange(self.capacity, dtype=np.int32)
        moved[capacity:] = 0  # stale entries of the table after the ends of rows
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
