import resource

import numpy as np
import pyarrow as pa
import pytest

from laserbatch.pipeline.storage.mapped import mapped_column
from laserbatch.retrieval_pools.mapped import MappedFiles

COLUMNS = {
    "text": (pa.string(), [["a", "", "bcd"], [], ["left out", "é", "f"]], pa.large_string()),
    "number": (pa.int64(), [[1, 2, 3], [], [0, 4, 5]], pa.int64()),
    "list": (pa.list_(pa.int32()), [[[1], [], [2, 3]], [], [[9, 9], [4], [5]]], pa.large_list(pa.int32())),
}


@pytest.mark.parametrize("kind, values, large", COLUMNS.values(), ids=COLUMNS)
def test_a_column_in_a_file_is_that_in_memory(tmp_path, kind, values, large):
    chunks = [pa.array(part, kind) for part in values]
    chunks[2] = chunks[2][1:]  # only the values of the slice are written
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
    assert len(MappedFiles(folder).empty((0,), np.int64)) == 0


@pytest.mark.parametrize("folder", ["a folder", None])
def test_an_array_and_a_table_stay_what_they_are_when_their_memory_is_let_go(tmp_path, folder):
    files = MappedFiles(folder and tmp_path)
    array = files.empty((500, 2), np.uint32)
    array[:] = np.arange(1000).reshape(500, 2)
    table = pa.table({"id": ["a", None, "b"], "words": pa.array(["x", "y", "x"]).dictionary_encode()})
    mapped = files.table(table)
    files.release()
    assert array.tolist() == np.arange(1000).reshape(500, 2).tolist()
    assert mapped.equals(table)
    assert files.array(pa.array([1, None])).equals(pa.array([1, None]))
    assert not list(tmp_path.iterdir())  # files without a name


def test_a_file_that_has_no_room_is_an_error_before_it_is_used(tmp_path):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=tmp_path.name):
            MappedFiles(tmp_path).empty((1 << 20,), np.uint32)
        with pytest.raises(OSError, match=tmp_path.name):
            mapped_column([pa.array(range(1 << 20))], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
