import numpy as np
import pytest
import torch

from pipeline.decoding.kv_cache import cache_bound, common_prefix, free_host_bytes, is_out_of_memory


def test_common_prefix_counts_equal_leading_tokens():
    a = np.array([1, 2, 3, 4], np.int32)
    assert common_prefix(a, a) == common_prefix(a, np.append(a, 5)) == 4
    assert common_prefix(a, np.array([1, 2, 9, 4], np.int32)) == 2
    assert common_prefix(a, a[:0]) == 0


def test_free_memory_is_the_less_of_machine_and_control_group(tmp_path):
    meminfo = tmp_path / "meminfo"
    assert free_host_bytes(meminfo, tmp_path) is None  # not Linux
    meminfo.write_text("MemTotal:  4000 kB\nMemAvailable:    1000 kB\n")
    assert free_host_bytes(meminfo, tmp_path) == 1_024_000
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 200000\n")
    for limit, free in (("max", 1_024_000), ("800000", 300_000), ("9000000", 1_024_000), ("100000", 0)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert free_host_bytes(meminfo, tmp_path) == free


def test_the_cache_may_take_part_of_what_is_free():
    free = free_host_bytes()
    bound = cache_bound(torch.device("cpu"), 1 << 20)
    assert bound is None if free is None else 0 < bound < free / (1 << 20)


def test_out_of_memory_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(ValueError())
