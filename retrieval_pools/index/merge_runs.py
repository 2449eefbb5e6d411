"""Sorted runs of texts merged to one order, by what neighbours of a run share: hardly a token is looked at twice.

Of two positions that both come after a third, the one that shares more tokens with it comes first; only where they
share as many are tokens compared, from there on (LCP merging: Ng and Kakehi 2008). Orders are as in `merge`, in chunks
of positions and of what each shares with the one before it. Knows neither pools nor files.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numba import njit

from laserbatch.retrieval_pools.fetch import fetch
from laserbatch.retrieval_pools.index.places import compare

CHUNK_PLACES = 1 << 16  # merged at a time: every merge of two holds a chunk
_AHEAD = 12  # places whose texts are fetched before they are compared


class RunChunk(NamedTuple):
    """Some places of a run.

    Parameters
    ----------
    positions : int32[n], in their order.
    shared : uint8[n], tokens that each shares with the position before it in the run, at most `depth`: of texts that
        are equal as far as they are compared, `depth`. 0 for the first of a run.
    """

    positions: np.ndarray
    shared: np.ndarray


def merge_runs(tokens: np.ndarray, runs: list[Iterable[RunChunk]], depth: int) -> Iterator[RunChunk]:
    """One run of any number of them, merged two and two, so that none need be in memory.

    Parameters
    ----------
    tokens : int32[n], what the runs are positions of; no two have one in common.
    depth : tokens compared; what all are sorted by.
    """
    if len(runs) <= 1:
        yield from runs[0] if runs else ()
        return
    middle = len(runs) // 2
    one, two = (_Side(merge_runs(tokens, half, depth)) for half in (runs[:middle], runs[middle:]))
    with_one = with_two = 0  # tokens that the next of each shares with the last one that was merged
    while one.chunk is not None and two.chunk is not None:
        room = min(one.num_left + two.num_left, CHUNK_PLACES)
        merged = RunChunk(np.empty(room, np.int32), np.empty(room, np.uint8))
        one.place, with_one, two.place, with_two, num_merged = _merge(
            tokens, one.chunk, one.place, with_one, two.chunk, two.place, with_two, depth, merged
        )
        if num_merged:
            yield RunChunk(merged.positions[:num_merged], merged.shared[:num_merged])
        with_one, with_two = one.advance(with_one), two.advance(with_two)
    for side, shared in ((one, with_one), (two, with_two)):
        if side.chunk is not None:
            yield side.rest(shared)
            yield from side.source


def shared_with_previous(tokens: np.ndarray, order: np.ndarray, depth: int) -> np.ndarray:
    """`RunChunk.shared` of a whole run, uint8[n]; `depth` is 255 at most."""
    shared = np.empty(len(order), np.uint8)
    _compare_neighbours(tokens, order, depth, shared)
    return shared


class _Side:
    """A run as it is used up: its chunk, and the next place in it."""

    def __init__(self, source: Iterator[RunChunk]) -> None:
        self.source, self.place = source, 0
        self.chunk = next(source, None)

    @property
    def num_left(self) -> int:
        return len(self.chunk.positions) - self.place

    def advance(self, shared: int) -> int:
        """Take the next chunk when this one is used up; returns what its first shares with what was merged last."""
        if self.num_left:
            return shared
        self.chunk, self.place = next(self.source, None), 0
        return 0 if self.chunk is None else int(self.chunk.shared[0])

    def rest(self, shared: int) -> RunChunk:
        """What is left of the chunk."""
        chunk = RunChunk(self.chunk.positions[self.place :], self.chunk.shared[self.place :].copy())
        chunk.shared[0] = shared
        return chunk


@njit(cache=True)
def _compare_neighbours(tokens, order, depth, shared):
    last = order.shape[0] - 1
    if last >= 0:
        shared[0] = 0
    for k in range(1, order.shape[0]):
        fetch(tokens, order[min(k + _AHEAD, last)])
        shared[k], _ = compare(tokens, order[k - 1], order[k], 0, depth)


@njit(cache=True)
def _merge(tokens, one, i, with_one, two, j, with_two, depth, merged):
    """Merge two chunks until one is used up or `merged` is full.

    Returns of both the place reached and what its position shares with the last one merged, and how many were merged.
    Where a chunk is used up, the caller knows the latter from the next one.
    """
    num_merged, room = 0, merged.positions.shape[0]
    last_one, last_two = one.positions.shape[0] - 1, two.positions.shape[0] - 1
    while i <= last_one and j <= last_two and num_merged < room:
        takes_one = with_one > with_two
        shared = min(with_one, with_two)
        if with_one == with_two:
            fetch(tokens, one.positions[min(i + _AHEAD, last_one)] + shared)
            fetch(tokens, two.positions[min(j + _AHEAD, last_two)] + shared)
            shared, takes_one = compare(tokens, one.positions[i], two.positions[j], shared, depth)
        if takes_one:
            merged.positions[num_merged], merged.shared[num_merged] = one.positions[i], with_one
            i += 1
            with_one, with_two = np.int64(one.shared[i]) if i <= last_one else 0, shared
        else:
            merged.positions[num_merged], merged.shared[num_merged] = two.positions[j], with_two
            j += 1
            with_one, with_two = shared, np.int64(two.shared[j]) if j <= last_two else 0
        num_merged += 1
    return i, with_one, j, with_two, num_merged
