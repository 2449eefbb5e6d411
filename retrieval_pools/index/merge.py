"""Orders put together instead of sorted again: texts that moved keep their order, and two orders are merged.

An order here is as `suffix_order` defines it: positions by what follows up to the text's end or `depth` tokens, equal
ones by position. It may be of some of the texts of a token array only: it is then the index of those texts, and the
others are not found by a query. Orders come and go as streams of int32 chunks, so none need be in memory. Knows
neither pools nor files.

To add texts to an order: lay them out behind or between the others, sort them alone (`sort_texts`), move the others'
order when their positions have changed (`move_order`), and merge (`merge_orders`).
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numba import njit

from laserbatch.retrieval_pools.fetch import fetch
from laserbatch.retrieval_pools.index.layout import TextSpans, fetch_text_at, gather_texts, text_at
from laserbatch.retrieval_pools.index.places import LINE_TOKENS, compare, find_places, num_before, num_bits
from laserbatch.retrieval_pools.index.suffix_order import sort_suffixes
from laserbatch.retrieval_pools.index.threads import in_threads

CHUNK_PLACES = 1 << 17
_NO_PLACES = np.empty(0, np.int32)
_BLOCK = 512  # positions whose places are looked up together
_AHEAD = 8  # places whose texts are fetched before they are compared
_LONG_RUN = 4  # places of the other order before each, from which on that is worth it


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


def merge_orders(
    tokens: np.ndarray, first: Iterable[np.ndarray], second: Iterable[np.ndarray], depth: int
) -> Iterator[np.ndarray]:
    """One order of two that have no position in common.

    Galloping (McIlroy 1993) takes whole runs of one order at once, so a few texts are merged into many with few
    comparisons. Of a few, the places of several are looked up in step, so that one waits for memory while another does.

    Parameters
    ----------
    tokens : int32[n], what both are positions of.
    first, second : chunks of positions.
    depth : tokens compared; what both are sorted by.
    """
    parts = _parts(tokens, first, second, depth)
    return in_threads(lambda part: _merged(tokens, *part, depth), parts)


def chunks_of(order: np.ndarray) -> Iterator[np.ndarray]:
    """An order in memory as a stream."""
    for place in range(0, len(order), CHUNK_PLACES):
        yield order[place : place + CHUNK_PLACES]


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


def _merged(tokens: np.ndarray, one: np.ndarray, two: np.ndarray, depth: int) -> np.ndarray:
    return _merge(tokens, one, two, depth) if len(one) and len(two) else one if len(one) else two


@njit(cache=True, nogil=True)
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


@njit(cache=True)
def _common_end(tokens, one, two, depth):
    """The length of what comes first of two chunks: all of one of them, and of the other what is before its end."""
    _, one_ends_first = compare(tokens, one[-1], two[-1], 0, depth)
    if one_ends_first:
        return one.shape[0], num_before(tokens, two, 0, one[-1], depth, two.shape[0])
    return num_before(tokens, one, 0, two[-1], depth, one.shape[0]), two.shape[0]


@njit(cache=True, nogil=True)
def _merge(tokens, one, two, depth):
    """Merge two chunks, neither of them empty."""
    merged = np.empty(one.shape[0] + two.shape[0], np.int32)
    i = j = 0
    usual_one = usual_two = 16  # sixteenths of a place: how long a run of each is, as it lately was
    places = np.empty(_BLOCK, np.int64)
    while i < one.shape[0] and j < two.shape[0]:
        if usual_one >= _LONG_RUN << 4:
            block = two[j : j + _BLOCK]
            step = 1 << num_bits(usual_one * block.shape[0] >> 5)
            run = num_before(tokens, one, i, block[-1], depth, step)
            usual_one = (usual_one + (run << 4) // block.shape[0]) >> 1
            find_places(tokens, one, i, i + run, block, depth, places)
            for b in range(block.shape[0]):
                for k in range(i, places[b]):
                    merged[k + j] = one[k]
                i = places[b]
                merged[i + j] = block[b]
                j += 1
            continue
        for k in range(0, depth, LINE_TOKENS):
            fetch(tokens, one[min(i + _AHEAD, one.shape[0] - 1)] + k)
            fetch(tokens, two[min(j + _AHEAD, two.shape[0] - 1)] + k)
        run = num_before(tokens, one, i, two[j], depth, 1 << num_bits(usual_one >> 5))
        usual_one += run - (usual_one >> 4)
        for k in range(i, i + run):
            merged[k + j] = one[k]
        i += run
        if i < one.shape[0]:
            run = num_before(tokens, two, j, one[i], depth, 1 << num_bits(usual_two >> 5))
            usual_two += run - (usual_two >> 4)
            for k in range(j, j + run):
                merged[i + k] = two[k]
            j += run
    for k in range(i, one.shape[0]):
        merged[k + j] = one[k]
    for k in range(j, two.shape[0]):
        merged[one.shape[0] + k] = two[k]
    return merged
