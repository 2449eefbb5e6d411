"""The columns of a table's files in plain types, without the rows of entities created after a day."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables import columns as roles
from laserbatch.pipeline.tables.findings import FaultyTable, Finding, Findings
from laserbatch.pipeline.tables.parts import BATCH_ROWS, TablePart, table_parts
from laserbatch.pipeline.tables.schema import CREATED_AT, timestamps, widened
from laserbatch.pipeline.tables.times import require_units
from laserbatch.retrieval_pools.ids import MAX_BYTES
from laserbatch.retrieval_pools.mapped import MappedFiles

BYTES_AT_ONCE = 32 * 1024 * 1024  # of columns that are read together, so that a file is not opened for each
MAX_BLOCKS = 64  # of columns that are read together; each is a mapped file, and a process may have 1,024 files open
MIN_VALUE_BYTES = 16  # of a value in memory, whose encoded form may be smaller
ColumnT = TypeVar("ColumnT", pa.Array, pa.ChunkedArray)


def open_parts(path: Path, table: str, note: Callable[[Finding], object] = lambda finding: None) -> list[TablePart]:
    """The files of a table, with their units; `note` as in `require_units`. Raises FaultyTable for a faulty schema."""
    parts = table_parts(path, table)
    for part in parts:
        for finding in roles.schema_findings(table, part.name, part.schema):
            raise FaultyTable(finding)
    require_units(parts, note)
    return parts


def names_in(parts: Sequence[TablePart], is_read: Callable[[str], bool]) -> list[str]:
    """Names of columns that `is_read` accepts and any of the files has, each once."""
    return list(dict.fromkeys(name for part in parts for name in part.schema.names if is_read(name)))


def _created_before(part: TablePart, cutoff: pa.Scalar | None) -> pa.Array | None:
    """The rows of a file of users or items that were created before `cutoff`, as a mask; None if all were."""
    if cutoff is None or CREATED_AT not in part.schema.names or pt.is_null(part.schema.field(CREATED_AT).type):
        return None
    times = part.read([CREATED_AT])[CREATED_AT]
    require_times(part, CREATED_AT, times)
    with part.naming_errors():
        is_read = pc.fill_null(pc.less(timestamps(times), cutoff), True)
        return None if pc.all(is_read, min_count=0).as_py() else is_read.combine_chunks()


def require_times(part: TablePart, column: str, values: pa.ChunkedArray | pa.Array) -> None:
    """Refuse times out of range, before the cut by date drops or keeps their rows."""
    if pt.is_null(values.type):
        return
    ends = pc.min_max(values)
    if pc.any(roles.out_of_range(pa.array([ends["min"], ends["max"]], values.type))).as_py():
        findings, of_file = Findings(), part.read([column])[column]
        for rule in roles.IN_RANGE:
            rule.check(part.table, column, part.name, 0, of_file.combine_chunks(), findings)
        raise FaultyTable(findings.to_list()[0])


def plain_kinds(parts: Sequence[TablePart], names: Collection[str]) -> dict[str, pa.DataType]:
    """The plain type of each column in all files; null if no file has a value. Raises TableError if files differ."""
    schemas = []
    for part in parts:
        fields = [field for field in part.schema if field.name in names]
        kinds = [_plain(part, field.name, pa.chunked_array([], field.type)).type for field in fields]
        schemas.append(pa.schema([(field.name, kind) for field, kind in zip(fields, kinds, strict=True)]))
    with _files_alike(parts[0]):
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    return {name: schema.field(name).type for name in names}


def _plain(part: TablePart, name: str, values: ColumnT, kind: pa.DataType | None = None) -> ColumnT:
    """Values of a column in the plain type that it has in their file, or in all files (`plain_kinds`)."""
    values = (roles.role_of(part.table, name) or roles.ATTRIBUTE).plain(values)
    if kind is None:
        return values
    with _files_alike(part):
        return widened(values, kind).cast(kind)


def plain_batches(
    part: TablePart, kinds: Mapping[str, pa.DataType], batch_size: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The rows of a file of interactions, with columns in types of `plain_kinds`; nulls for a column that it lacks."""
    with part.naming_errors():
        for rows in part.batches({*kinds, "timestamp"}, batch_size):
            require_times(part, "timestamp", rows["timestamp"])
            columns = {}
            for name, kind in kinds.items():
                is_there = name in rows.schema.names
                columns[name] = _plain(part, name, rows[name], kind) if is_there else pa.nulls(rows.num_rows, kind)
            yield pa.record_batch(columns)


def read_columns(parts: Sequence[TablePart], names: Sequence[str], masks: Sequence[pa.Array | None]) -> pa.Table:
    """Some columns of the rows in each file's mask in their plain types; text if no file has a value."""
    kinds, of_parts = plain_kinds(parts, names), []
    kinds = {name: pa.string() if pt.is_null(kind) else kind for name, kind in kinds.items()}
    for part, mask in zip(parts, masks, strict=True):
        columns = part.read(names, mask)
        with part.naming_errors():
            for name, values in columns.items():
                if roles.role_of(part.table, name) in (roles.TIME, roles.CREATED):
                    require_times(part, name, values)
                columns[name] = _plain(part, name, values, kinds[name])
        of_parts.append(pa.table(columns))
    return pa.concat_tables(of_parts)


def _blocks(parts: Sequence[TablePart], names: Sequence[str]) -> Iterator[list[str]]:
    """Columns that are read together: about `BYTES_AT_ONCE`, or more if there would be more than `MAX_BLOCKS`."""
    num_bytes = dict.fromkeys(names, MIN_VALUE_BYTES * sum(part.metadata.num_rows for part in parts))
    for part in parts:
        for group in map(part.metadata.row_group, range(part.metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                path = column.path_in_schema  # of a list `name.list.element`
                name = path if path in num_bytes else path.partition(".")[0]
                if name in num_bytes:
                    num_bytes[name] += column.total_uncompressed_size
    at_once, block, filled = max(BYTES_AT_ONCE, 2 * sum(num_bytes.values()) // MAX_BLOCKS), list[str](), 0
    for name in names:
        if block and filled + num_bytes[name] > at_once:
            yield block
            block, filled = [], 0
        block.append(name)
        filled += num_bytes[name]
    yield block


@contextmanager
def _files_alike(part: TablePart) -> Iterator[None]:
    """Turn errors of Arrow in the block into a TableError: files differ in a type."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TableError(
            f"table {part.table}: its files differ in the type of a column: {error}. Write the column with one type."
        ) from None


def read_table(path: Path, name: str, cutoff: pa.Scalar | None, files: MappedFiles | None = None) -> pa.Table:
    """The users or items created before `cutoff` (None: all), in mapped `files` or in memory.

    Text of more than 2 GiB in a column is of large strings, or lists of them.
    """
    parts, columns = open_parts(path, name), {}
    masks = [_created_before(part, cutoff) for part in parts]
    for block in _blocks(parts, names_in(parts, lambda column: roles.role_of(name, column) is not None)):
        stored = read_columns(parts, block, masks).columns
        large = (column.cast(_large(column.type)) if column.nbytes > MAX_BYTES else column for column in stored)
        values = pa.table([column.combine_chunks() for column in large], names=block)
        values = values if files is None else files.table(values)
        columns |= dict(zip(block, values.columns, strict=True))
        del values, stored
        pa.default_memory_pool().release_unused()
    return pa.table(columns)


def _large(kind: pa.DataType) -> pa.DataType:
    if pt.is_list(kind):
        return pa.list_(_large(kind.value_type))
    return pa.large_string() if pt.is_string(kind) else kind
