"""Parquet files: rows are read as written, the bytes depend on the rows alone, and errors of damage name the file."""

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage import parquet as storage
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet

text = st.text(st.characters(exclude_categories=["Cs"]))
int64 = st.integers(-(2**63), 2**63 - 1)


def cut(table: pa.Table, points: list[int]) -> list[pa.Table]:
    bounds = [0, *sorted(min(point, table.num_rows) for point in points), table.num_rows]
    return [table.slice(start, end - start) for start, end in pairwise(bounds)]


@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(st.one_of(st.none(), text), int64, st.lists(text, max_size=3)), max_size=20),
    points=st.lists(st.integers(0, 20), max_size=4),
)
def test_rows_come_back_and_bytes_do_not_depend_on_chunks(tmp_path_factory, rows, points):
    folder = tmp_path_factory.mktemp("parquet")
    schema = pa.schema([("id", pa.string()), ("number", pa.int64()), ("path", pa.list_(pa.string()))])
    columns = list(zip(*rows, strict=True)) or [[], [], []]
    table = pa.Table.from_arrays(
        [pa.array(list(c), f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
    )
    chunked = pa.concat_tables(cut(table, points))
    whole = write_parquet(table, folder / "whole.parquet")
    assert read_parquet(whole.path).equals(table)
    assert write_parquet(chunked, folder / "chunked.parquet").sha256 == whole.sha256
    assert whole.num_rows == table.num_rows
    write_parquet(iter(cut(table, points)), folder / "stream.parquet", schema)
    assert read_parquet(folder / "stream.parquet").equals(table)


def test_stream_cuts_row_groups_by_count_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "ROW_GROUP_ROWS", 10)
    table = pa.table({"a": list(range(47))})
    for name, points in (("a", []), ("b", [3, 4, 25, 25, 40]), ("c", [10, 20, 30, 40])):
        write_parquet(iter(cut(table, points)), tmp_path / f"{name}.parquet", table.schema)
    contents = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(contents) == 1
    assert read_parquet(tmp_path / "a.parquet").equals(table)


def test_an_interrupted_stream_leaves_nothing(tmp_path):
    def pieces():
        yield pa.table({"a": [1]})
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_parquet(pieces(), tmp_path / "a.parquet", pa.schema([("a", pa.int64())]))
    assert not list(tmp_path.iterdir())


def test_a_folder_is_read_in_name_order(tmp_path):
    for number in (2, 0, 1):
        write_parquet(pa.table({"a": [number]}), tmp_path / f"{number:05d}.parquet")
    assert read_parquet(tmp_path)["a"].to_pylist() == [0, 1, 2]


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path):
    written = write_parquet(pa.table({"a": [1]}), tmp_path / "date=2025-03-01" / "a.parquet")
    assert read_parquet(written.path).column_names == ["a"]


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_damaged_file_is_named(tmp_path, keep):
    path = tmp_path / "knowledge.parquet"
    write_parquet(pa.table({"a": list(range(1000))}), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WorkspaceError, match=r"knowledge\.parquet is damaged"):
        read_parquet(path)


@pytest.mark.parametrize("position", [0.2, 0.5, 0.8])
def test_a_flipped_bit_is_noticed(tmp_path, position):
    path = tmp_path / "knowledge.parquet"
    write_parquet(pa.table({"a": [f"{number * 7919 % 1009}" for number in range(1000)]}), path)
    content = bytearray(path.read_bytes())
    content[int((len(content) - 800) * position)] ^= 4  # in the data pages, before the footer
    path.write_bytes(content)
    with pytest.raises(WorkspaceError, match=r"knowledge\.parquet is damaged"):
        read_parquet(path)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(WorkspaceError, match=r"b\.parquet is missing"):
        read_parquet(tmp_path / "b.parquet")
    write_parquet(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(WorkspaceError, match="lacks the column 'b'; it has a"):
        read_parquet(tmp_path / "a.parquet", columns=["b"])
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    assert read_parquet(tmp_path / "none", columns=["b"], schema=schema).schema.names == ["b"]
    write_parquet(pa.table({"a": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(WorkspaceError, match="differ in their columns"):
        read_parquet(tmp_path)
