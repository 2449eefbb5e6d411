"""Parquet files in and out: whole or absent, the same bytes for the same rows, errors that name the file."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.errors import WorkspaceError, first_line
from laserbatch.pipeline.storage.atomic import atomic_path, sha256_file

ROW_GROUP_ROWS = 16 * 1024  # few enough that a column of them stays below the 2 GiB which `string` and `list` can hold
_WRITER_OPTIONS = {"compression": "zstd", "compression_level": 3, "write_page_checksum": True}


@dataclass(frozen=True)
class WrittenFile:
    """A Parquet file as it lies on disk."""

    path: Path
    num_rows: int
    num_bytes: int
    sha256: str  # hex digest of its contents


def write_parquet(
    rows: pa.Table | pa.RecordBatchReader | Iterable[pa.Table], path: Path | str, schema: pa.Schema | None = None
) -> WrittenFile:
    """Write rows atomically. Equal rows give equal bytes, however they are chunked in memory.

    Parameters
    ----------
    rows : a table, or pieces of one, of which two row groups at most are held in memory.
    path : the file to create or replace; its folder is created.
    schema : of the file, its metadata is kept; None: that of `rows`, which is a table or a reader then.
    """
    with parquet_stream(path, schema or rows.schema) as stream:
        for piece in [rows] if isinstance(rows, pa.Table) else rows:
            stream.write(piece)
    return stream.written


class ParquetStream:
    """A Parquet file that is being written piece by piece; pieces are regrouped into row groups of one size.

    So the bytes depend on the rows alone, not on how they were cut when handed over. `written` is there at the end.
    """

    written: WrittenFile

    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._writer, self._schema = writer, schema
        self._pending = schema.empty_table()
        self.num_rows = 0

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows of the stream's schema."""
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        self.num_rows += table.num_rows
        self._pending = pa.concat_tables([self._pending, table.select(self._schema.names).cast(self._schema)])
        self._write_groups(ROW_GROUP_ROWS)

    def _write_groups(self, least_rows: int) -> None:
        while self._pending.num_rows >= least_rows:
            group = self._pending.slice(0, ROW_GROUP_ROWS).combine_chunks()
            self._writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
            self._pending = self._pending.slice(ROW_GROUP_ROWS)


@contextmanager
def parquet_stream(path: Path | str, schema: pa.Schema) -> Iterator[ParquetStream]:
    """Write a table that does not fit in memory: `with parquet_stream(path, schema) as stream: stream.write(rows)`.

    The file appears when the block ends without an error. At most two row groups are held in memory.
    """
    path = Path(path)
    with atomic_path(path) as temporary:
        with pq.ParquetWriter(temporary, schema, **_WRITER_OPTIONS) as writer:
            stream = ParquetStream(writer, schema)
            yield stream
            stream._write_groups(least_rows=1)
        stream.written = WrittenFile(path, stream.num_rows, temporary.stat().st_size, sha256_file(temporary))


def as_large(table: pa.Table) -> pa.Table:
    """The table with text and lists of types that are not limited to 2 GiB a column, as one chunk: `take` is then safe.

    `write_parquet` writes slices that were taken from it in a file's ordinary types again.
    """
    columns = {name: table[name].cast(_large_type(table[name].type)) for name in table.column_names}
    return pa.table(columns).combine_chunks()


def _large_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.large_list(kind.value_type)
    return pa.large_string() if pa.types.is_string(kind) else kind


def in_order_of(table: pa.Table, column: str) -> Iterator[pa.Table]:
    """The rows of a table in the order of a column, some at a time."""
    order, large = pc.sort_indices(table[column]), as_large(table)
    for start in range(0, len(order), ROW_GROUP_ROWS):
        yield large.take(order.slice(start, ROW_GROUP_ROWS))


def read_parquet(path: Path | str, columns: Sequence[str] | None = None, schema: pa.Schema | None = None) -> pa.Table:
    """Read one Parquet file, or a folder's `*.parquet` files in name order as one table.

    Parameters
    ----------
    path : a file, or a folder.
    columns : the columns to read; None reads all.
    schema : of the empty table to return when there are no files; None makes that an error.

    Raises
    ------
    WorkspaceError
        Nothing is there, a file is damaged, or lacks a column; the message names the file.
    """
    path = Path(path)
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path] if path.exists() else []
    if not files:
        if schema is None:
            raise WorkspaceError(f"{path} is missing; expected a Parquet file, or a folder of them. Check the path.")
        return (schema if columns is None else pa.schema([schema.field(name) for name in columns])).empty_table()
    tables = [_read_file(file, columns) for file in files]
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise WorkspaceError(f"the files of {path} differ in their columns: {error}. Write them again.") from None


def iter_parquet(path: Path | str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows that `read_parquet` gives, in batches: one row group at most is in memory.

    A folder that is not there has no rows.

    Raises
    ------
    WorkspaceError
        A file is damaged, or lacks a column; the message names the file. No file gives no batch.
    """
    path = Path(path)
    for file in [path] if path.is_file() else sorted(path.glob("*.parquet")):
        with _opened(file, columns or ()) as opened:
            try:
                yield from opened.iter_batches(columns=columns, batch_size=ROW_GROUP_ROWS)
            except (pa.ArrowException, OSError) as error:
                raise _damaged(file, error) from None


def _read_file(path: Path, columns: Sequence[str] | None) -> pa.Table:
    with _opened(path, columns or ()) as file:
        try:
            # By row group: lists of one column in one chunk could not hold more than 2^31 values.
            groups = [file.read_row_group(number, columns=columns) for number in range(file.num_row_groups)]
            return pa.concat_tables(groups) if groups else file.read(columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error) from None


@contextmanager
def _opened(path: Path, columns: Sequence[str]) -> Iterator[pq.ParquetFile]:
    # ParquetFile, not read_table: the latter reads `date=...` in a folder's name as a partition column.
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from None
    with file:
        names = file.schema_arrow.names
        missing = [name for name in columns if name not in names]
        if missing:
            raise WorkspaceError(f"{path} lacks the column {missing[0]!r}; it has {', '.join(names)}. Write it again.")
        yield file


def _damaged(path: Path, error: Exception) -> WorkspaceError:
    return WorkspaceError(
        f"{path} is damaged or not a Parquet file: {first_line(error)}. Restore it from a copy, or take it away: the "
        "next night writes again what only it held."
    )
