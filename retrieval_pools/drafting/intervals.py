"""Intervals of a pool's order: where a context occurs, where it goes on with a token, how often, and for whom."""

import numpy as np
from numba import types
from numba.extending import overload

from retrieval_pools.drafting.state import called, part


@part
def _compare(index, position, context, length):
    """Sign of the tokens at `position` less the last `length` of `context`; the first of both are known to be equal."""
    begin = context.shape[0] - length
    for i in range(1, length):
        difference = index.tokens[position + i] - context[begin + i]
        if difference != 0:
            return difference
    return np.int32(0)


@called
def find_interval(index, context, length):
    """Interval of the positions that begin with the last `length` tokens of `context`."""
    first_token = context[context.shape[0] - length]
    if first_token + 2 >= index.starts.shape[0]:
        return 0, 0
    low, high = np.int64(index.starts[first_token + 1]), np.int64(index.starts[first_token + 2])
    if length == 1:
        return low, high
    end = high
    while low < high:
        middle = (low + high) >> 1
        sign = _compare(index, index.order[middle], context, length)
        if sign < 0:
            low = middle + 1
        else:
            high = middle
            if sign > 0:
                end = middle
    first = low
    step = 1
    while low + step <= end and _compare(index, index.order[low + step - 1], context, length) == 0:  # gallop to the end
        low += step
        step <<= 1
    high = min(low + step - 1, end)
    while low < high:
        middle = (low + high) >> 1
        if _compare(index, index.order[middle], context, length) == 0:
            low = middle + 1
        else:
            high = middle
    return first, low


@part
def _run_begin(index, low, high, offset, token):
    """The first place from `low` to `high` whose next token, `offset` tokens on, is not below `token`."""
    while low < high:
        middle = (low + high) >> 1
        if index.tokens[index.order[middle] + offset] < token:
            low = middle + 1
        else:
            high = middle
    return low


@part
def _run_end(index, low, high, offset, token):
    """The first place from `low` to `high` whose next token is not `token`; those before it are known to have it."""
    while low < high:
        middle = (low + high) >> 1
        if index.tokens[index.order[middle] + offset] == token:
            low = middle + 1
        else:
            high = middle
    return low


@part
def narrow_interval(index, first, last, offset, token):
    """The part of an interval whose next token, `offset` tokens on, is `token`."""
    first = low = _run_begin(index, first, last, offset, token)
    step = 1
    while low + step <= last and index.tokens[index.order[low + step - 1] + offset] == token:  # gallop to the end
        low += step
        step <<= 1
    return first, _run_end(index, low, min(low + step - 1, last), offset, token)


@part
def narrow_to_run(index, first, last, offset, token, num_samples, begin, end):
    """The part of an interval whose next token is `token`, of which the samples from `begin` to `end` are known."""
    stride = sample_stride(num_samples, last - first)
    low = first if begin == 0 else sample_place(first, stride, begin - 1) + 1
    run_first = _run_begin(index, low, sample_place(first, stride, begin), offset, token)
    high = last if end == num_samples else sample_place(first, stride, end)
    return run_first, _run_end(index, sample_place(first, stride, end - 1) + 1, high, offset, token)


@part
def sample_stride(num_samples, size):
    """Distance between `num_samples` places spread evenly over an interval, in units of 1 / 65536."""
    return 1 << 16 if num_samples >= size else (size << 16) // num_samples


@part
def sample_place(first, stride, k):
    """The k-th of the places: the middle of the k-th part."""
    return first + (((2 * k + 1) * stride) >> 17)


def is_supported(index, place, num_tokens):
    """Whether enough entities have the first `num_tokens` tokens at a place of the order.

    Compiled code only. An index without support has None for it, which its type says: for it nothing is left of this.
    """
    return index.support is None or index.support[place] >= num_tokens


@overload(is_supported)
def _is_supported(index, place, num_tokens):
    if _keeps_all(index):
        return lambda index, place, num_tokens: True
    return lambda index, place, num_tokens: index.support[place] >= num_tokens


def has_alternatives(index):
    """Whether the index keeps what was nearly written; compiled code only, which knows it from the type."""
    return index.alternatives is not None


@overload(has_alternatives)
def _has_alternatives(index):
    keeps_none = isinstance(index.types[index.fields.index("alternatives")], types.NoneType)
    return (lambda index: False) if keeps_none else (lambda index: True)


def _keeps_all(index_type):
    return isinstance(index_type.types[index_type.fields.index("support")], types.NoneType)


@part
def _num_inside(index, preference, first, last):
    """Occurrences in texts of the group; estimated when there are many."""
    size = last - first
    if size <= 0:
        return 0.0
    num_samples = min(size, preference.num_group_samples)
    stride = sample_stride(num_samples, size)
    num_inside = 0
    for k in range(num_samples):
        if index.group_codes[sample_place(first, stride, k)] == preference.group:
            num_inside += 1
    return num_inside * (size / num_samples)


@part
def count_seen(index, preference, first, last):
    """Occurrences that count at all: the evidence, whose group does not make it more."""
    if preference.outside > 0:
        return float(last - first)
    return _num_inside(index, preference, first, last) if preference.inside > 0 else 0.0


@part
def has_next(index, preference, first, last, length):
    """Whether anything may be drafted behind the `length` tokens of an interval, as far as its samples tell."""
    return count_seen(index, preference, first, last) > 0 and _is_next_supported(index, preference, first, last, length)


def _is_next_supported(index, preference, first, last, length):
    """Likewise, of an interval that is seen; compiled code only."""
    size, only_group = last - first, preference.outside <= 0
    num_samples = min(size, preference.num_group_samples if only_group else preference.num_samples)
    stride = sample_stride(num_samples, size)
    for k in range(num_samples):
        place = sample_place(first, stride, k)
        if only_group and index.group_codes[place] != preference.group:
            continue
        if is_supported(index, place, length + 1):
            return True
    return False


@overload(_is_next_supported)
def _is_next_supported_of(index, preference, first, last, length):
    if _keeps_all(index):
        return lambda index, preference, first, last, length: True
    return _is_next_supported
