"""The columns of a table's files in plain types, without the rows of entities created after a day."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.columns import ATTRIBUTE, CREATED, IN_RANGE, TIME, role_of, schema_findings
from laserbatch.pipeline.tables.fetched import shown_path
from laserbatch.pipeline.tables.findings import FaultyTable, Finding, Findings, unreadable
from laserbatch.pipeline.tables.parts import BATCH_ROWS, TablePart
from laserbatch.pipeline.tables.schema import CREATED_AT, table_parts, time_scalar, widened
from laserbatch.pipeline.tables.times import in_unit, require_units
from laserbatch.retrieval_pools.ids import MAX_BYTES
from laserbatch.retrieval_pools.mapped import MappedFiles


@dataclass(frozen=True)
class OpenPart:
    """A file of a table. `mask`: the rows that `read` reads; None: all."""

    file: TablePart
    metadata: pq.FileMetaData
    schema: pa.Schema
    units: dict[str, str]  # by column, of integer times other than seconds
    mask: pa.Array | None = None

    def read(self, name: str) -> pa.ChunkedArray:
        """The rows of a column that are read, with times in their unit; nulls if the file does not have it."""
        if name not in self.schema.names:
            return pa.chunked_array([pa.nulls(self.metadata.num_rows if self.mask is None else self.mask.true_count)])
        with self.file.open(self.metadata) as opened:
            values = in_unit(opened.read(name), self.units.get(name, "s"))
        return values if self.mask is None else values.filter(self.mask)

    def batches(self, names: Collection[str], batch_size: int = BATCH_ROWS) -> Iterator[dict[str, pa.Array]]:
        """All rows of the file, whatever the mask, with the columns in `names` that it has."""
        with self.file.open(self.metadata) as opened:
            for batch in opened.iter_batches(batch_size, columns=[name for name in names if name in self.schema.names]):
                yield {name: in_unit(batch[name], self.units.get(name, "s")) for name in batch.schema.names}


def open_parts(path: Path, table: str, note: Callable[[Finding], object] = lambda finding: None) -> list[OpenPart]:
    """Open the files of a table; `note` as in `require_units`. Raises FaultyTable for a schema with faults."""
    files = table_parts(path, table)
    units = require_units(table, [file.path for file in files], note)
    parts = []
    for file in files:
        with naming_file(table, file.path), file.open() as opened:
            parts.append(OpenPart(file, opened.metadata, opened.schema_arrow, units))
            for finding in schema_findings(table, shown_path(file.path), opened.schema_arrow):
                raise FaultyTable(finding)
    return parts


def names_in(parts: list[OpenPart], is_read: Callable[[str], bool]) -> list[str]:
    """Names of columns that `is_read` accepts and any of the files has, each once."""
    return list(dict.fromkeys(name for part in parts for name in part.schema.names if is_read(name)))


def _cut(part: OpenPart, table: str, cutoff: pa.Scalar | None) -> OpenPart:
    """A file of users or items, without the rows created at or after `cutoff`."""
    if cutoff is None or CREATED_AT not in part.schema.names or pt.is_null(part.schema.field(CREATED_AT).type):
        return part
    with naming_file(table, part.file.path):
        times = part.read(CREATED_AT)
        require_times(table, part, CREATED_AT, times)
        is_read = pc.fill_null(pc.less(times, time_scalar(cutoff, times.type)), True)
        return part if pc.all(is_read, min_count=0).as_py() else replace(part, mask=is_read.combine_chunks())


def require_times(table: str, part: OpenPart, column: str, values: pa.ChunkedArray | pa.Array) -> None:
    """Refuse integers out of the range of seconds, before the cut by date drops or keeps their rows."""
    if pt.is_integer(values.type):
        ends = pa.array([*pc.min_max(values).as_py().values()], values.type)
        if pc.any(IN_RANGE.broken(ends)).as_py():
            findings, of_file = Findings(), replace(part, mask=None).read(column).combine_chunks()
            IN_RANGE.check(table, column, shown_path(part.file.path), 0, of_file, findings)
            raise FaultyTable(findings.to_list()[0])


def read_column(parts: list[OpenPart], table: str, name: str) -> pa.ChunkedArray:
    """A column of all files in its plain type; text if no file has a value."""
    values = []
    for part in parts:
        with naming_file(table, part.file.path):
            read = part.read(name)
            if role_of(table, name) in (TIME, CREATED):
                require_times(table, part, name, read)
            values.append(pa.table({name: (role_of(table, name) or ATTRIBUTE).plain(read)}))
    with files_alike(table):
        kind = pa.unify_schemas([part.schema for part in values], promote_options="permissive").field(name).type
        values = [part.set_column(0, name, widened(part[name], kind)) for part in values]
        column = pa.concat_tables(values, promote_options="permissive")[name]
    # Only now: a column without any value in one file takes its type from the others.
    return column.cast(pa.string()) if pt.is_null(column.type) else column


@contextmanager
def files_alike(table: str) -> Iterator[None]:
    """Turn errors of Arrow in the block into a TableError: files differ in a type."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TableError(
            f"table {table}: its files differ in the type of a column: {error}. Write the column with one type."
        ) from None


def read_table(path: Path, name: str, cutoff: pa.Scalar | None, files: MappedFiles | None = None) -> pa.Table:
    """The users or items created before `cutoff` (None: all), in mapped `files` or in memory.

    Text of more than 2 GiB in a column is of large strings, or lists of them.
    """
    parts = [_cut(part, name, cutoff) for part in open_parts(path, name)]
    columns = {}
    for column in names_in(parts, lambda column: role_of(name, column) is not None):
        values = pa.table({column: _in_one_chunk(read_column(parts, name, column))})
        columns[column] = (values if files is None else files.table(values))[column]
        del values
        pa.default_memory_pool().release_unused()
    return pa.table(columns)


def _in_one_chunk(values: pa.ChunkedArray) -> pa.Array:
    if values.nbytes > MAX_BYTES:
        values = values.cast(_large(values.type))
    return values.combine_chunks()


def _large(kind: pa.DataType) -> pa.DataType:
    if pt.is_list(kind):
        return pa.list_(_large(kind.value_type))
    return pa.large_string() if pt.is_string(kind) else kind


@contextmanager
def naming_file(table: str, file: Path) -> Iterator[None]:
    """Turn errors of Arrow or the disk in the block into a FaultyTable that names the file and its table."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise FaultyTable(unreadable(table, shown_path(file), error)) from None
