"""Arrays by their addresses: read and written as the array that lies there."""

import numpy as np
from numba import njit

from laserbatch.retrieval_pools.drafting.addresses import float64s_at, int32s_at


@njit(_nrt=False)
def move(numbers, values, k, found):
    table = int32s_at(numbers, (3, 4))
    row = table[k]  # an array of the same kind
    found[0], found[1], found[2] = table[k, 3], row[k + 1], row.shape[0]
    row[0] = -7
    table[2, np.int32(k)] = -8
    part = float64s_at(values, 5)[k:]
    part[k] = 0.5
    part[3:] = 0.25
    found[3] = part.shape[0]


def test_arrays_are_those_that_lie_there():
    numbers, values = np.arange(12, dtype=np.int32).reshape(3, 4), np.zeros(5)
    found = np.zeros(4, np.int64)
    move(numbers.ctypes.data, values.ctypes.data, 1, found)
    assert found.tolist() == [7, 6, 4, 4]
    assert numbers.tolist() == [[0, 1, 2, 3], [-7, 5, 6, 7], [8, -8, 10, 11]]
    assert values.tolist() == [0.0, 0.0, 0.5, 0.0, 0.25]


@njit(_nrt=False)
def one_of_four(numbers, k):
    return int32s_at(numbers, 4)[k], int32s_at(numbers, (4, 1))[k, 0]


def test_no_index_counts_from_the_end():
    """What lies before an array is not asked for; here it shows that nothing looks whether it is."""
    numbers = np.arange(6, dtype=np.int32)
    middle = numbers[2:].ctypes.data
    assert one_of_four(middle, 3) == (5, 5)
    assert one_of_four(middle, -1) == (1, 1)
