"""The free slots of the KV cache, and the search for consecutive ones, which are read the fastest."""

import numpy as np

BLOCK_SLOTS = 64  # a row that cannot continue after its last slot looks for a free block of this many slots


class FreeSlots:
    """Slots from 0 on, each held or free.

    `capacity` : number of slots.
    `num_free` : number of free slots.
    """

    def __init__(self) -> None:
        self.capacity = self.num_free = 0
        self._is_free = np.zeros(1, bool)  # each slot, and one after the last, which is never free
        self._num_free_of = np.zeros(0, np.int64)  # free slots of each block of BLOCK_SLOTS

    def are_free(self, slots: np.ndarray) -> np.ndarray:
        """Whether each slot is free, bool[n]; slots after the last never are."""
        return self._is_free[np.minimum(slots, self.capacity)]

    def free_below(self, capacity: int) -> np.ndarray:
        """Free slots below `capacity`, int64[n], ascending."""
        return np.flatnonzero(self._is_free[:capacity])

    def held_from(self, capacity: int) -> np.ndarray:
        """Held slots from `capacity` on, int64[n], ascending."""
        return capacity + np.flatnonzero(~self._is_free[capacity : self.capacity])

    def give(self, slots: np.ndarray) -> None:
        """Make held slots free."""
        self._is_free[slots] = True
        np.add.at(self._num_free_of, slots // BLOCK_SLOTS, 1)
        self.num_free += len(slots)

    def take(self, slots: np.ndarray) -> None:
        self._is_free[slots] = False
        np.subtract.at(self._num_free_of, slots // BLOCK_SLOTS, 1)
        self.num_free -= len(slots)

    def take_runs(self, counts: np.ndarray) -> np.ndarray:
        """Take a new run of slots for each of `counts` tokens: int64[sum of counts]. As many must be free."""
        free = self._free_blocks()
        if len(counts) <= len(free) and counts.max() <= BLOCK_SLOTS:  # as below, but vectorised
            starts = free[: len(counts)] * BLOCK_SLOTS
            slots = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
            self.take(slots)
            return slots
        runs = []
        for count in counts.tolist():
            runs.append(self.new_run(count))
            self.take(runs[-1])
        return np.concatenate(runs)

    def new_run(self, num_tokens: int) -> np.ndarray:
        """Free slots for `num_tokens` tokens, int64: consecutive ones in free blocks, otherwise the first free ones."""
        num_blocks = -(-num_tokens // BLOCK_SLOTS)
        free = self._free_blocks()
        last = free[num_blocks - 1 :]
        runs = np.flatnonzero(last - free[: len(last)] == num_blocks - 1)  # index in `free` of each run's first block
        if len(runs):
            return free[runs[0]] * BLOCK_SLOTS + np.arange(num_tokens)
        blocks = np.flatnonzero(self._num_free_of)
        blocks = blocks[: np.searchsorted(np.cumsum(self._num_free_of[blocks]), num_tokens) + 1]
        slots = (blocks[:, None] * BLOCK_SLOTS + np.arange(BLOCK_SLOTS)).ravel()
        return slots[self.are_free(slots)][:num_tokens]

    def grow_to(self, capacity: int) -> None:
        """Add slots up to `capacity`, which are free."""
        self._is_free = np.pad(self._is_free, (0, capacity - self.capacity))
        self._num_free_of = np.pad(self._num_free_of, (0, -(-capacity // BLOCK_SLOTS) - len(self._num_free_of)))
        self.give(np.arange(self.capacity, capacity))
        self.capacity = capacity

    def cut_to(self, capacity: int) -> None:
        """Remove the slots from `capacity` on, which must be free."""
        self.take(np.arange(capacity, self.capacity))
        self._is_free = self._is_free[: capacity + 1]
        self._num_free_of = self._num_free_of[: -(-capacity // BLOCK_SLOTS)]
        self.capacity = capacity

    def _free_blocks(self) -> np.ndarray:
        return np.flatnonzero(self._num_free_of == BLOCK_SLOTS)
