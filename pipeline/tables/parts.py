"""The Parquet files of a table, read with the columns in the names of their folders (Hive partitions).

A column that is both in a file and in the name of its folder must have one value there. `layout.py` lists folders.
"""

import datetime
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.tables.fetched import shown_path
from laserbatch.pipeline.tables.findings import FaultyTable, Finding, shown_value
from laserbatch.pipeline.tables.layout import ListedFile

BATCH_ROWS = 64 * 1024
SMALL_ROWS = 4096  # with fewer rows, starting threads takes longer than reading them in one
_INTEGER, _NUMBER = re.compile(r"-?(0|[1-9][0-9]*)"), re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")


@dataclass(frozen=True)
class TablePart:
    """One file of a table. `partitions`: the value of each column in the names of its folders."""

    path: Path
    table: str
    partitions: dict[str, pa.Scalar]

    def name_in(self, root: Path) -> str:
        """The file's path within the folder of the tables; a current version (`versioned.py`) counts as lying in it."""
        return self.path.relative_to(root if self.path.is_relative_to(root) else self.path.parents[1]).as_posix()

    def schema(self) -> pa.Schema:
        """The columns of the file, followed by those of its folders."""
        return self.schema_of(pq.read_schema(self.path))

    def open(self, metadata: pq.FileMetaData | None = None) -> "PartFile":
        """Open the file for reading; `metadata` is what an earlier `PartFile` has read."""
        file = pq.ParquetFile(
            self.path,
            metadata=metadata,
            pre_buffer=False,  # Arrow would keep what it reads ahead in memory until the whole file has been read
            page_checksum_verification=True,
            coerce_int96_timestamp_unit="us",  # as nanoseconds, 9999-12-31 of Spark would wrap around to 1816
        )
        return PartFile(self, file)

    def with_partitions(self, rows: pa.RecordBatch, first_row: int, names: Sequence[str]) -> pa.RecordBatch:
        """Rows of the file, which begin at `first_row`, with the columns `names`, also those of its folders.

        Raises FaultyTable if a column has another value in the file than in the name of its folder.
        """
        if not self.partitions:
            return rows
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        for name, value in self.partitions.items():
            if name in columns:
                self._require_equal(name, columns[name], first_row)
            elif name in names:
                columns[name] = _repeated(value, rows.num_rows)
        fields = self.schema_of(rows.schema)
        return pa.record_batch([columns[name] for name in names], schema=pa.schema([fields.field(n) for n in names]))

    def schema_of(self, schema: pa.Schema) -> pa.Schema:
        """The columns of a file, followed by those of its folders that it does not have itself."""
        for name, value in self.partitions.items():
            if name not in schema.names:
                schema = schema.append(pa.field(name, value.type))
        return schema

    def _require_equal(self, name: str, values: pa.Array, first_row: int) -> None:
        expected = self.partitions[name]
        plain = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
        try:
            is_equal = pc.equal(plain, expected.cast(plain.type)) if expected.is_valid else pc.is_null(plain)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            is_equal = pa.nulls(len(plain), pa.bool_())
        is_equal = pc.fill_null(is_equal, False)
        if not pc.all(is_equal, min_count=0).as_py():
            row = pc.index(is_equal, False).as_py()
            found, shown = "the row's value differs from the name of its folder:", repr(shown_value(expected))
            advice = "rename the folder, or drop the column from the file"
            place = name, shown_path(self.path), first_row + row, shown_value(plain[row])
            raise FaultyTable(Finding("partition-differs", self.table, found, shown, advice, *place, num_rows=1))


class PartFile:
    """An open Parquet file of a table, to be closed: like `pq.ParquetFile`, with the columns of its folders."""

    def __init__(self, part: TablePart, file: pq.ParquetFile) -> None:
        self._part, self._file, self.path = part, file, part.path
        self.metadata: pq.FileMetaData = file.metadata
        schema = file.schema_arrow  # made anew by each access
        self.schema_arrow = part.schema_of(schema)
        self.doubled = frozenset(schema.names) & part.partitions.keys()  # in the file and in folder names

    def __enter__(self) -> "PartFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def reopened(self) -> "PartFile":
        """The file, open again after it was closed; its metadata is not read again."""
        return self._part.open(self.metadata)

    def iter_batches(
        self, batch_size: int = BATCH_ROWS, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of the file, with all columns or some."""
        if not self._part.partitions:
            yield from self._stored_batches(batch_size, columns)
            return
        names, first_row = self.schema_arrow.names if columns is None else list(columns), 0
        in_file = self._file.schema_arrow.names
        # A batch without columns has no rows, so the first column is read for their number.
        read = [name for name in names if name in in_file] or in_file[:1]
        for rows in self._stored_batches(batch_size, read):
            yield self._part.with_partitions(rows, first_row, names)
            first_row += rows.num_rows

    def _stored_batches(self, batch_size: int, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """The rows in batches that become smaller where a list column has more than 2 GiB, which Arrow cannot read."""
        num_read, is_large = 0, self.metadata.num_rows > SMALL_ROWS
        while True:
            try:
                first_row = 0
                for rows in self._file.iter_batches(batch_size, columns=columns, use_threads=is_large):
                    num_old = min(max(num_read - first_row, 0), rows.num_rows)
                    first_row += rows.num_rows
                    if num_old < rows.num_rows:
                        num_read = first_row
                        yield rows.slice(num_old)
                return
            except pa.ArrowNotImplementedError:
                if batch_size == 1:
                    raise
                batch_size //= 2

    def read(self, name: str) -> pa.ChunkedArray:
        # Arrow reads no lists with more than 2 GiB of text at once.
        is_nested = pa.types.is_nested(self.schema_arrow.field(name).type)
        if name not in self._part.partitions and not is_nested:
            return self._file.read([name])[name]
        if name in self.doubled or is_nested:
            batches = [batch.column(0) for batch in self.iter_batches(columns=[name])]
        else:
            starts, value = range(0, self.metadata.num_rows, BATCH_ROWS), self._part.partitions[name]
            batches = [_repeated(value, min(BATCH_ROWS, self.metadata.num_rows - start)) for start in starts]
        return pa.chunked_array(batches, self.schema_arrow.field(name).type)


def typed_parts(files: Sequence[ListedFile], table: str, as_text: bool = False) -> list[TablePart]:
    """The files of a table as parts. A partition column has the same type in all of them; text if `as_text`."""
    texts: dict[str, list[str]] = {}
    for file in files:
        for name, text in file.partitions.items():
            texts.setdefault(name, []).extend([] if text is None else [text])
    kinds = {name: pa.string() if as_text else partition_type(of_name) for name, of_name in texts.items()}

    def typed(texts: dict[str, str | None]) -> dict[str, pa.Scalar]:
        return {name: pa.scalar(text, pa.string()).cast(kinds[name]) for name, text in texts.items()}

    return [TablePart(file.path, table, typed(file.partitions)) for file in files]


def partition_type(texts: Sequence[str]) -> pa.DataType:
    """The type of a partition column: a number or a day only if no value loses a character by it, otherwise text."""
    if texts and all(_INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63 for text in texts):
        return pa.int64() if all(str(int(text)) == text for text in texts) else pa.string()
    if texts and all(_NUMBER.fullmatch(text) and repr(float(text)) in (text, f"{text}.0") for text in texts):
        return pa.float64()
    return pa.date32() if texts and all(map(_is_day, texts)) else pa.string()


def _repeated(value: pa.Scalar, num_rows: int) -> pa.Array:
    return pa.repeat(value, num_rows) if value.is_valid else pa.nulls(num_rows, value.type)


def _is_day(text: str) -> bool:
    with suppress(ValueError):
        return datetime.date.fromisoformat(text).isoformat() == text
    return False
