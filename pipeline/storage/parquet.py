"""Parquet files in and out: whole or absent, the same bytes for the same rows, errors that name the file.

Knows nothing of which tables there are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import WorkspaceError
from pipeline.storage.atomic import atomic_path, sha256_file

ROW_GROUP_ROWS = 128 * 1024
ROWS_AT_ONCE = 16 * 1024
_WRITER_OPTIONS = {"compression": "zstd", "compression_level": 3, "write_page_checksum": True}


@dataclass(frozen=True)
class WrittenFile:
    """A Parquet file as it lies on disk.

    Attributes
    ----------
    path : where it is.
    num_rows : rows in it.
    num_bytes : its size.
    sha256 : hex digest of its contents.
    """

    path: Path
    num_rows: int
    num_bytes: int
    sha256: str


def write_parquet(table: pa.Table, path: Path | str) -> WrittenFile:
    """Write a table atomically. Equal tables give equal bytes, however they are chunked in memory.

    Parameters
    ----------
    table : any schema; its metadata is kept.
    path : the file to create or replace; its folder is created.
    """
    path = Path(path)
    with atomic_path(path) as temporary:
        pq.write_table(table.combine_chunks(), temporary, row_group_size=ROW_GROUP_ROWS, **_WRITER_OPTIONS)
        written = WrittenFile(path, table.num_rows, temporary.stat().st_size, sha256_file(temporary))
    return written


class ParquetStream:
    """A Parquet file that is being written piece by piece; pieces are regrouped into row groups of one size.

    So the bytes depend on the rows alone, not on how they were cut when handed over.
    """

    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._writer, self._schema = writer, schema
        self._pending: list[pa.Table] = []
        self._num_pending = 0
        self.num_rows = 0

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows of the stream's schema."""
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        self._pending.append(table.select(self._schema.names).cast(self._schema))
        self._num_pending += table.num_rows
        self.num_rows += table.num_rows
        if self._num_pending >= ROW_GROUP_ROWS:
            self._write_groups(whole_only=True)

    def _write_groups(self, whole_only: bool) -> None:
        table = pa.concat_tables(self._pending) if self._pending else self._schema.empty_table()
        start = 0
        while table.num_rows - start >= ROW_GROUP_ROWS or (not whole_only and start < table.num_rows):
            group = table.slice(start, ROW_GROUP_ROWS).combine_chunks()
            self._writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
            start += group.num_rows
        rest = table.slice(start)
        self._pending, self._num_pending = [rest], rest.num_rows


@contextmanager
def parquet_stream(path: Path | str, schema: pa.Schema) -> Iterator[ParquetStream]:
    """Write a table that does not fit in memory: `with parquet_stream(path, schema) as stream: stream.write(rows)`.

    The file appears when the block ends without an error. At most two row groups are held in memory.
    """
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema, **_WRITER_OPTIONS) as writer:
        stream = ParquetStream(writer, schema)
        yield stream
        stream._write_groups(whole_only=False)


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


def iter_parquet(path: Path | str, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    """The rows that `read_parquet` gives, in batches: one row group at most is in memory.

    Batches of a file that has some of the `optional` columns have these too.

    Raises
    ------
    WorkspaceError
        A file is damaged, or lacks a column; the message names the file. No file gives no batch.
    """
    path = Path(path)
    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        with _opened(file, columns) as opened:
            try:
                there = [name for name in optional if name in opened.schema_arrow.names]
                yield from opened.iter_batches(columns=[*columns, *there], batch_size=ROWS_AT_ONCE)
            except (pa.ArrowException, OSError) as error:
                raise _damaged(file, error) from None


def _read_file(path: Path, columns: Sequence[str] | None) -> pa.Table:
    with _opened(path, columns or ()) as file:
        try:
            return file.read(columns=None if columns is None else list(columns))
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
        f"{path} is damaged or not a Parquet file: {_first_line(error)}. Restore it from a copy, or take it away: the "
        "next night writes again what only it held."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
