"""Where positions belong in an order of others: by steps and bisection, many of them at once.

What a position shares with both ends of an interval it shares with all between (Manber and Myers 1990), so hardly a
token is compared twice. Orders are as in `suffix_order`. Compiled code only; knows no streams and no files.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from laserbatch.retrieval_pools.fetch import fetch
from laserbatch.retrieval_pools.index.suffix_order import SEPARATOR

LINE_TOKENS = 16  # that come from memory together


class _Search(NamedTuple):
    """Places that are looked for in step, int64[n] each: where they may be, and what is known to be shared there."""

    number: np.ndarray
    low: np.ndarray
    high: np.ndarray
    shared_low: np.ndarray
    shared_high: np.ndarray
    others: np.ndarray
    next_tokens: np.ndarray


@njit(cache=True)
def compare(tokens, one, two, shared, depth):
    """How many tokens two positions share, and whether `one` comes before; they are known to share `shared`."""
    for k in range(shared, depth):
        token = tokens[one + k]
        if token != tokens[two + k]:
            return k, token < tokens[two + k]
        if token == SEPARATOR and k > 0:  # both texts end; in the first place it is a start
            break
    return depth, one < two


@njit(cache=True)
def num_before(tokens, order, begin, position, depth, step):
    """How many places of `order`, from `begin` on, are before `position`: steps that double, then bisection."""
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
def find_places(tokens, order, begin, end, positions, depth, places):
    """For each of some rising positions the places of `order`, from `begin` to `end`, that are before it: in `places`.

    First that of the middle one, then those between it and the ends, and so on: each is looked for between places that
    are found, and known to share what their positions share.
    """
    for k in range(positions.shape[0]):
        for line in range(0, depth, LINE_TOKENS):
            fetch(tokens, positions[k] + line)
    room = (positions.shape[0] + 1) >> 1
    search = _Search(
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64),
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64),
    )  # fmt: skip
    step = 1 << (num_bits(positions.shape[0]) - 1)
    while step > 0:
        num_open = 0
        for k in range(step - 1, positions.shape[0], 2 * step):
            has_left, has_right = k >= step, k + step < positions.shape[0]
            low = places[k - step] if has_left else begin
            high = places[k + step] if has_right else end
            places[k] = low
            if low == high:
                continue
            shared = 0
            if has_left and has_right:
                shared, _ = compare(tokens, positions[k - step], positions[k + step], 0, depth)
            search.number[num_open], search.low[num_open], search.high[num_open] = k, low, high
            search.shared_low[num_open] = search.shared_high[num_open] = shared
            num_open += 1
        _bisect_in_step(tokens, order, positions, depth, search, num_open, places)
        step >>= 1


@njit(cache=True)
def _bisect_in_step(tokens, order, positions, depth, search, num_open, places):
    """Find several places: what is compared is fetched for all first, and only then compared."""
    number, low, high, shared_low, shared_high, others, next_tokens = search
    while num_open > 0:
        for k in range(num_open):
            others[k] = order[(low[k] + high[k]) >> 1]
        for k in range(num_open):
            shared = min(shared_low[k], shared_high[k])
            next_tokens[k] = tokens[others[k] + shared] if shared < depth else SEPARATOR
        still_open = 0
        for k in range(num_open):
            position, middle = positions[number[k]], (low[k] + high[k]) >> 1
            shared = min(shared_low[k], shared_high[k])
            if shared < depth and next_tokens[k] != tokens[position + shared]:
                is_before = next_tokens[k] < tokens[position + shared]
            else:
                shared, is_before = compare(tokens, others[k], position, shared, depth)
            number[still_open] = number[k]
            low[still_open], high[still_open] = (middle + 1, high[k]) if is_before else (low[k], middle)
            shared_low[still_open], shared_high[still_open] = (
                (shared, shared_high[k]) if is_before else (shared_low[k], shared)
            )
            places[number[k]] = low[still_open]
            still_open += low[still_open] < high[still_open]
        num_open = still_open


@njit(cache=True)
def num_bits(value):
    """Of a whole number, without its leading zeros."""
    count = 0
    while value > 0:
        value >>= 1
        count += 1
    return count
