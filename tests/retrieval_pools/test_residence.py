"""Pages of a pool are loaded ahead if they are few, and nothing else changes."""

import sys

import numpy as np
import pytest

from laserbatch.retrieval_pools.index.arrays import make_resident, map_array

NUM_VALUES = 1 << 20


@pytest.fixture
def mapped(tmp_path):
    np.save(tmp_path / "array.npy", np.arange(NUM_VALUES, dtype=np.int32))
    return map_array(tmp_path / "array.npy")


def resident_kib():
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile:"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts pages as Linux tells them")
def test_pages_are_mapped_before_they_are_read(mapped):
    before = resident_kib()
    assert make_resident([mapped, np.arange(3)], 1 << 30)
    assert resident_kib() - before > 0.9 * NUM_VALUES * 4 / 1024
    assert mapped[NUM_VALUES - 1] == NUM_VALUES - 1


def test_what_is_larger_than_it_may_be_is_left_alone(mapped):
    assert not make_resident([mapped, np.arange(3)], mapped.nbytes - 1)
