"""The order of all positions of a token array by the text that follows them, sorted and merged.

A position is ordered by the tokens from it up to the separator that ends its text, at most `depth` of them, equal ones
by position, so its place does not depend on which text comes next. A separator in the first place is the start of the
text behind it. An order may be of some of the texts of a token array only. Orders come and go as streams of int32
chunks, so none need be in memory.

Sorted runs, that of an older pool among them, are merged two and two by galloping (McIlroy 1993), which takes whole
stretches of a long one with few comparisons.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from laserbatch.retrieval_pools.compiled import cached, fetch
from laserbatch.retrieval_pools.index.arrays import in_threads
from laserbatch.retrieval_pools.index.texts import SEPARATOR, gather_texts

_NO_PLACES = np.empty(0, np.int32)
_AHEAD = 8  # places whose texts are fetched before they are compared


def sort_suffixes(tokens: np.ndarray, vocab_size: int, depth: int) -> np.ndarray:
    """Sort by prefix doubling (Manber and Myers 1990) with one counting pass a round: O(n log depth), deterministic.

    Parameters
    ----------
    tokens : int32[n], n >= 1, SEPARATOR or ids below `vocab_size`; the last is SEPARATOR.
    depth : tokens compared, rounded up to a power of two.

    Returns
    -------
    int32[n - 1], every position but the last separator.
    """
    starts = count_first_tokens(tokens, vocab_size)
    order = _sort_by_first_token(tokens, starts.copy())
    rank = _first_ranks(tokens, starts)
    remaining = _tokens_to_separator(tokens)
    length = 1
    while length < depth:
        order = _sort_by_second_half(order, rank, remaining, length)
        rank, num_classes = _ranks_of_double(order, rank, remaining, length)
        if num_classes == len(order):
            break
        length *= 2
    return order


def sort_texts(tokens: np.ndarray, starts: np.ndarray, texts: np.ndarray, vocab_size: int, depth: int) -> np.ndarray:
    """The order of some texts' positions: those of all others are left out of it.

    Parameters
    ----------
    tokens : int32[n], all texts laid end to end, ids below `vocab_size`.
    starts : int32[num_texts + 1], the separators.
    texts : int[m], increasing numbers of the texts to sort.
    depth : a power of two.

    Returns
    -------
    int32[the texts' tokens and one each], positions in `tokens`.
    """
    if not len(texts):
        return _NO_PLACES
    gathered, its_starts = gather_texts(tokens, starts, texts)
    order = sort_suffixes(gathered, vocab_size, depth)
    order += np.repeat(starts[texts] - its_starts[:-1], np.diff(its_starts))[order]
    return order


def merge_runs(tokens: np.ndarray, runs: list[Iterable[np.ndarray]], depth: int) -> Iterator[np.ndarray]:
    """One order of any number of them, merged two and two, so that none need be in memory.

    Parameters
    ----------
    tokens : int32[n], what the runs are positions of; no two have one in common.
    runs : chunks of positions.
    depth : tokens compared; what all are sorted by.
    """
    if len(runs) <= 1:
        return iter(runs[0] if runs else ())
    middle = len(runs) // 2
    parts = _parts(tokens, *(merge_runs(tokens, half, depth) for half in (runs[:middle], runs[middle:])), depth)
    return in_threads(lambda part: _gallop(tokens, *part, depth), parts)


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


@cached()
def count_first_tokens(tokens, vocab_size):
    """int32[vocab_size + 2]: `order[starts[t + 1]:starts[t + 2]]` are the positions of token t, separators included."""
    starts = np.zeros(vocab_size + 2, np.int32)
    for i in range(tokens.shape[0] - 1):
        starts[tokens[i] + 2] += 1
    for t in range(vocab_size + 1):
        starts[t + 1] += starts[t]
    return starts


@cached()
def _sort_by_first_token(tokens, free):
    """`free` has the next place of each token's positions."""
    order = np.empty(tokens.shape[0] - 1, np.int32)
    for i in range(order.shape[0]):
        t = tokens[i] + 1
        order[free[t]] = i
        free[t] += 1
    return order


@cached()
def _first_ranks(tokens, starts):
    """The rank of a position is the place in the order at which its class of equals begins."""
    rank = np.empty(tokens.shape[0] - 1, np.int32)
    for i in range(rank.shape[0]):
        rank[i] = starts[tokens[i] + 1]
    return rank


@cached()
def _tokens_to_separator(tokens):
    n = tokens.shape[0] - 1
    remaining = np.empty(n, np.int32)
    end = n
    for i in range(n - 1, -1, -1):
        remaining[i] = end - i
        if tokens[i] == SEPARATOR:
            end = i
    return remaining


@cached()
def _sort_by_second_half(order, rank, remaining, length):
    """From sorted by `length` tokens to sorted by twice as many: take positions by their second half, fill classes."""
    n = order.shape[0]
    free = np.arange(n).astype(np.int32)  # the next free place of the class that begins here
    doubled = np.empty(n, np.int32)
    for i in range(n):  # texts that end within the first half come first
        if remaining[i] <= length:
            doubled[free[rank[i]]] = i
            free[rank[i]] += 1
    for k in range(n):
        i = order[k] - length
        if i >= 0 and remaining[i] > length:
            doubled[free[rank[i]]] = i
            free[rank[i]] += 1
    return doubled


@cached()
def _ranks_of_double(order, rank, remaining, length):
    n = order.shape[0]
    doubled = np.empty(n, np.int32)
    num_classes = 0
    before_first = before_second = np.int32(-2)
    current = 0
    for k in range(n):
        i = order[k]
        first = rank[i]
        second = rank[i + length] if remaining[i] > length else np.int32(-1)
        if first != before_first or second != before_second:
            current = k
            num_classes += 1
            before_first, before_second = first, second
        doubled[i] = current
    return doubled, num_classes


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
    last = older.shape[0] - 1
    i, usual = 0, 16  # sixteenths of a place: how many older ones there lately were before each
    for j in range(added.shape[0]):
        for k in range(0, depth, 16):  # that come from memory together
            fetch(tokens, added[min(j + 1, added.shape[0] - 1)] + k)
        if last >= 0:
            fetch(tokens, older[min(i + _AHEAD, last)])
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
