import numpy as np
import pytest
import torch

from laserbatch.pipeline.decoding.memory import kv_cache
from laserbatch.pipeline.decoding.memory.kv_cache import cache_bound, common_prefix, is_out_of_memory
from laserbatch.pipeline.decoding.memory.room import Memory, memory_of


def test_common_prefix_counts_equal_leading_tokens():
    a = np.array([1, 2, 3, 4], np.int32)
    assert common_prefix(a, a) == common_prefix(a, np.append(a, 5)) == 4
    assert common_prefix(a, np.array([1, 2, 9, 4], np.int32)) == 2
    assert common_prefix(a, a[:0]) == 0


def test_the_cache_may_take_part_of_what_is_free():
    cpu = torch.device("cpu")
    assert 0 < cache_bound(cpu, 1 << 20) < memory_of(cpu).free_bytes / (1 << 20)


@pytest.mark.parametrize(("device", "num_sharing", "expected"), [("cpu", 1, 500), ("cpu", 4, 125), ("cuda", 4, 800)])
def test_engines_of_a_machine_share_its_memory_but_no_gpu(monkeypatch, device, num_sharing, expected):
    memory = Memory(device, free_bytes=1000 * 64, total_bytes=2000 * 64)
    monkeypatch.setattr(kv_cache, "memory_of", lambda device: memory)
    assert cache_bound(torch.device(device), 64, num_sharing) == expected


def test_out_of_memory_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(ValueError())
