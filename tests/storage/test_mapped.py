import resource

import numpy as np
import pyarrow as pa
import pytest

from laserbatch.pipeline.storage.mapped import mapped_array, mapped_column

COLUMNS = {
    "text": (pa.string(), [["a", "", "bcd"], [], ["left out", "é", "f"]], pa.large_string()),
    "number": (pa.int64(), [[1, 2, 3], [], [0, 4, 5]], pa.int64()),
    "list": (pa.list_(pa.int32()), [[[1], [], [2, 3]], [], [[9, 9], [4], [5]]], pa.large_list(pa.int32())),
}


@pytest.mark.parametrize("kind, values, large", COLUMNS.values(), ids=COLUMNS)
def test_a_column_in_a_file_is_that_in_memory(tmp_path, kind, values, large):
    chunks = [pa.array(part, kind) for part in values]
    chunks[2] = chunks[2][1:]  # of a slice only its own values are written
    mapped, expected = mapped_column(chunks, tmp_path), pa.array([*values[0], *values[2][1:]], large)
    mapped.validate(full=True)
    assert mapped.equals(expected)
    assert mapped.equals(mapped_column(chunks, None))
    assert mapped.take(pa.array([4, None, 0])).equals(expected.take(pa.array([4, None, 0])))
    assert not list(tmp_path.iterdir())  # files without a name


@pytest.mark.parametrize("folder", ["a folder", None])
def test_no_chunks_make_an_empty_column(tmp_path, folder):
    folder = folder and tmp_path
    assert mapped_column([], folder).equals(pa.nulls(0))
    assert mapped_column([pa.array([], pa.string())], folder).equals(pa.array([], pa.large_string()))
    assert len(mapped_array(0, np.int64, folder)) == 0


def test_an_array_in_a_file_is_zero_until_it_is_written(tmp_path):
    array = mapped_array(1000, np.uint32, tmp_path)
    assert array.sum() == 0
    array[[3, 999]] = 7, 8
    assert array.sum() == 15
    assert not list(tmp_path.iterdir())


def test_a_file_that_has_no_room_is_an_error_before_it_is_used(tmp_path):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=tmp_path.name):
            mapped_array(1 << 20, np.uint32, tmp_path)
        with pytest.raises(OSError, match=tmp_path.name):
            mapped_column([pa.array(range(1 << 20))], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
