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

from retrieval_pools.fetch import fetch
from retrieval_pools.layout import TextSpans, fetch_text_at, gather_texts, text_at
from retrieval_pools.suffix_order import SEPARATOR, sort_suffixes

CHUNK_PLACES = 1 << 18
_NO_PLACES = np.empty(0, np.int32)
_BLOCK = 64  # positions whose places are looked up together
_AHEAD = 8  # places whose texts are fetched before they are compared
_LINE_TOKENS = 16  # that come from memory together
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
    for chunk in order:
        yield _moved(chunk, spans, new_starts)


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
    streams = iter(first), iter(second)
    one, two = next(streams[0], None), next(streams[1], None)
    i = j = 0
    while one is not None and two is not None:
        merged = np.empty(min(len(one) - i + len(two) - j, CHUNK_PLACES), np.int32)
        i, j, num_merged = _merge(tokens, one, i, two, j, depth, merged)
        if num_merged:
            yield merged[:num_merged]
        if i == len(one):
            one, i = next(streams[0], None), 0
        if j == len(two):
            two, j = next(streams[1], None), 0
    for chunk, place, stream in ((one, i, streams[0]), (two, j, streams[1])):
        if chunk is not None:
            yield chunk[place:]
            yield from stream


def chunks_of(order: np.ndarray) -> Iterator[np.ndarray]:
    """An order in memory as a stream."""
    for place in range(0, len(order), CHUNK_PLACES):
        yield order[place : place + CHUNK_PLACES]


@njit(cache=True)
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
def compare(tokens, one, two, shared, depth):
    """How many tokens two positions share, and whether `one` comes before; they are known to share `shared`.

    Compiled code only.
    """
    for k in range(shared, depth):
        token = tokens[one + k]
        if token != tokens[two + k]:
            return k, token < tokens[two + k]
        if token == SEPARATOR and k > 0:  # both texts end; in the first place it is a start
            break
    return depth, one < two


@njit(cache=True)
def _num_before(tokens, order, begin, position, depth, step):
    """How many places of `order`, from `begin` on, are before `position`: steps that double, then bisection.

    What a position shares with both ends of an interval it shares with all between (Manber and Myers 1990).
    """
    n = order.shape[0]
    low, high = begin, begin + step - 1
    shared_low = shared_high = 0
    while high < n:
        shared, is_before = compare(tokens, order[high], position, 0, depth)
        if not is_before:
            shared_high = shared
            break
        shared_low, low = shared, high + 1
        step <<= 1
        high = low + step - 1
    high = min(high, n)
    while low < high:
        middle = (low + high) >> 1
        shared, is_before = compare(tokens, order[middle], position, min(shared_low, shared_high), depth)
        if is_before:
            shared_low, low = shared, middle + 1
        else:
            shared_high, high = shared, middle
    return low - begin


@njit(cache=True)
def _find_places(tokens, order, begin, end, positions, depth, places):
    """For each of a few rising positions the places of `order`, from `begin` to `end`, that are before it: in `places`.

    All are bisected in step: what is compared is fetched for all first, and only then compared.
    """
    n = positions.shape[0]
    low, high = np.full(n, begin), np.full(n, end)
    shared_low, shared_high = np.zeros(n, np.int64), np.zeros(n, np.int64)
    others, next_tokens = np.empty(n, np.int32), np.empty(n, np.int32)
    is_open = begin < end
    while is_open:
        for k in range(n):
            others[k] = order[min((low[k] + high[k]) >> 1, end - 1)]
        for k in range(n):
            shared = min(shared_low[k], shared_high[k])
            next_tokens[k] = tokens[others[k] + shared] if shared < depth else SEPARATOR
        is_open = False
        for k in range(n):
            if low[k] == high[k]:
                continue
            shared = min(shared_low[k], shared_high[k])
            if shared < depth and next_tokens[k] != tokens[positions[k] + shared]:
                is_before = next_tokens[k] < tokens[positions[k] + shared]
            else:
                shared, is_before = compare(tokens, others[k], positions[k], shared, depth)
            middle = (low[k] + high[k]) >> 1
            if is_before:
                shared_low[k], low[k] = shared, middle + 1
            else:
                shared_high[k], high[k] = shared, middle
            is_open |= low[k] < high[k]
    for k in range(n):
        places[k] = low[k]


@njit(cache=True)
def _merge(tokens, one, i, two, j, depth, merged):
    """Merge two chunks until one is used up or `merged` is full.

    Returns the places reached in both, and how many were merged.
    """
    num_merged, room = 0, merged.shape[0]
    usual_one = usual_two = 16  # sixteenths of a place: how long a run of each is, as it lately was
    places = np.empty(_BLOCK, np.int64)
    while i < one.shape[0] and j < two.shape[0] and num_merged < room:
        if usual_one >= _LONG_RUN << 4:
            block = two[j : j + _BLOCK]
            step = 1 << _num_bits(usual_one * block.shape[0] >> 5)
            run = _num_before(tokens, one, i, block[-1], depth, step)
            usual_one = (usual_one + (run << 4) // block.shape[0]) >> 1
            _find_places(tokens, one, i, i + run, block, depth, places)
            for b in range(block.shape[0]):
                run = min(places[b] - i, room - num_merged)
                for k in range(i, i + run):
                    merged[num_merged] = one[k]
                    num_merged += 1
                i += run
                if i == one.shape[0] or num_merged == room:
                    break
                merged[num_merged] = block[b]
                num_merged += 1
                j += 1
            continue
        for k in range(0, depth, _LINE_TOKENS):
            fetch(tokens, one[min(i + _AHEAD, one.shape[0] - 1)] + k)
            fetch(tokens, two[min(j + _AHEAD, two.shape[0] - 1)] + k)
        run = _num_before(tokens, one, i, two[j], depth, 1 << _num_bits(usual_one >> 5))
        usual_one += run - (usual_one >> 4)
        run = min(run, room - num_merged)
        for k in range(i, i + run):
            merged[num_merged] = one[k]
            num_merged += 1
        i += run
        if i < one.shape[0] and num_merged < room:
            run = _num_before(tokens, two, j, one[i], depth, 1 << _num_bits(usual_two >> 5))
            usual_two += run - (usual_two >> 4)
            run = min(run, room - num_merged)
            for k in range(j, j + run):
                merged[num_merged] = two[k]
                num_merged += 1
            j += run
    return i, j, num_merged


@njit(cache=True)
def _num_bits(value):
    """Of a whole number, without its leading zeros."""
    num_bits = 0
    while value > 0:
        value >>= 1
        num_bits += 1
    return num_bits
