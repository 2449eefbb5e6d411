"""Searches that do not wait for memory step by step: of a large pool, every place that is looked at is far away.

A bisection must have one token before it knows which is next. Here several places divide what is left, and all of them
are fetched before the first is compared: a few waits in place of many. Knows no context and no draft.
"""

import numpy as np

from retrieval_pools.drafting.state import called, part
from retrieval_pools.fetch import fetch

PROBE_BITS = 3
NUM_PROBES = 1 << PROBE_BITS  # looked at together: what is left is divided by as many


@part
def probe_place(low, size, k):
    """The k-th of the places that divide `size` places from `low` on; of NUM_PROBES or fewer each one."""
    return low + (((2 * k + 1) * size) >> (PROBE_BITS + 1))


@part
def ends_of_run(index, low, high, low_end, high_end, offset, token):
    """Where the places whose next token, `offset` tokens on, is `token` begin and end.

    Parameters
    ----------
    low, high : the first is in this range or at its end; none before it has `token` or a larger one.
    low_end, high_end : likewise the first with a larger token.
    """
    while low < high or low_end < high_end:
        size, size_end = high - low, high_end - low_end
        num_below = num_not_above = 0
        if size > 0:
            for k in range(NUM_PROBES):
                num_below += index.tokens[index.order[probe_place(low, size, k)] + offset] < token
        if size_end > 0:
            for k in range(NUM_PROBES):
                num_not_above += index.tokens[index.order[probe_place(low_end, size_end, k)] + offset] <= token
        low, high = _part_between(low, high, num_below)
        low_end, high_end = _part_between(low_end, high_end, num_not_above)
    return low, low_end


@part
def _part_between(low, high, num_before):
    """What is left of a range when so many of its probes are before what is looked for."""
    size = high - low
    begin = probe_place(low, size, num_before - 1) + 1 if num_before > 0 else low
    return begin, probe_place(low, size, num_before) if num_before < NUM_PROBES else high


@part
def _compare(index, position, context, length):
    """Sign of the tokens at `position` less the last `length` of `context`; the first of both are known to be equal."""
    begin = context.shape[0] - length
    for i in range(1, length):
        difference = index.tokens[position + i] - context[begin + i]
        if difference != 0:
            return difference
    return np.int32(0)


@part
def _first_place(index, low, high, context, length, beyond):
    """The first place from `low` to `high` that is not before the last `length` tokens of `context`.

    With `beyond` 1 the first that is behind all that begin with them. Also returns a place, at most `high`, that is
    known to be behind them.
    """
    end = high
    while low < high:
        size = high - low
        for k in range(NUM_PROBES):
            fetch(index.tokens, index.order[probe_place(low, size, k)] + 1)
        num_before, num_known = 0, NUM_PROBES
        while num_before < num_known:
            middle = (num_before + num_known) >> 1
            place = probe_place(low, size, middle)
            sign = _compare(index, index.order[place], context, length)
            if sign < beyond:
                num_before = middle + 1
            else:
                num_known = middle
                if sign > 0:
                    end = place
        low, high = _part_between(low, high, num_before)
    return low, end


@called
def find_interval(index, context, length):
    """Interval of the positions that begin with the last `length` tokens of `context`."""
    first_token = context[context.shape[0] - length]
    if first_token + 2 >= index.starts.shape[0]:
        return 0, 0
    low, high = np.int64(index.starts[first_token + 1]), np.int64(index.starts[first_token + 2])
    if length == 1:
        return low, high
    first, end = _first_place(index, low, high, context, length, 0)
    return first, _first_place(index, first, end, context, length, 1)[0]
