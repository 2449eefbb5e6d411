"""A pool's pages are asked for while they are few, and nothing else changes."""

import sys

import numpy as np
import pytest

from retrieval_pools import residence
from retrieval_pools.array_files import map_array
from retrieval_pools.build import PoolText, build_pool
from retrieval_pools.pool import Pool
from retrieval_pools.query import draft
from retrieval_pools.residence import available_bytes, make_resident

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
    assert make_resident([mapped, np.arange(3)])
    assert resident_kib() - before > 0.9 * NUM_VALUES * 4 / 1024
    assert mapped[NUM_VALUES - 1] == NUM_VALUES - 1


def test_what_is_large_for_the_memory_is_left_alone(mapped, monkeypatch):
    asked = []
    monkeypatch.setattr(residence, "_ask_for", asked.append)
    monkeypatch.setattr(residence, "available_bytes", lambda: int(4 * mapped.nbytes * 0.9))
    assert not make_resident([mapped]) and not asked
    monkeypatch.setattr(residence, "available_bytes", lambda: None)
    assert not make_resident([mapped]) and not asked
    monkeypatch.setattr(residence, "available_bytes", lambda: int(4 * mapped.nbytes * 1.1))
    assert make_resident([mapped]) and len(asked) == 1


def test_pages_are_there_on_a_kernel_that_knows_no_such_advice(mapped, monkeypatch):
    monkeypatch.setattr(residence, "_POPULATE_READ", 9999)
    assert make_resident([mapped])
    assert mapped[NUM_VALUES - 1] == NUM_VALUES - 1


def test_memory_is_that_of_the_machine_or_of_a_smaller_container(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    group = tmp_path / "group"
    group.mkdir()
    assert available_bytes(tmp_path / "none", group) is None
    assert available_bytes(tmp_path / "meminfo", group) == 8000 << 10
    (group / "memory.current").write_text("1500000\n")
    (group / "memory.stat").write_text("anon 1000000\nfile 500000\n")
    for limit, expected in (("max", 8000 << 10), ("3000000", 2_000_000), ("900000000", 8000 << 10), ("900000", 0)):
        (group / "memory.max").write_text(limit + "\n")
        assert available_bytes(tmp_path / "meminfo", group) == expected


def test_a_resident_pool_drafts_the_same(tmp_path):
    texts = [np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 5], np.int32)]
    build_pool(map(PoolText, texts), tmp_path / "p", side="user", tokenizer_hash="t", model_id="m")
    drafts = [
        draft(Pool.open(tmp_path / "p", resident=resident), np.array([1, 2], np.int32), 0) for resident in (False, True)
    ]
    np.testing.assert_array_equal(drafts[0].token_ids, drafts[1].token_ids)
    assert len(drafts[0])
