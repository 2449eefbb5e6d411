"""Intervals of a pool's order: where a context occurs, where it goes on with a token, how often, and for whom."""

from laserbatch.retrieval_pools.compiled import part
from laserbatch.retrieval_pools.drafting.search import ends_of_run
from laserbatch.retrieval_pools.drafting.state import LEAST_SAMPLES_BITS


@part
def narrow_interval(index, first, last, offset, token):
    """The part of an interval whose next token, `offset` tokens on, is `token`."""
    return ends_of_run(index, first, last, first, last, offset, token)


@part
def narrow_to_run(index, first, last, offset, token, num_samples, begin, end):
    """The part of an interval whose next token is `token`, of which the samples from `begin` to `end` are known."""
    stride = sample_stride(num_samples, last - first)
    low = first if begin == 0 else sample_place(first, stride, begin - 1) + 1
    high = sample_place(first, stride, begin)
    low_end = sample_place(first, stride, end - 1) + 1
    high_end = last if end == num_samples else sample_place(first, stride, end)
    return ends_of_run(index, low, high, low_end, high_end, offset, token)


@part
def num_samples_behind(preference, probability):
    """Occurrences counted behind a path: what they tell is worth as much as the path is probable."""
    return max(int(preference.num_samples * probability), preference.num_samples >> LEAST_SAMPLES_BITS, 1)


@part
def num_group_samples_behind(preference, num_samples):
    """Occurrences searched for the group's: those counted anyway; a number of their own where nothing else counts."""
    return num_samples if preference.outside > 0 else preference.num_group_samples


@part
def sample_stride(num_samples, size):
    """Distance between `num_samples` places spread evenly over an interval, in units of 1 / 65536."""
    return 1 << 16 if num_samples >= size else (size << 16) // num_samples


@part
def sample_place(first, stride, k):
    """The k-th of the places: the middle of the k-th part."""
    return first + (((2 * k + 1) * stride) >> 17)


@part
def is_supported(index, place, num_tokens):
    """Whether enough entities have the first `num_tokens` tokens at a place of the order."""
    return index.support.shape[0] == 0 or index.support[place] >= num_tokens


@part
def is_of_group(index, place, group):
    """Whether a place of the order is of a text of a group."""
    return (index.group_codes[place] if index.group_codes.shape[0] > 0 else index.wide_codes[place]) == group


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
        if is_of_group(index, sample_place(first, stride, k), preference.group):
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
    is_seen = count_seen(index, preference, first, last) > 0
    if not is_seen or index.support.shape[0] == 0:
        return is_seen
    size, only_group = last - first, preference.outside <= 0
    num_samples = min(size, preference.num_group_samples if only_group else preference.num_samples)
    stride = sample_stride(num_samples, size)
    for k in range(num_samples):
        place = sample_place(first, stride, k)
        if only_group and not is_of_group(index, place, preference.group):
            continue
        if is_supported(index, place, length + 1):
            return True
    return False
