"""The input tables as they were known at the end of a day, in plain types.

Only the columns and rows that are kept are read: the cut by date is applied while scanning. Faults of rows are
`check.py`'s.
"""

import datetime
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pyarrow.types as pt

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import sha256_file
from laserbatch.pipeline.tables.columns import (
    ATTRIBUTE,
    CREATED,
    EVENT,
    ID,
    IN_RANGE,
    TIME,
    role_of,
    schema_findings,
)
from laserbatch.pipeline.tables.database import QUERY_KEY
from laserbatch.pipeline.tables.fetched import shown_path
from laserbatch.pipeline.tables.findings import FaultyTable, Findings, unreadable
from laserbatch.pipeline.tables.layout import list_folder, name_left_out
from laserbatch.pipeline.tables.log import StoredLog
from laserbatch.pipeline.tables.order import alike, codes_of, equal_to_earlier, exact_copies, in_order, only_chunk
from laserbatch.pipeline.tables.parts import TablePart, dataset_of, typed_parts
from laserbatch.pipeline.tables.personal import personal_data
from laserbatch.pipeline.tables.schema import (
    CREATED_AT,
    ID_COLUMNS,
    REQUIRED_COLUMNS,
    TABLE_NAMES,
    TIMESTAMP_TYPE,
    id_type,
    list_table,
    plain_column,
    plain_ids,
    plain_type,
    require_seconds,
    table_parts,
    tables_folder,
    time_scalar,
)
from laserbatch.pipeline.tables.time_units import in_unit, require_units
from laserbatch.retrieval_pools.ids import rows_among
from laserbatch.retrieval_pools.mapped import MappedFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tables:
    """The three input tables in plain types: ids are string or int64, times timestamp[us, UTC]."""

    users: pa.Table  # in file order; items too
    items: pa.Table
    interactions: pa.Table  # sorted by time, user, item; ids are dictionaries, whose values ascend; a chunk a column
    scratch: MappedFiles = field(default_factory=lambda: MappedFiles(None))  # what they lie in
    logged_ids: dict[str, pa.ChunkedArray] = field(default_factory=dict)  # by column, of all rows of the log; null last
    num_copies: int = 0  # interactions that were left out as exact copies of another one
    personal: Mapping[Side, Mapping[str, str]] = field(default_factory=dict)  # as `personal_data` of whole tables

    def entities(self, side: Side) -> pa.Table:
        """The users or the items."""
        return self.users if side == "user" else self.items

    @property
    def scratch_folder(self) -> Path | None:
        """The folder of scratch files for what grows with the tables' rows; None: in memory."""
        return self.scratch.folder

    def coded(self, side: Side) -> tuple[np.ndarray, np.ndarray]:
        """Of each interaction the code of its user or item, int32[n]; and of each code the row of its entity, int32.

        The last code is that of no id; -1 is the row of who is not there. Raises TableError where ids differ in type.
        """
        ids = self.interactions[f"{side}_id"]
        ids = only_chunk(ids if pt.is_dictionary(ids.type) else ids.dictionary_encode())
        known = self.entities(side)[f"{side}_id"]
        if ids.dictionary.type != known.type and len(ids) and len(known):  # checks refuse such tables
            raise TableError(f"ids of interactions are {ids.dictionary.type}, those of {side}s {known.type}")
        rows = rows_among(ids.dictionary, known).astype(np.int32)
        return codes_of(ids), np.append(rows, np.int32(-1))

    def release_pages(self) -> None:
        """Let go of the memory of tables that lie in files, which are read again where they are needed."""
        self.scratch.release()


def read_tables(
    path: Path | str,
    as_of: datetime.date | None = None,
    scratch: Path | None = None,
    keep_duplicates: bool = False,
) -> Tables:
    """Read the tables of a folder, as known at the end of a day (UTC).

    Kept are entities created before its end or with no `created_at`, and interactions before it between such; without a
    day all. Of interactions that are equal in all read columns the first is kept, unless `keep_duplicates`; the
    number of the others is logged as a warning. The tables lie in files without a name in the folder `scratch`,
    mapped; None: in memory.
    Raises TableError where a table or column is missing, has a wrong type, or its file cannot be read.
    """
    path, cutoff = tables_folder(path), None if as_of is None else end_of_day(as_of)
    files = MappedFiles(scratch)
    users, items = (_read_table(path, table, cutoff, files) for table in ("users", "items"))
    log, logged_ids = _read_log(path, cutoff, files)
    # Who left the tables may stay in the log, and an interaction may precede its entity's own created_at.
    is_known = {}
    for name, entities in (("user_id", users), ("item_id", items)) if cutoff is not None else ():
        if log.dictionary(name).type == entities[name].type:  # else they cannot be compared, as checks say
            is_known[name] = np.append(rows_among(log.dictionary(name), entities[name]) >= 0, False)
    num_left = num_copies = 0
    rows = log.rows()
    for block in in_order(rows, MappedFiles(scratch)):
        is_left = np.ones(len(block["timestamp"]), bool) if keep_duplicates else ~exact_copies(block)
        num_copies += int(np.count_nonzero(~is_left))
        for name, of_codes in is_known.items():
            is_left &= of_codes[block[name]]
        part = slice(num_left, num_left := num_left + int(np.count_nonzero(is_left)))
        for name, values in block.items():
            rows[name][part] = values[is_left]
    _warn_of_copies(num_copies, log.num_rows)
    return Tables(
        users, items, log.to_table(num_left), files, logged_ids, num_copies, personal=personal_data(users, items)
    )


def end_of_day(date: datetime.date) -> pa.Scalar:
    """The moment at which a day (UTC) is over."""
    midnight = datetime.datetime.combine(date, datetime.time(), datetime.UTC)
    return pa.scalar(midnight + datetime.timedelta(days=1), TIMESTAMP_TYPE)


@dataclass(frozen=True)
class OpenInteractions:
    """Interactions of a folder, left in their files and streamed, without exact copies unless they are to be kept."""

    folder: Path
    files: ds.Dataset
    keeps_duplicates: bool
    units: dict[str, str]  # of integer times that are no seconds
    copies: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)  # which rows are, by the columns compared

    @property
    def schema(self) -> pa.Schema:
        """That of the first file, with integer times that are no seconds as timestamps."""
        fields = [
            field.with_type(pa.timestamp(self.units[field.name], tz="UTC")) if field.name in self.units else field
            for field in self.files.schema
        ]
        return pa.schema(fields)

    def count_rows(self) -> int:
        """Rows in the files, copies too."""
        return self.files.count_rows()

    def to_batches(self, columns: Collection[str], **options: int) -> Iterator[pa.RecordBatch]:
        """Columns of the rows in the order of their files; `options` as PyArrow's.

        A row that is equal to an earlier one in what `read_tables` reads, and in `columns`, is left out.
        """
        is_copy, first_row = self._copies(tuple(sorted(columns))), 0
        for batch in self.files.to_batches(columns=list(columns), **options):
            for name, unit in self.units.items():
                if name in batch.schema.names:
                    batch = batch.set_column(batch.schema.names.index(name), name, in_unit(batch[name], unit))
            part = slice(first_row, first_row := first_row + batch.num_rows)
            yield batch if is_copy is None or not is_copy[part].any() else batch.filter(pa.array(~is_copy[part]))

    def _copies(self, columns: tuple[str, ...]) -> np.ndarray | None:
        if self.keeps_duplicates:
            return None
        columns = tuple(name for name in columns if role_of("interactions", name) is None)
        if columns not in self.copies:
            self.copies[columns] = find_exact_copies(self.folder, columns)
            _warn_of_copies(int(np.count_nonzero(self.copies[columns])), len(self.copies[columns]))
        return self.copies[columns]


@dataclass(frozen=True)
class OpenTables:
    """Users and items read, and interactions left in their files, with all of their columns, to be streamed."""

    users: pa.Table
    items: pa.Table
    interactions: OpenInteractions


def open_tables(path: Path | str, keep_duplicates: bool = False) -> OpenTables:
    """The tables of a folder, of all days. Raises TableError as `read_tables` does.

    Files that are left out are named in the log, once a process.
    """
    path = tables_folder(path)
    users, items = (_read_table(path, table, None) for table in ("users", "items"))
    for table in TABLE_NAMES:
        for sentence in name_left_out(list_table(path, table).left_out):
            _warn_once(f"table {table}: {sentence}")
    parts = table_parts(path, "interactions")
    with _naming("interactions", parts[0].path):
        opened = dataset_of(parts)
    units = require_units("interactions", [part.path for part in parts], partial(logger.warning, "%s"))
    return OpenTables(users, items, OpenInteractions(path, opened, keep_duplicates, units))


def _warn_of_copies(num_copies: int, num_rows: int) -> None:
    if num_copies:
        logger.warning(
            "%d of %d interactions are exact copies of another and are left out; set `tables.keep_duplicates: true` "
            "in the configuration to keep them", num_copies, num_rows,
        )  # fmt: skip


@cache
def _warn_once(sentence: str) -> None:
    logger.warning("%s", sentence)


def iter_column(path: Path, table: str, column: str) -> Iterator[pa.Array]:
    """A required column of a table in batches, as it is stored. Raises TableError as `read_tables` does."""
    for part in table_parts(path, table):
        with _naming(table, part.path), part.open() as opened:
            for finding in schema_findings(table, shown_path(part.path), opened.schema_arrow):
                raise FaultyTable(finding)
            yield from (batch.column(0) for batch in opened.iter_batches(columns=[column]))


def iter_rows(path: Path, table: str) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file, or of a folder that is read as that of a table; a file that is not there has none.

    Raises TableError, which names the file, where one cannot be read or has other columns than the first.
    """
    parts = [TablePart(path, table, {})] if path.is_file() else []
    if path.is_dir():
        listing = list_folder(path, table)
        parts = typed_parts(listing.files, table)
        for sentence in name_left_out(listing.left_out):
            _warn_once(f"{path}: {sentence}")
    first = None
    for part in parts:
        with _naming(table, part.path), part.open() as opened:
            first = first or opened.schema_arrow
            if not opened.schema_arrow.equals(first):
                own, other = (", ".join(f"{of.name} {of.type}" for of in it) for it in (opened.schema_arrow, first))
                raise TableError(
                    f"{part.path} has the columns {own}; {parts[0].path.name} beside it has {other}. Write the files "
                    "of a folder with the same columns."
                )
            yield from opened.iter_batches()


def find_exact_copies(path: Path | str, columns: Collection[str] = ()) -> np.ndarray:
    """Which interactions of a folder are exact copies of an earlier one, bool[n], in the order of its files.

    Compared are the columns that `read_tables` reads, and `columns` of others.
    """
    path, memory = tables_folder(path), MappedFiles(None)
    log, _ = _read_log(path, None, memory, is_numbered=True)
    run_of, num_before = np.full(log.num_rows, -1), 0  # runs of rows of one moment, user and item
    for block in in_order(log.rows(), memory):
        is_alike = alike(block)
        places = np.flatnonzero(np.append(is_alike, False) | np.append(False, is_alike))
        run_of[block["row"][places]] = num_before + np.concatenate([[0], np.cumsum(~is_alike)])[places]
        num_before += len(block["row"])
    is_copy = run_of >= 0
    if is_copy.any():
        keys, first_row, parts = [run_of[is_copy]], 0, []
        for part in _open_parts(path, "interactions"):
            rows = slice(first_row, first_row := first_row + part.metadata.num_rows)
            parts.append(replace(part, mask=pa.array(is_copy[rows])))
        for name in _names_in(parts, lambda name: name in ("event", "rating", *columns)):
            values = _read_column(parts, "interactions", name).combine_chunks()
            values = values.dictionary_decode() if pt.is_dictionary(values.type) else values
            if pt.is_nested(values.type):
                values = pa.array(map(repr, values.to_pylist()))
            keys.append(values.dictionary_encode(null_encoding="encode").indices.to_numpy())
        is_copy[is_copy] = equal_to_earlier(keys)
    return is_copy


def _read_table(path: Path, name: str, cutoff: pa.Scalar | None, files: MappedFiles | None = None) -> pa.Table:
    """The columns of users or items that have a role, in files or in memory."""
    parts = [_cut(part, name, cutoff) for part in _open_parts(path, name)]
    columns = {}
    for column in _names_in(parts, lambda column: role_of(name, column) is not None):
        values = pa.table({column: _read_column(parts, name, column).combine_chunks()})
        columns[column] = (values if files is None else files.table(values))[column]
        del values
        pa.default_memory_pool().release_unused()
    return pa.table(columns)


def _read_log(
    path: Path, cutoff: pa.Scalar | None, files: MappedFiles, is_numbered: bool = False
) -> tuple[StoredLog, dict[str, pa.ChunkedArray]]:
    """The interactions before a moment, in the order of files, their ids' codes sorted; and what `sort_ids` returns.

    Columns are those that have a role; if `is_numbered` the required ones, and `row`, a number from 0.
    """
    parts = _open_parts(path, "interactions")
    required = REQUIRED_COLUMNS["interactions"]
    names = _names_in(
        parts, lambda name: name in required if is_numbered else role_of("interactions", name) is not None
    )
    kinds = _log_kinds(parts, names) | ({"row": pa.int64()} if is_numbered else {})
    log = StoredLog(kinds, sum(part.metadata.num_rows for part in parts), files)
    for part in parts:
        with _naming("interactions", part.file.path):
            _append(log, part, kinds, cutoff)
    return log, log.sort_ids()


def _append(log: StoredLog, part: "_Part", kinds: dict[str, pa.DataType], cutoff: pa.Scalar | None) -> None:
    for columns in part.batches(kinds):
        times = columns["timestamp"]
        _require_times("interactions", part, "timestamp", times)
        columns["row"] = pa.array(np.arange(log.num_rows, log.num_rows + len(times)))
        if cutoff is not None:
            is_read = pc.fill_null(pc.less(times, time_scalar(cutoff, times.type)), False)
            if not pc.all(is_read, min_count=0).as_py():
                for name in ID_COLUMNS.values():
                    log.see(name, plain_ids(columns[name].filter(pc.invert(is_read))))
                columns = {name: values.filter(is_read) for name, values in columns.items()}
        log.append({name: _in_log(columns, name, kind) for name, kind in kinds.items()})


def _log_kinds(parts: list["_Part"], names: Collection[str]) -> dict[str, pa.DataType]:
    """The plain types of columns of interactions, words as text; null where no file has a value."""
    schemas = [
        pa.schema([(field.name, _plain_kind(field)) for field in part.schema if field.name in names]) for part in parts
    ]
    with _alike("interactions"):
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    return {name: schema.field(name).type for name in names}


def _plain_kind(field: pa.Field) -> pa.DataType:
    if pt.is_null(field.type):
        return field.type
    role = role_of("interactions", field.name)
    kind = id_type(field.type) if role is ID else TIMESTAMP_TYPE if role is TIME else plain_type(field.type)
    assert kind is not None  # else the schema was refused
    return kind


def _in_log(columns: dict[str, pa.Array], name: str, kind: pa.DataType) -> pa.Array:
    """A column of a batch in the type that the log has; null where the file has none."""
    if name not in columns:
        return pa.nulls(len(columns["timestamp"]), kind)
    role = role_of("interactions", name)
    values = plain_column(columns[name]) if role is None or role is EVENT else role.plain(columns[name])
    with _alike("interactions"):
        return values.cast(kind)


@dataclass(frozen=True)
class _Part:
    """A file of a table: which of its rows are read; None: all."""

    file: TablePart
    metadata: pq.FileMetaData
    schema: pa.Schema
    units: dict[str, str]  # of integer times that are no seconds
    mask: pa.Array | None = None

    def read(self, name: str) -> pa.ChunkedArray:
        """A column, as it is in the file; null where it has none."""
        if name not in self.schema.names:
            return pa.chunked_array([pa.nulls(self.metadata.num_rows if self.mask is None else self.mask.true_count)])
        with self.file.open(self.metadata) as opened:
            values = in_unit(opened.read(name), self.units.get(name, "s"))
        return values if self.mask is None else values.filter(self.mask)

    def batches(self, names: Collection[str]) -> Iterator[dict[str, pa.Array]]:
        """All rows, of those of some columns that the file has."""
        with self.file.open(self.metadata) as opened:
            for batch in opened.iter_batches(columns=[name for name in names if name in self.schema.names]):
                yield {name: in_unit(batch[name], self.units.get(name, "s")) for name in batch.schema.names}


def _open_parts(path: Path, table: str) -> list[_Part]:
    files = table_parts(path, table)
    units = require_units(table, [file.path for file in files], lambda finding: None)
    parts = []
    for file in files:
        with _naming(table, file.path), file.open() as opened:
            parts.append(_Part(file, opened.metadata, opened.schema_arrow, units))
            for finding in schema_findings(table, shown_path(file.path), opened.schema_arrow):
                raise FaultyTable(finding)
    return parts


def _names_in(parts: list[_Part], is_read: Callable[[str], bool]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part.schema.names if is_read(name)))


def _cut(part: _Part, table: str, cutoff: pa.Scalar | None) -> _Part:
    """A file of users or items without those that were created later."""
    if cutoff is None or CREATED_AT not in part.schema.names or pt.is_null(part.schema.field(CREATED_AT).type):
        return part
    with _naming(table, part.file.path):
        times = part.read(CREATED_AT)
        _require_times(table, part, CREATED_AT, times)
        is_read = pc.fill_null(pc.less(times, time_scalar(cutoff, times.type)), True)
        return part if pc.all(is_read, min_count=0).as_py() else replace(part, mask=is_read.combine_chunks())


def _require_times(table: str, part: _Part, column: str, values: pa.ChunkedArray | pa.Array) -> None:
    """Refuse integers that are no seconds, before the cut by date leaves them out, or keeps them."""
    if pt.is_integer(values.type):
        try:
            require_seconds(values)
        except pa.ArrowInvalid:
            findings, of_file = Findings(), replace(part, mask=None).read(column).combine_chunks()
            IN_RANGE.check(table, column, shown_path(part.file.path), 0, of_file, findings)
            raise FaultyTable(findings.to_list()[0]) from None


def _read_column(parts: list[_Part], table: str, name: str) -> pa.ChunkedArray:
    """A column of all files in its plain type; text where none has a value."""
    values = []
    for part in parts:
        with _naming(table, part.file.path):
            read = part.read(name)
            if role_of(table, name) in (TIME, CREATED):
                _require_times(table, part, name, read)
            values.append(pa.table({name: (role_of(table, name) or ATTRIBUTE).plain(read)}))
    with _alike(table):
        column = pa.concat_tables(values, promote_options="permissive")[name]
    # Only now: a column without any value in one file takes its type from the others.
    return column.cast(pa.string()) if pt.is_null(column.type) else column


@contextmanager
def _alike(table: str) -> Iterator[None]:
    """Have what Arrow refuses in the block say that files differ in a type."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TableError(
            f"table {table}: its files differ in the type of a column: {error}. Write them alike."
        ) from None


def describe(path: Path | str) -> dict[str, dict]:
    """What the tables are, for the manifest's `inputs`: by table `path` in the folder, `num_rows`, and `sha256`.

    The hash is of the file's contents; of a folder, of the names of its files
    and their digests. Of a table that an import has made from a query also `database` and `query_sha256`.
    """
    path, described = tables_folder(path), {}
    for name in TABLE_NAMES:
        parts = table_parts(path, name)
        num_rows, record = 0, {}
        for part in parts:
            with _naming(name, part.path):
                metadata = pq.read_metadata(part.path)
                num_rows += metadata.num_rows
                record |= json.loads((metadata.metadata or {}).get(QUERY_KEY, b"{}"))
        top, *within = Path(parts[0].name_in(path)).parts
        sha256 = sha256_file(parts[0].path)
        if within:
            names = (part.name_in(path).removeprefix(f"{top}/") for part in parts)
            lines = (f"{sha256_file(part.path)}  {of_part}\n" for part, of_part in zip(parts, names, strict=True))
            sha256 = hashlib.sha256("".join(lines).encode()).hexdigest()
        described[name] = record | {"path": top, "num_rows": num_rows, "sha256": sha256}
    return described


@contextmanager
def _naming(table: str, file: Path) -> Iterator[None]:
    """Have what Arrow or the disk refuses in the block name the file and its table."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise FaultyTable(unreadable(table, shown_path(file), error)) from None
