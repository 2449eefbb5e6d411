"""A pool's pages are asked for while they are few, and nothing else changes."""

import sys

import numpy as np
import pytest
from drafts import draft

from laserbatch.retrieval_pools.index.arrays import make_resident, map_array
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import Pool

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


def test_a_resident_pool_drafts_the_same(tmp_path):
    texts = [np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 5], np.int32)]
    build_pool(map(PoolText, texts), tmp_path / "p", side="user", tokenizer_hash="t", model_id="m")
    drafts = [
        draft(Pool.open(tmp_path / "p", max_resident_bytes=most), np.array([1, 2], np.int32), 0)
        for most in (0, 1 << 30)
    ]
    np.testing.assert_array_equal(drafts[0].token_ids, drafts[1].token_ids)
    assert len(drafts[0])
