"""Sorting the positions of a token array by the text from there on, and merging two such orders.

Positions are compared by their tokens up to the separator that ends the text, at most `depth` of them; equal positions
are in ascending order. So the place of a position does not depend on the text after its own. A separator that is the
first token is the start of the text after it. An order may have only some of the texts of a token array. Orders are
streams of int32 chunks, so that none needs to be in memory.

Positions with the same first token are neighbours in the order, so as many first tokens are sorted at a time as fit in
memory. Two orders, such as an older pool's and that of new texts, are merged by galloping (McIlroy 1993), which takes
whole stretches of the longer one with few comparisons.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from laserbatch.retrieval_pools.compiled import cached, fetch
from laserbatch.retrieval_pools.index.arrays import CHUNK_VALUES, in_threads
from laserbatch.retrieval_pools.index.texts import SEPARATOR

_NO_PLACES = np.empty(0, np.int32)
_AHEAD = 8  # places whose texts are fetched before they are compared
_FEW = 12  # up to this many places are sorted by insertion


def sort_texts(
    tokens: np.ndarray, starts: np.ndarray, texts: np.ndarray, first_tokens: np.ndarray, depth: int, max_positions: int
) -> Iterator[np.ndarray]:
    """The order of the positions of some texts.

    Positions with equal first tokens are sorted by the next token, and so on (Bentley and Sedgewick 1997).

    `tokens`, int32[n], are all texts laid end to end, `starts`, int32[num_texts + 1], the separators, and `texts`,
    int[m], the increasing numbers of the texts to sort. `first_tokens` is the result of `count_first_tokens` for these.
    `depth` tokens are compared. At most `max_positions` are sorted at a time, unless a single first token has more.
    """
    first, last = 0, len(first_tokens) - 1
    while first < last:
        end = int(np.searchsorted(first_tokens, int(first_tokens[first]) + max_positions, side="right")) - 1
        end = max(end, first + 1)
        order = _by_first_token(tokens, starts, texts, first_tokens, first, end)
        _sort_each(tokens, order, first_tokens[first : end + 1] - first_tokens[first], depth)
        for place in range(0, len(order), CHUNK_VALUES):
            yield order[place : place + CHUNK_VALUES]
        first = end


def merge(tokens: np.ndarray, first: Iterable[np.ndarray], second: Iterable[np.ndarray], depth: int):
    """Merge two orders that are sorted by `depth` tokens and have no position in common; returns chunks."""
    return in_threads(lambda part: _gallop(tokens, *part, depth), _parts(tokens, first, second, depth))


def _parts(
    tokens: np.ndarray, first: Iterable[np.ndarray], second: Iterable[np.ndarray], depth: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut both orders into pairs of parts, so that every pair comes before the next pair. One of a pair may be empty.

    Of two chunks, the one that ends first is taken whole, and the other up to this end.
    """
    streams = filter(len, first), filter(len, second)
    left, right = (next(stream, _NO_PLACES) for stream in streams)
    while len(left) and len(right):
        i, j = _common_end(tokens, left, right, depth)
        yield left[:i], right[:j]
        left = left[i:] if i < len(left) else next(streams[0], _NO_PLACES)
        right = right[j:] if j < len(right) else next(streams[1], _NO_PLACES)
    for chunk, stream in ((left, streams[0]), (right, streams[1])):
        if len(chunk):
            yield chunk, _NO_PLACES
        yield from ((chunk, _NO_PLACES) for chunk in stream)


@cached()
def count_first_tokens(tokens, starts, texts, vocab_size):
    """The start of each token's positions in the order of some texts: int32[vocab_size + 2].

    `order[result[t + 1]:result[t + 2]]` has the positions of token t; the separators, as token -1, are in front.
    """
    token_starts = np.zeros(vocab_size + 2, np.int32)
    for k in range(texts.shape[0]):
        for i in range(starts[texts[k]], starts[texts[k] + 1]):
            token_starts[tokens[i] + 2] += 1
    for t in range(vocab_size + 1):
        token_starts[t + 1] += token_starts[t]
    return token_starts


@cached()
def _by_first_token(tokens, starts, texts, first_tokens, first, end):
    """The positions of the tokens from `first` - 1 to `end` - 2, sorted by token, then by position."""
    free = first_tokens[first:end] - first_tokens[first]
    order = np.empty(first_tokens[end] - first_tokens[first], np.int32)
    for k in range(texts.shape[0]):
        for i in range(starts[texts[k]], starts[texts[k] + 1]):
            t = tokens[i] + 1 - first
            if 0 <= t < free.shape[0]:
                order[free[t]] = i
                free[t] += 1
    return order


@cached()
def _sort_each(tokens, order, bounds, depth):
    """Sort the positions between each two bounds, which have one first token and ascend."""
    largest = 0
    for t in range(bounds.shape[0] - 1):
        largest = max(largest, bounds[t + 1] - bounds[t])
    keyed = np.empty(largest, np.int64)
    waiting = np.empty((largest // _FEW + 1, 3), np.int64)  # long parts: begin, end, number of tokens they share
    for t in range(bounds.shape[0] - 1):
        num_waiting = _leave_or_insert(tokens, order, bounds[t], bounds[t + 1], 1, depth, waiting, 0)
        while num_waiting > 0:
            num_waiting -= 1
            begin, end, shared = waiting[num_waiting, 0], waiting[num_waiting, 1], waiting[num_waiting, 2]
            shared = _key_by_next(tokens, order[begin:end], keyed, shared, depth)
            if shared == depth:
                continue
            keyed[: end - begin].sort()
            for k in range(begin, end):
                order[k] = keyed[k - begin] & 0x7FFFFFFF
            first = begin
            for k in range(begin + 1, end + 1):
                if k == end or tokens[order[k] + shared] != tokens[order[first] + shared]:
                    if tokens[order[first] + shared] != SEPARATOR:
                        num_waiting = _leave_or_insert(tokens, order, first, k, shared + 1, depth, waiting, num_waiting)
                    first = k


@cached()
def _leave_or_insert(tokens, order, begin, end, shared, depth, waiting, num_waiting):
    """Sort places that share `shared` tokens if they are few, otherwise queue them. Returns the length of the queue."""
    if end - begin > _FEW:
        waiting[num_waiting, 0], waiting[num_waiting, 1], waiting[num_waiting, 2] = begin, end, shared
        return num_waiting + 1
    for k in range(begin + 1, end):
        place, i = order[k], k
        while i > begin and _compare(tokens, place, order[i - 1], shared, depth)[1]:
            order[i] = order[i - 1]
            i -= 1
        order[i] = place
    return num_waiting


@cached()
def _key_by_next(tokens, order, keyed, shared, depth):
    """Key each place by the first token in which they differ. Returns how many tokens all share, or `depth` if done."""
    while shared < depth:
        is_same = True
        for k in range(order.shape[0]):
            keyed[k] = (np.int64(tokens[order[k] + shared]) << 32) | order[k]
            is_same &= (keyed[k] ^ keyed[0]) >> 32 == 0
        if not is_same:
            return shared
        if tokens[order[0] + shared] == SEPARATOR:
            return depth
        shared += 1
    return depth


@cached()
def _common_end(tokens, left, right, depth):
    """The lengths of the parts of two chunks that come first: all of the one that ends first, the other up to there."""
    _, left_ends_first = _compare(tokens, left[-1], right[-1], 0, depth)
    if left_ends_first:
        return left.shape[0], _num_before(tokens, right, 0, left[-1], depth, right.shape[0])
    return _num_before(tokens, left, 0, right[-1], depth, left.shape[0]), right.shape[0]


@cached()
def _num_before(tokens, order, begin, position, depth, step):
    """The number of places of `order` from `begin` on that precede `position`, by doubling steps and then bisection."""
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


@cached()
def _gallop(tokens, older, added, depth):
    """Merge two chunks, one of which may be empty: each added place comes after the older ones that precede it."""
    merged = np.empty(older.shape[0] + added.shape[0], np.int32)
    last = older.shape[0] - 1
    i, usual = 0, 16  # 16 times the running mean of the number of older places before each added one
    for j in range(added.shape[0]):
        for k in range(0, depth, 16):  # 16 tokens share a cache line
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
def _compare(tokens, first, second, shared, depth):
    """The number of tokens that two positions share, at least `shared`, and whether `first` precedes `second`."""
    for k in range(shared, depth):
        token = tokens[first + k]
        if token != tokens[second + k]:
            return k, token < tokens[second + k]
        if token == SEPARATOR and k > 0:  # both texts end here; as first token a separator is a start
            break
    return depth, first < second
