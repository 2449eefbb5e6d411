"""Arrays written piece by piece, against numpy's own files."""

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from laserbatch.retrieval_pools.index.arrays import CHUNK_VALUES, ArrayWriter, map_array, read_chunks


@pytest.mark.parametrize("dtype", ["<i4", "<u2", "|u1"])
@pytest.mark.parametrize("length", [0, 1, 1000, CHUNK_VALUES, 2 * CHUNK_VALUES + 3])
def test_pieces_give_the_file_of_the_whole(tmp_path, dtype, length):
    values = (np.arange(length) % 250).astype(dtype)
    np.save(tmp_path / "whole.npy", values)
    with ArrayWriter(tmp_path / "pieces.npy", dtype) as writer:
        for place in range(0, length, 777_777):
            writer.write(values[place : place + 777_777])
    assert (tmp_path / "pieces.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    read = [values[:0], *read_chunks(tmp_path / "pieces.npy")]
    assert np.array_equal(np.concatenate(read), values) and max(map(len, read)) <= CHUNK_VALUES
    mapped = map_array(tmp_path / "pieces.npy")
    assert np.array_equal(mapped, values) and mapped.dtype == dtype and not mapped.flags.writeable


def test_a_header_that_was_changed_is_a_fault_of_the_file(tmp_path):
    np.save(tmp_path / "array.npy", np.arange(10))
    content = (tmp_path / "array.npy").read_bytes()
    (tmp_path / "array.npy").write_bytes(content.replace(b"}", b"{"))
    with pytest.raises(ValueError, match="header cannot be read"):
        map_array(tmp_path / "array.npy")


class _Collected:
    """Garbage whose finaliser runs Python and lets another thread run."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0)


def test_several_threads_may_map_arrays_at_once(tmp_path):
    np.save(tmp_path / "array.npy", np.arange(10))

    def map_many(_) -> int:
        for _ in range(300):
            _Collected()
            array = map_array(tmp_path / "array.npy")
        return len(array)

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(5, 2, 2)
    try:
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(map_many, range(4))) == [10] * 4
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
