"""Intervals of a pool's order: where a context occurs, where a given token follows it, how often, and in which group.

In a large pool every place that a search reads is a cache miss, and a bisection must wait for one token before it knows
which place is next. Here several probes divide the remaining range, and all of them are fetched before the first is
compared, so a search waits a few times instead of many.
"""

import numpy as np

from laserbatch.retrieval_pools.compiled import called, fetch, part
from laserbatch.retrieval_pools.drafting.state import MIN_SAMPLES_BITS

PROBE_BITS = 3
NUM_PROBES = 1 << PROBE_BITS  # places that are read together and divide the remaining range


@part
def probe_place(low, size, k):
    """The k-th of NUM_PROBES places spread over the `size` places from `low` on; they cover a smaller range fully."""
    return low + (((2 * k + 1) * size) >> (PROBE_BITS + 1))


@part
def ends_of_run(index, low, high, low_end, high_end, offset, token):
    """The begin and end of the places whose next token, `offset` tokens on, is `token`.

    The begin is searched from `low` to `high`, and the end from `low_end` to `high_end`, these bounds included.
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
    """Narrow a range to the part that holds the target, given that its first `num_before` probes are before it."""
    size = high - low
    begin = probe_place(low, size, num_before - 1) + 1 if num_before > 0 else low
    return begin, probe_place(low, size, num_before) if num_before < NUM_PROBES else high


@part
def _compare(index, position, context, known, length):
    """Compare the tokens at `position` with the last `length` tokens of `context`; the first `known` are equal.

    Returns the first difference, whose sign matters, and the number of equal tokens before it.
    """
    begin = context.shape[0] - length
    for i in range(known, length):
        difference = index.tokens[position + i] - context[begin + i]
        if difference != 0:
            return difference, i
    return np.int32(0), length


@part
def _fetch_probes(index, low, size, known):
    for k in range(NUM_PROBES):
        fetch(index.tokens, index.order[probe_place(low, size, k)] + known)


@part
def _num_before(index, low, size, begin, end, context, known, length, beyond):
    """The number of a range's probes before those that begin with the context; `beyond` 1 counts these as well.

    The number is between `begin` and `end`. Also returns how many tokens the nearest probe that does not begin with the
    context shares with it; `known` if no such probe was compared.
    """
    shared = known
    while begin < end:
        middle = (begin + end) >> 1
        sign, num_equal = _compare(index, index.order[probe_place(low, size, middle)], context, known, length)
        if sign < beyond:
            begin = middle + 1
        else:
            end = middle
        if sign != 0:
            shared = num_equal
    return begin, shared


@called
def find_interval(index, context, length):
    """Interval of the positions that begin with the last `length` tokens of `context`.

    Both ends are searched at once. All places between two that share their first tokens with the context share them
    too, so these tokens are not compared again, and the fetched token is the first that may differ.
    """
    first_token = context[context.shape[0] - length]
    if first_token + 2 >= index.starts.shape[0]:
        return 0, 0
    low, high = np.int64(index.starts[first_token + 1]), np.int64(index.starts[first_token + 2])
    if length == 1:
        return low, high
    known_before = known_behind = 1  # tokens that the nearest places outside the range share with the context
    while low < high:
        size, known = high - low, min(known_before, known_behind)
        _fetch_probes(index, low, size, known)
        before, behind = 0, NUM_PROBES  # probes below `before` are before the interval, those from `behind` on after it
        while before < behind:
            middle = (before + behind) >> 1
            sign, num_equal = _compare(index, index.order[probe_place(low, size, middle)], context, known, length)
            if sign < 0:
                before, known_before = middle + 1, num_equal
            elif sign > 0:
                behind, known_behind = middle, num_equal
            else:
                num_before, known_before = _num_before(
                    index, low, size, before, middle, context, known_before, length, 0
                )
                num_to_end, known_behind = _num_before(
                    index, low, size, middle + 1, behind, context, known_behind, length, 1
                )
                first, most = _part_between(low, high, num_before)
                end, most_end = _part_between(low, high, num_to_end)
                return _ends_of_context(index, first, most, end, most_end, context, length, known_before, known_behind)
        low, high = _part_between(low, high, before)
    return low, low


@part
def _ends_of_context(index, low, high, low_end, high_end, context, length, known_before, known_behind):
    """The begin and end of the places that begin with the context, searched in two ranges around a known one."""
    while low < high or low_end < high_end:
        size, size_end = high - low, high_end - low_end
        if size > 0:
            _fetch_probes(index, low, size, known_before)
        if size_end > 0:
            _fetch_probes(index, low_end, size_end, known_behind)
        if size > 0:
            num_before, known_before = _num_before(index, low, size, 0, NUM_PROBES, context, known_before, length, 0)
            low, high = _part_between(low, high, num_before)
        if size_end > 0:
            num_before, known_behind = _num_before(
                index, low_end, size_end, 0, NUM_PROBES, context, known_behind, length, 1
            )
            low_end, high_end = _part_between(low_end, high_end, num_before)
    return low, low_end


@part
def narrow_to_run(index, first, last, offset, token, num_samples, begin, end):
    """The part of an interval whose next token is `token`, given that its samples `begin` to `end` have that token."""
    stride = sample_stride(num_samples, last - first)
    low = first if begin == 0 else sample_place(first, stride, begin - 1) + 1
    high = sample_place(first, stride, begin)
    low_end = sample_place(first, stride, end - 1) + 1
    high_end = last if end == num_samples else sample_place(first, stride, end)
    return ends_of_run(index, low, high, low_end, high_end, offset, token)


@part
def num_samples_behind(preference, probability):
    """The number of occurrences to sample after a path, proportional to its probability, with a lower limit."""
    return max(int(preference.num_samples * probability), preference.num_samples >> MIN_SAMPLES_BITS, 1)


@part
def sample_stride(num_samples, size):
    """The distance between `num_samples` places spread evenly over an interval, in units of 1 / 65536."""
    return 1 << 16 if num_samples >= size else (size << 16) // num_samples


@part
def sample_place(first, stride, k):
    """The k-th sampled place: the middle of the k-th part."""
    return first + (((2 * k + 1) * stride) >> 17)


@part
def is_supported(index, place, num_tokens):
    """Whether enough entities have the first `num_tokens` tokens at a place of the order."""
    return index.support.shape[0] == 0 or index.support[place] >= num_tokens


@part
def is_of_group(index, place, group):
    """Whether a place of the order belongs to a text of the group."""
    return (index.group_codes[place] if index.group_codes.shape[0] > 0 else index.wide_codes[place]) == group


@part
def _num_inside(index, preference, first, last):
    """The number of occurrences in texts of the group, estimated from samples if there are many."""
    size = last - first
    if size <= 0:
        return 0.0
    num_samples = min(size, preference.num_samples)
    stride = sample_stride(num_samples, size)
    num_inside = 0
    for k in range(num_samples):
        if is_of_group(index, sample_place(first, stride, k), preference.group):
            num_inside += 1
    return num_inside * (size / num_samples)


@part
def count_seen(index, preference, first, last):
    """The number of occurrences with a weight above 0: the evidence, which group weights do not increase."""
    if preference.outside > 0:
        return float(last - first)
    return _num_inside(index, preference, first, last) if preference.inside > 0 else 0.0


@part
def has_next(index, preference, first, last, length):
    """Whether, judging by samples, any token may be drafted after the `length` tokens of an interval."""
    is_seen = count_seen(index, preference, first, last) > 0
    if not is_seen or index.support.shape[0] == 0:
        return is_seen
    size, only_group = last - first, preference.outside <= 0
    num_samples = min(size, preference.num_samples)
    stride = sample_stride(num_samples, size)
    for k in range(num_samples):
        place = sample_place(first, stride, k)
        if only_group and not is_of_group(index, place, preference.group):
            continue
        if is_supported(index, place, length + 1):
            return True
    return False
