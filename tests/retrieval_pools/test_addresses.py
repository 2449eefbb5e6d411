"""Arrays by address are read and written like the arrays at that address, also in the memory of drafts."""

import numpy as np
from numba import njit

from laserbatch.retrieval_pools.compiled import float32s_at, int32s_at
from laserbatch.retrieval_pools.drafting.state import SCRATCH


@njit(_nrt=False)
def move(numbers, values, k, moved):
    table = int32s_at(numbers, (3, 4))
    row = table[k]  # a view of the same kind
    moved[0], moved[1], moved[2] = table[k, 3], row[k + 1], row.shape[0]
    row[0] = -7
    table[2, np.int32(k)] = -8
    part = float32s_at(values, 5)[k:]
    part[k] = 0.5
    part[3:] = 0.25
    moved[3] = part.shape[0]


def test_arrays_are_those_that_lie_there():
    numbers, values = np.arange(12, dtype=np.int32).reshape(3, 4), np.zeros(5, np.float32)
    moved = np.zeros(4, np.int64)
    move(numbers.ctypes.data, values.ctypes.data, 1, moved)
    assert moved.tolist() == [7, 6, 4, 4]
    assert numbers.tolist() == [[0, 1, 2, 3], [-7, 5, 6, 7], [8, -8, 10, 11]]
    assert values.tolist() == [0.0, 0.0, 0.5, 0.0, 0.25]


@njit(_nrt=False)
def one_of_four(numbers, k):
    return int32s_at(numbers, 4)[k], int32s_at(numbers, (4, 1))[k, 0]


def test_no_index_counts_from_the_end():
    """An index is not checked, so a negative one reads memory before the array, which exists here."""
    numbers = np.arange(6, dtype=np.int32)
    middle = numbers[2:].ctypes.data
    assert one_of_four(middle, 3) == (5, 5)
    assert one_of_four(middle, -1) == (1, 1)


def test_every_array_of_a_drafts_memory_has_its_own_place():
    """Draft tests show that the arrays are read there."""
    expected = [
        (begin + offset, int(np.prod(array.shape)), array.base.itemsize)
        for part, begin in SCRATCH.fields.values()
        for array, offset in part.fields.values()
    ]
    assert all(offset % size == 0 for offset, _, size in expected)
    ends = [offset + length * size for offset, length, size in expected]
    begins = [begin for begin, _, _ in expected[1:]] + [SCRATCH.itemsize]
    assert all(end <= begin for end, begin in zip(ends, begins, strict=True))
