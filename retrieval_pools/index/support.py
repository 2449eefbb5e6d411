"""How much of the text behind every position enough entities have: what a pool may draft when nobody is to be quoted.

An n-gram is supported when it stands in texts of at least `min_support` entities; so are then all its beginnings. One
length a place of the order therefore says which n-grams that begin there are. A text's start and end are tokens of
its n-grams.
"""

import numpy as np

from laserbatch.retrieval_pools.compiled import cached
from laserbatch.retrieval_pools.index.texts import SEPARATOR

_RING = 256  # places on it share ever more, and at most 255 tokens


def supported_lengths(
    tokens: np.ndarray, order: np.ndarray, entities: np.ndarray, min_support: int, depth: int
) -> np.ndarray:
    """Length of the longest supported n-gram that begins at each place of the order, in linear time but for depth.

    uint8[n], 0 where not even the first token is supported.

    Places that share their first s tokens stand side by side, so an n-gram is supported when a window of the order has
    `min_support` entities and it is no longer than the least common prefix of neighbours in the window. For each place
    the shortest such window that ends there is enough: what a longer one shares, its neighbours hand on.

    Parameters
    ----------
    tokens, order : int32[n + 1] and int32[n], see `order.sort_texts`.
    entities : int32[n], that of each place's text, from 0 on.
    min_support : entities that make an n-gram supported, at least 2.
    depth : tokens that `order` is sorted by, at most 255; no longer n-gram is looked at.
    """
    shared = _shared_with_place_before(tokens, order, depth)
    support = _least_shared_in_windows(shared, entities, min_support)
    _hand_on(support, shared)
    return support


@cached()
def _shared_with_place_before(tokens, order, depth):
    """uint8[n]: how many first tokens a place has in common with the one before it, a text's end included."""
    shared = np.zeros(order.shape[0], np.uint8)
    for k in range(1, order.shape[0]):
        i, j = order[k - 1], order[k]
        length = 0
        while length < depth and tokens[i + length] == tokens[j + length]:
            length += 1
            if length > 1 and tokens[i + length - 1] == SEPARATOR:  # both end; in the first place it is a start
                break
        shared[k] = length
    return shared


@cached()
def _least_shared_in_windows(shared, entities, min_support):
    """What the shortest window that ends at a place and has enough entities shares; 0 where there is none."""
    n = shared.shape[0]
    support = np.zeros(n, np.uint8)
    if n == 0:
        return support
    times = np.zeros(entities.max() + 1, np.int32)  # that an entity stands in the window
    num_entities = 0
    least = np.empty(_RING, np.int32)  # places in the window that share less than all behind them; the first the least
    head = tail = 0
    first = 0
    for last in range(n):
        entity = entities[last]
        num_entities += times[entity] == 0
        times[entity] += 1
        while tail > head and shared[least[(tail - 1) & (_RING - 1)]] >= shared[last]:
            tail -= 1
        least[tail & (_RING - 1)] = last
        tail += 1
        oldest = entities[first]
        while times[oldest] > 1 or num_entities > min_support:
            times[oldest] -= 1
            num_entities -= times[oldest] == 0
            first += 1
            oldest = entities[first]
        while head < tail and least[head & (_RING - 1)] <= first:  # the first place's prefix is shared with one outside
            head += 1
        if num_entities == min_support:
            support[last] = shared[least[head & (_RING - 1)]]
    return support


@cached()
def _hand_on(support, shared):
    """Give each place what its neighbours have and it shares: forwards, then backwards."""
    n = support.shape[0]
    for k in range(1, n):
        support[k] = max(support[k], min(support[k - 1], shared[k]))
    for k in range(n - 2, -1, -1):
        support[k] = max(support[k], min(support[k + 1], shared[k + 1]))
