"""The memory of drafts: what the layout keeps room for is what the compiled views take of it."""

import numpy as np
from numba import literal_unroll, njit

from laserbatch.retrieval_pools.drafting import scratch
from laserbatch.retrieval_pools.drafting.state import MAX_NODES
from laserbatch.retrieval_pools.settings import MAX_MATCH_TOKENS


@njit
def note_extents(found, number, block, arrays):
    for array in literal_unroll(arrays):
        found[number, 0] = array.ctypes.data - block.ctypes.data
        found[number, 1], found[number, 2] = array.size, array.itemsize
        number += 1
    return number


@njit
def extents(found, block):
    """Where each array begins in the block, its size and the bytes of its items, in the order of `state`: a number."""
    number = 0
    for arrays in literal_unroll(scratch.scratch_in(block, MAX_NODES, MAX_MATCH_TOKENS)):
        number = note_extents(found, number, block, arrays)
    return number


def test_every_array_has_its_own_place():
    layout = scratch._LAYOUT
    fields = [(layout.fields[name][0], layout.fields[name][1]) for name in layout.names]
    expected = [(offset, int(np.prod(kind.shape)), kind.base.itemsize) for kind, offset in fields]
    found = np.zeros((len(expected), 3), np.int64)
    assert extents(found, scratch.new_scratch()) == len(expected)
    assert list(map(tuple, found.tolist())) == expected
