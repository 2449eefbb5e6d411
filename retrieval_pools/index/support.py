"""The longest n-gram at every position that enough entities share: with `min_support`, a pool drafts nothing longer.

An n-gram is supported if texts of at least `min_support` entities hold it; then all its beginnings are supported too.
So one length per place of the order says which n-grams that begin there are supported. A text's start and end are
tokens of its n-grams.
"""

import numpy as np

from laserbatch.retrieval_pools.compiled import cached
from laserbatch.retrieval_pools.index.texts import SEPARATOR

_RING = 256  # the lengths in it strictly increase and are at most 255, so no more than 256 places are in it


def supported_lengths(
    tokens: np.ndarray, order: np.ndarray, entities: np.ndarray, min_support: int, depth: int
) -> np.ndarray:
    """Length of the longest supported n-gram that begins at each place of the order, in time O(n * depth).

    uint8[n], 0 where not even the first token is supported.

    Places that share their first s tokens are neighbours. So an n-gram is supported if it is in a window of the order
    that has `min_support` entities, and no longer than the shortest common prefix of neighbours in the window. For each
    place the shortest such window that ends there is enough: `_hand_on` covers the longer ones.

    `tokens` and `order`, int32[n + 1] and int32[n], are as in `order.sort_texts`; `entities`, int32[n], is the entity
    of each place's text, from 0 on. At least 2 entities, `min_support`, make an n-gram supported. No n-gram is longer
    than `depth`, the number of tokens that `order` is sorted by, at most 255.
    """
    shared = _shared_with_place_before(tokens, order, depth)
    support = _least_shared_in_windows(shared, entities, min_support)
    _hand_on(support, shared)
    return support


@cached()
def _shared_with_place_before(tokens, order, depth):
    """The number of first tokens that each place shares with the place before it, a text's end included, uint8[n]."""
    shared = np.zeros(order.shape[0], np.uint8)
    for k in range(1, order.shape[0]):
        i, j = order[k - 1], order[k]
        length = 0
        while length < depth and tokens[i + length] == tokens[j + length]:
            length += 1
            if length > 1 and tokens[i + length - 1] == SEPARATOR:  # both end; as first token it is a start
                break
        shared[k] = length
    return shared


@cached()
def _least_shared_in_windows(shared, entities, min_support):
    """The number of tokens shared in the shortest window that ends at each place and has enough entities; 0 if none."""
    n = shared.shape[0]
    support = np.zeros(n, np.uint8)
    if n == 0:
        return support
    times = np.zeros(entities.max() + 1, np.int32)  # number of places of each entity in the window
    num_entities = 0
    least = np.empty(_RING, np.int32)  # places in the window that share less than all later ones; the first the least
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
        while head < tail and least[head & (_RING - 1)] <= first:  # `first` shares its prefix with a place outside
            head += 1
        if num_entities == min_support:
            support[last] = shared[least[head & (_RING - 1)]]
    return support


@cached()
def _hand_on(support, shared):
    """Raise each place's length to what a neighbour has, as far as it shares those tokens: forwards, then backwards."""
    n = support.shape[0]
    for k in range(1, n):
        support[k] = max(support[k], min(support[k - 1], shared[k]))
    for k in range(n - 2, -1, -1):
        support[k] = max(support[k], min(support[k + 1], shared[k + 1]))
