"""Sorted runs of texts merged to one order, that of an older pool being one of them: hardly a token is looked at twice.

An order here is as `suffix_order` defines it: positions by what follows up to the text's end or `depth` tokens, equal
ones by position. It may be of some of the texts of a token array only. Orders come and go as streams of int32 chunks,
so none need be in memory.

Runs are merged by what neighbours share: of two positions that both come after a third, the one that shares more tokens
with it comes first, and only where they share as many are tokens compared, from there on (LCP merging: Ng and Kakehi
2008). An older pool's order is long beside what is new, and nobody knows what its neighbours share: it is merged last,
by galloping (McIlroy 1993), which takes whole stretches of it with few comparisons.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from laserbatch.retrieval_pools.compiled import cached, fetch
from laserbatch.retrieval_pools.index.arrays import in_threads
from laserbatch.retrieval_pools.index.layout import TextSpans, fetch_text_at, gather_texts, text_at
from laserbatch.retrieval_pools.index.suffix_order import SEPARATOR, sort_suffixes

CHUNK_PLACES = 1 << 16  # merged at a time: every merge of two holds a chunk
_NO_PLACES = np.empty(0, np.int32)
_AHEAD = 12  # places whose texts are fetched before they are compared


def sort_texts(tokens: np.ndarray, starts: np.ndarray, texts: np.ndarray, vocab_size: int, depth: int) -> np.ndarray:
    """The order of some texts' positions: those of all others are left out of it.

    Parameters
    ----------
    tokens : int32[n], all texts laid end to end, ids below `vocab_size`.
    starts : int32[num_texts + 1], `layout.TextSpans.starts` of them.
    texts : int[m], increasing numbers of the texts to sort.
    depth : a power of two.

    Returns
    -------
    int32[the texts' tokens and one each], positions in `tokens`.
    """
    if not len(texts):
        return _NO_PLACES
    first, last = int(texts[0]), int(texts[-1])
    if last - first + 1 == len(texts):
        begin, end = int(starts[first]), int(starts[last + 1])
        order = sort_suffixes(tokens[begin : end + 1], vocab_size, depth).order
        order += np.int32(begin)
        return order
    gathered, its_starts = gather_texts(tokens, starts, texts)
    order = sort_suffixes(gathered, vocab_size, depth).order
    return _moved(order, TextSpans.of_starts(its_starts), starts[texts])


def move_order(order: Iterable[np.ndarray], spans: TextSpans, new_starts: np.ndarray) -> Iterator[np.ndarray]:
    """An order after its texts have moved, and some have gone: in one pass, nothing is compared.

    Parameters
    ----------
    order : chunks of positions before.
    spans : the texts as they lay before.
    new_starts : int32[num_texts], where the separator before each text is now, -1 for a text that is gone; increasing
        but for the -1, since equal texts are ordered by position.
    """
    return in_threads(lambda chunk: _moved(chunk, spans, new_starts), order)


def merge_runs(tokens: np.ndarray, runs: list[Iterable[np.ndarray]], depth: int) -> Iterator[np.ndarray]:
    """One order of any number of them, merged two and two, so that none need be in memory.

    Parameters
    ----------
    tokens : int32[n], what the runs are positions of; no two have one in common.
    runs : chunks of positions.
    depth : tokens compared, 255 at most; what all are sorted by.
    """
    if len(runs) == 1:
        return iter(runs[0])
    return (chunk.positions for chunk in _merged(tokens, runs, depth))


def merge_into_older(
    tokens: np.ndarray, older: Iterable[np.ndarray], added: Iterable[np.ndarray], depth: int
) -> Iterator[np.ndarray]:
    """One order of a long one and of what is added to it, as `merge_runs` gives it.

    Parameters
    ----------
    tokens : int32[n], what both are positions of; they have none in common.
    older, added : chunks of positions.
    depth : tokens compared; what both are sorted by.
    """
    parts = _parts(tokens, older, added, depth)
    return in_threads(lambda part: _gallop(tokens, *part, depth), parts)


class _Chunk(NamedTuple):
    """Some places of a run.

    Parameters
    ----------
    positions : int32[n], in their order.
    shared : uint8[n], tokens that each shares with the position before it in the run, at most `depth`: of texts that
        are equal as far as they are compared, `depth`. 0 for the first of a run.
    """

    positions: np.ndarray
    shared: np.ndarray


def _merged(tokens: np.ndarray, runs: list[Iterable[np.ndarray]], depth: int) -> Iterator[_Chunk]:
    if len(runs) <= 1:
        for run in runs:
            yield from in_threads(lambda pair: _Chunk(pair[1], _shared(tokens, *pair, depth)), _with_last(run))
        return
    middle = len(runs) // 2
    one, two = (_Run(_merged(tokens, half, depth)) for half in (runs[:middle], runs[middle:]))
    with_one = with_two = 0  # tokens that the next of each shares with the last one that was merged
    while one.chunk is not None and two.chunk is not None:
        room = min(one.num_left + two.num_left, CHUNK_PLACES)
        merged = _Chunk(np.empty(room, np.int32), np.empty(room, np.uint8))
        one.place, with_one, two.place, with_two, num_merged = _merge(
            tokens, one.chunk, one.place, with_one, two.chunk, two.place, with_two, depth, merged
        )
        if num_merged:
            yield _Chunk(merged.positions[:num_merged], merged.shared[:num_merged])
        with_one, with_two = one.advance(with_one), two.advance(with_two)
    for side, shared in ((one, with_one), (two, with_two)):
        if side.chunk is not None:
            yield side.rest(shared)
            yield from side.source


def _with_last(run: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """Each chunk with the last position before it, -1 for none; empty ones left out."""
    last = -1
    for chunk in run:
        if len(chunk):
            yield last, chunk
            last = int(chunk[-1])


def _parts(
    tokens: np.ndarray, first: Iterable[np.ndarray], second: Iterable[np.ndarray], depth: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both orders cut in the same places: all of a part comes before all of the next. One of the two may be empty.

    The chunk that ends first is taken whole, and of the other what comes before its end.
    """
    streams = filter(len, first), filter(len, second)
    one, two = (next(stream, _NO_PLACES) for stream in streams)
    while len(one) and len(two):
        i, j = _common_end(tokens, one, two, depth)
        yield one[:i], two[:j]
        one = one[i:] if i < len(one) else next(streams[0], _NO_PLACES)
        two = two[j:] if j < len(two) else next(streams[1], _NO_PLACES)
    for chunk, stream in ((one, streams[0]), (two, streams[1])):
        if len(chunk):
            yield chunk, _NO_PLACES
        yield from ((chunk, _NO_PLACES) for chunk in stream)


class _Run:
    """A run as it is used up: its chunk, and the next place in it."""

    def __init__(self, source: Iterator[_Chunk]) -> None:
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

    def rest(self, shared: int) -> _Chunk:
        """What is left of the chunk."""
        chunk = _Chunk(self.chunk.positions[self.place :], self.chunk.shared[self.place :].copy())
        chunk.shared[0] = shared
        return chunk


@cached(nogil=True)
def _moved(order, spans, new_starts):
    moved = np.empty(order.shape[0], np.int32)
    num_moved = 0
    for k in range(order.shape[0]):
        fetch(new_starts, fetch_text_at(spans, order, k))
        text = text_at(spans, order[k])
        if new_starts[text] >= 0:
            moved[num_moved] = new_starts[text] + (order[k] - spans.starts[text])
            num_moved += 1
    return moved[:num_moved]


@cached()
def _common_end(tokens, one, two, depth):
    """The length of what comes first of two chunks: all of one of them, and of the other what is before its end."""
    _, one_ends_first = _compare(tokens, one[-1], two[-1], 0, depth)
    if one_ends_first:
        return one.shape[0], _num_before(tokens, two, 0, one[-1], depth, two.shape[0])
    return _num_before(tokens, one, 0, two[-1], depth, one.shape[0]), two.shape[0]


@cached()
def _num_before(tokens, order, begin, position, depth, step):
    """How many places of `order`, from `begin` on, are before `position`: steps that double, then bisection."""
    n = order.shape[0]
    low, high = begin, begin + step - 1
    shared_low = shared_high = 0
    while high < n:
        shared, is_before = _compare(tokens, order[high], position, 0, depth)
        if not is_before:
            shared_high = shared
            break
        shared_low, low = shared, high + 1
        step <<= 1
        high = low + step - 1
    high = min(high, n)
    while low < high:
        middle = (low + high) >> 1
        shared, is_before = _compare(tokens, order[middle], position, min(shared_low, shared_high), depth)
        if is_before:
            shared_low, low = shared, middle + 1
        else:
            shared_high, high = shared, middle
    return low - begin


@cached(nogil=True)
def _gallop(tokens, older, added, depth):
    """Merge two chunks, one of which may be empty: before each added place the older ones that come first."""
    merged = np.empty(older.shape[0] + added.shape[0], np.int32)
    i, usual = 0, 16  # sixteenths of a place: how many older ones there lately were before each
    for j in range(added.shape[0]):
        for k in range(0, depth, 16):  # that come from memory together
            fetch(tokens, added[min(j + 1, added.shape[0] - 1)] + k)
        step = 1
        while step << 5 <= usual:
            step <<= 1
        run = _num_before(tokens, older, i, added[j], depth, step)
        usual += run - (usual >> 4)
        merged[i + j : i + j + run] = older[i : i + run]
        i += run
        merged[i + j] = added[j]
    merged[i + added.shape[0] :] = older[i:]
    return merged


@cached(nogil=True)
def _shared(tokens, before, positions, depth):
    """`_Chunk.shared` of a chunk; `before` is the position before its first, -1 for none."""
    shared = np.zeros(positions.shape[0], np.uint8)
    for k in range(positions.shape[0]):
        fetch(tokens, positions[min(k + _AHEAD, positions.shape[0] - 1)])
        if before >= 0:
            shared[k], _ = _compare(tokens, before, positions[k], 0, depth)
        before = positions[k]
    return shared


@cached()
def _compare(tokens, one, two, shared, depth):
    """How many tokens two positions share, and whether `one` comes before; they are known to share `shared`."""
    for k in range(shared, depth):
        token = tokens[one + k]
        if token != tokens[two + k]:
            return k, token < tokens[two + k]
        if token == SEPARATOR and k > 0:  # both texts end; in the first place it is a start
            break
    return depth, one < two


@cached(nogil=True)
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
            shared, takes_one = _compare(tokens, one.positions[i], two.positions[j], shared, depth)
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
