"""Arrays written piece by piece, against numpy's own files."""

import numpy as np
import pytest

from retrieval_pools.array_files import CHUNK_VALUES, ArrayWriter, map_array, read_chunks


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
