"""Reading and writing Parquet files: whole or absent, the same bytes for the same rows, errors that name the file."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from laserbatch.pipeline.errors import WorkspaceError, first_line
from laserbatch.pipeline.storage.atomic import atomic_path, sha256_file

ROW_GROUP_ROWS = 16 * 1024  # few enough that a column of a group stays below the 2 GiB of `string` and `list`
_COMPRESSION, _LEVEL = "zstd", 3


@dataclass(frozen=True)
class WrittenFile:
    """A Parquet file on disk."""

    path: Path
    num_rows: int
    sha256: str  # hex digest of its contents


def write_parquet(
    rows: pa.Table | pa.RecordBatchReader | Iterable[pa.Table | pa.RecordBatch],
    path: Path | str,
    schema: pa.Schema | None = None,
) -> WrittenFile:
    """Write rows atomically. Equal rows give equal bytes, however they are cut into pieces.

    At most three row groups of pieces are in memory; unless `rows` is a table, a thread makes the next group while one
    is written. `schema` is the file's schema with its metadata; None: the schema of `rows`, which must then be a table
    or a reader.
    """
    path, num_rows = Path(path), 0
    if schema is None:
        described: Any = rows  # a table or a reader
        schema = described.schema
    groups = _row_groups([rows], schema) if isinstance(rows, pa.Table) else _ahead(_row_groups(rows, schema))
    with atomic_path(path) as temporary:
        with pq.ParquetWriter(temporary, schema, write_page_checksum=True, **_encodings(schema)) as writer:
            for group in groups:
                writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
                num_rows += group.num_rows
        return WrittenFile(path, num_rows, sha256_file(temporary))


def _encodings(schema: pa.Schema) -> dict:
    """The options for writing columns. Vectors are not packed: it saves 6 % of their size and doubles the time."""
    if not any(pa.types.is_fixed_size_list(kind) for kind in schema.types):
        return {"compression": _COMPRESSION, "compression_level": _LEVEL}
    packed = [field.name for field in schema if not pa.types.is_nested(field.type)]
    return {
        "compression": dict.fromkeys(packed, _COMPRESSION),
        "compression_level": dict.fromkeys(packed, _LEVEL),
        "use_dictionary": packed,
        "write_statistics": packed,
    }


def _ahead(groups: Iterator[pa.Table]) -> Iterator[pa.Table]:
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, groups, None)
        while (group := coming.result()) is not None:
            coming = thread.submit(next, groups, None)
            yield group


def _row_groups(pieces: Iterable[pa.Table | pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    pending, num_rows = [schema.empty_table()], 0
    for piece in pieces:
        table = piece if isinstance(piece, pa.Table) else pa.Table.from_batches([piece])
        pending.append(table.select(schema.names).cast(schema))
        num_rows += table.num_rows
        if num_rows >= ROW_GROUP_ROWS:
            rows = pa.concat_tables(pending)
            while rows.num_rows >= ROW_GROUP_ROWS:
                yield rows.slice(0, ROW_GROUP_ROWS).combine_chunks()
                rows = rows.slice(ROW_GROUP_ROWS)
            pending, num_rows = [rows], rows.num_rows
    if num_rows:
        yield pa.concat_tables(pending).combine_chunks()


def as_large(table: pa.Table) -> pa.Table:
    """The table as one chunk, with text and lists in types not limited to 2 GiB per column, so that `take` is safe.

    `write_parquet` converts rows that were taken from it back to a file's ordinary types.
    """
    columns = {name: table[name].cast(large_type(table[name].type)) for name in table.column_names}
    return pa.table(columns).combine_chunks()


def large_type(kind: pa.DataType) -> pa.DataType:
    """The type for the same values that is not limited to 2 GiB."""
    if pa.types.is_list(kind):
        return pa.large_list(kind.value_type)
    return pa.large_string() if pa.types.is_string(kind) else kind


def read_parquet(path: Path | str, columns: Sequence[str] | None = None, schema: pa.Schema | None = None) -> pa.Table:
    """Read one Parquet file, or a folder's `*.parquet` files in name order as one table.

    `schema` is the schema of the empty table to return if there are no files; None makes that an error. Raises
    WorkspaceError, which names the file, if one is damaged or lacks a column.
    """
    path = Path(path)
    files = parquet_files(path)
    if not files:
        if schema is None:
            raise WorkspaceError(f"{path} is missing; expected a Parquet file, or a folder of them. Check the path.")
        return (schema if columns is None else pa.schema([schema.field(name) for name in columns])).empty_table()
    tables = [_read_file(file, columns) for file in files]
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise WorkspaceError(f"{path}: its files differ in their columns: {error}. Write them again.") from None


def iter_parquet(
    path: Path | str, columns: Sequence[str] | None = None, row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that `read_parquet` returns in batches, at most one row group in memory; no batch without files.

    `row_groups` are the numbers of the row groups to read from each file; None: all.
    """
    path, first = Path(path), None
    for file in parquet_files(path):
        with _opened(file, columns or ()) as opened:
            first = first or (file, opened.schema_arrow)
            if columns is None and not opened.schema_arrow.equals(first[1]):
                schemas = (opened.schema_arrow, first[1])
                names, expected = (", ".join(f"{field.name} {field.type}" for field in schema) for schema in schemas)
                raise WorkspaceError(
                    f"{file} has the columns {names}, but {first[0].name} next to it has {expected}. Write the files "
                    "of a folder with the same columns."
                )
            yield from opened.iter_batches(columns=columns, batch_size=ROW_GROUP_ROWS, row_groups=row_groups)


def iter_range(path: Path, start: int, stop: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield rows `start` to `stop` of a file in batches; only the row groups that hold them are read."""
    with _opened(path, columns) as file:
        starts = _group_starts(file)
        groups = np.flatnonzero((starts[:-1] < stop) & (starts[1:] > start)).tolist()
        first = int(starts[groups[0]]) if groups else 0
        for batch in file.iter_batches(columns=columns, batch_size=ROW_GROUP_ROWS, row_groups=groups):
            selected = slice(max(start - first, 0), min(stop - first, batch.num_rows))
            if selected.start < selected.stop:
                yield batch.slice(selected.start, selected.stop - selected.start)
            first += batch.num_rows


def parquet_files(path: Path) -> list[Path]:
    """The file itself, or the `*.parquet` files of a folder in name order; empty if nothing is there."""
    return [path] if path.is_file() else sorted(path.glob("*.parquet"))


def num_rows_of(path: Path) -> int:
    """The number of rows of a file. Raises WorkspaceError, which names it, if it is damaged or missing."""
    with _opened(path, ()) as file:
        return file.metadata.num_rows


def read_rows(path: Path, rows: np.ndarray, columns: Sequence[str]) -> pa.Table:
    """The rows of a file with the numbers `rows`, int64[n], ascending; only the row groups that hold them are read."""
    with _opened(path, columns) as file:
        starts = _group_starts(file)
        group_of = np.searchsorted(starts[1:], rows, side="right")
        return pa.concat_tables(
            file.read_row_group(number, columns=columns).take(rows[group_of == number] - starts[number])
            for number in np.unique(group_of).tolist()
        )


def _group_starts(file: pq.ParquetFile) -> np.ndarray:
    """The first row of each row group, and the number of all rows: int64[num_row_groups + 1]."""
    groups = range(file.num_row_groups)
    return np.cumsum([0, *(file.metadata.row_group(number).num_rows for number in groups)])


def _read_file(path: Path, columns: Sequence[str] | None) -> pa.Table:
    with _opened(path, columns or ()) as file:
        # By row group: one chunk of a column of lists cannot hold more than 2^31 values.
        groups = [file.read_row_group(number, columns=columns) for number in range(file.num_row_groups)]
        return pa.concat_tables(groups) if groups else file.read(columns=columns)


@contextmanager
def _opened(path: Path, columns: Sequence[str]) -> Iterator[pq.ParquetFile]:
    """Open a file to read in the block; raises WorkspaceError, which names it, if it is damaged or lacks a column."""
    try:
        # ParquetFile, not read_table: the latter reads `date=...` in a folder's name as a partition column.
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if missing := [name for name in columns if name not in names]:
                found = f"it has {', '.join(names)}"
                raise WorkspaceError(f"{path} lacks the column {missing[0]!r}; {found}. Write it again.")
            yield file
    except (pa.ArrowException, OSError) as error:
        raise WorkspaceError(
            f"{path} is damaged or not a Parquet file: {first_line(error)}. Restore it from a copy, or remove it: the "
            "next night writes again what only this file had."
        ) from None
