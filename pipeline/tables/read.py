"""The input tables as they were known at the end of a day, in plain types.

Only the columns and rows that are kept are read: the cut by date is applied while scanning. Faults of rows are
`check.py`'s.
"""

import datetime
import hashlib
import json
import logging
import mmap
from collections.abc import Collection, Iterator, Mapping
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
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.atomic import sha256_file
from laserbatch.pipeline.storage.parquet import map_table
from laserbatch.pipeline.tables.columns import ATTRIBUTE, CREATED, ID, IN_RANGE, TIME, role_of, schema_findings
from laserbatch.pipeline.tables.database import QUERY_KEY
from laserbatch.pipeline.tables.fetched import shown_path
from laserbatch.pipeline.tables.findings import FaultyTable, Findings, unreadable
from laserbatch.pipeline.tables.layout import list_folder, name_left_out
from laserbatch.pipeline.tables.order import by_time, coded, codes_of, exact_copies, only_chunk, time_order
from laserbatch.pipeline.tables.parts import TablePart, dataset_of, typed_parts
from laserbatch.pipeline.tables.personal import personal_data
from laserbatch.pipeline.tables.schema import (
    CREATED_AT,
    ID_COLUMNS,
    REQUIRED_COLUMNS,
    TABLE_NAMES,
    TIMESTAMP_TYPE,
    list_table,
    require_seconds,
    table_parts,
    tables_folder,
    time_scalar,
)
from laserbatch.pipeline.tables.time_units import in_unit, require_units

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tables:
    """The three input tables in plain types: ids are string or int64, times timestamp[us, UTC]."""

    users: pa.Table  # in file order; items too
    items: pa.Table
    interactions: pa.Table  # sorted by time, user, item; ids are dictionaries, whose values ascend; a chunk a column
    scratch: tuple[mmap.mmap, ...] = ()  # what interactions lie in, where that is a file
    scratch_folder: Path | None = None  # for what grows with their rows; None: in memory
    logged_ids: dict[str, pa.Array] = field(default_factory=dict)  # by column, also of those who left the tables
    num_copies: int = 0  # interactions that were left out as exact copies of another one
    personal: Mapping[Side, Mapping[str, str]] = field(default_factory=dict)  # as `personal_data` of whole tables

    def entities(self, side: Side) -> pa.Table:
        """The users or the items."""
        return self.users if side == "user" else self.items

    def coded(self, side: Side) -> tuple[np.ndarray, np.ndarray]:
        """Of each interaction the code of its user or item, int32[n]; and of each code the row of its entity, int32.

        The last code is that of no id; -1 is the row of who is not there.
        """
        ids = self.interactions[f"{side}_id"]
        ids = only_chunk(ids if pt.is_dictionary(ids.type) else ids.dictionary_encode())
        rows = pc.index_in(ids.dictionary, value_set=self.entities(side)[f"{side}_id"].combine_chunks())
        return codes_of(ids), np.append(rows.fill_null(-1).to_numpy(), np.int32(-1))

    def release_pages(self) -> None:
        """Let go of the memory of interactions that lie in a file, which are read again where they are needed."""
        for mapped in self.scratch:
            mapped.madvise(mmap.MADV_DONTNEED)


def read_tables(
    path: Path | str,
    as_of: datetime.date | None = None,
    scratch: Path | None = None,
    keep_duplicates: bool = False,
) -> Tables:
    """Read the tables of a folder, as known at the end of a day (UTC).

    Kept are entities created before its end or with no `created_at`, and interactions before it between such; without a
    day all. Of interactions that are equal in all read columns the first is kept, unless `keep_duplicates`; the
    number of the others is logged as a warning. Interactions lie in files without a name in the folder `scratch`,
    mapped; None: in memory.
    Raises TableError where a table or column is missing, has a wrong type, or its file cannot be read.
    """
    path, cutoff = tables_folder(path), None if as_of is None else end_of_day(as_of)
    users, items = (_read_table(path, table, cutoff) for table in ("users", "items"))
    interactions = by_time(_read_table(path, "interactions", cutoff))
    num_copies = 0
    if not keep_duplicates and (is_copy := exact_copies(interactions)).any():
        num_copies = _warn_of_copies(is_copy)
        interactions = interactions.filter(pa.array(~is_copy)).combine_chunks()
    logged_ids = {name: only_chunk(interactions[name]).dictionary for name in ID_COLUMNS.values()}
    tables = Tables(
        users, items, interactions, logged_ids=logged_ids, num_copies=num_copies, personal=personal_data(users, items)
    )
    # Who left the tables may stay in the log, and an interaction may precede its entity's own created_at.
    for side in SIDES if cutoff is not None else ():
        kind = tables.interactions.schema.field(f"{side}_id").type.value_type
        if kind == tables.entities(side)[f"{side}_id"].type:  # else they cannot be compared, as checks say
            codes, rows = tables.coded(side)
            if (rows[:-1] < 0).any() or tables.interactions[f"{side}_id"].null_count:
                is_known = pa.array(rows[codes] >= 0)
                tables = replace(tables, interactions=tables.interactions.filter(is_known).combine_chunks())
    if scratch is None or not tables.interactions.num_rows:
        return tables
    names = tables.interactions.column_names
    files = [map_table(tables.interactions.select([name]), scratch) for name in names]
    interactions = pa.table([column[0] for column, _ in files], names)
    return replace(
        tables, interactions=interactions, scratch=tuple(mapped for _, mapped in files), scratch_folder=scratch
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
            if self.copies[columns].any():
                _warn_of_copies(self.copies[columns])
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


def _warn_of_copies(is_copy: np.ndarray) -> int:
    num_copies = int(is_copy.sum())
    logger.warning(
        "%d of %d interactions are exact copies of another and are left out; set `tables.keep_duplicates: true` in "
        "the configuration to keep them", num_copies, len(is_copy),
    )  # fmt: skip
    return num_copies


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
    path, required = tables_folder(path), REQUIRED_COLUMNS["interactions"]
    interactions = _read_table(path, "interactions", None, required)
    order = time_order(interactions)
    is_copy = np.zeros(len(order), bool)
    if exact_copies(interactions.take(pa.array(order))).any():
        del interactions
        interactions = _read_table(path, "interactions", None, (*required, "event", "rating", *columns))
        is_copy[order] = exact_copies(interactions.take(pa.array(order)))
    return is_copy


def _read_table(path: Path, name: str, cutoff: pa.Scalar | None, names: Collection[str] | None = None) -> pa.Table:
    """The columns that have a role, or those among `names` that are there."""
    files = table_parts(path, name)
    units = require_units(name, [file.path for file in files], lambda finding: None)
    parts = [_open_part(file, name, cutoff, units) for file in files]
    columns = dict.fromkeys(
        column for part in parts for column in part.schema.names
        if (role_of(name, column) if names is None else column in names)
    )  # fmt: skip
    for column in sorted(columns, key=lambda column: role_of(name, column) is not ID):  # they take most memory at first
        values = _read_column(parts, name, column)
        is_coded = name == "interactions" and role_of(name, column) is ID
        columns[column] = coded(values) if is_coded else values.combine_chunks()
        del values
        pa.default_memory_pool().release_unused()
    return pa.table(columns)


@dataclass(frozen=True)
class _Part:
    """A file of a table: which of its rows are read; None: all."""

    file: TablePart
    metadata: pq.FileMetaData
    schema: pa.Schema
    mask: pa.Array | None
    units: dict[str, str]  # of integer times that are no seconds

    def read(self, name: str) -> pa.ChunkedArray:
        """A column, as it is in the file; null where it has none."""
        if name not in self.schema.names:
            return pa.chunked_array([pa.nulls(self.metadata.num_rows if self.mask is None else self.mask.true_count)])
        with self.file.open(self.metadata, pre_buffer=False) as opened:
            values = in_unit(opened.read(name), self.units.get(name, "s"))
        return values if self.mask is None else values.filter(self.mask)


def _open_part(file: TablePart, name: str, cutoff: pa.Scalar | None, units: dict[str, str]) -> _Part:
    with _naming(name, file.path):
        with file.open() as opened:
            part = _Part(file, opened.metadata, opened.schema_arrow, None, units)
        for finding in schema_findings(name, shown_path(file.path), part.schema):
            raise FaultyTable(finding)
        column = "timestamp" if name == "interactions" else CREATED_AT
        if cutoff is None or column not in part.schema.names or pt.is_null(part.schema.field(column).type):
            return part
        times = part.read(column)
        _require_times(name, part, column, times)
        is_read = pc.fill_null(pc.less(times, time_scalar(cutoff, times.type)), name != "interactions")
        return part if pc.all(is_read, min_count=0).as_py() else replace(part, mask=is_read.combine_chunks())


def _require_times(table: str, part: _Part, column: str, values: pa.ChunkedArray) -> None:
    """Refuse integers that are no seconds, before the cut by date leaves them out, or keeps them."""
    if pt.is_integer(values.type):
        try:
            require_seconds(values)
        except pa.ArrowInvalid:
            findings = Findings()
            IN_RANGE.check(table, column, shown_path(part.file.path), 0, values.combine_chunks(), findings)
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
    try:
        column = pa.concat_tables(values, promote_options="permissive")[name]
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TableError(
            f"table {table}: its files differ in the type of a column: {error}. Write them alike."
        ) from None
    # Only now: a column without any value in one file takes its type from the others.
    return column.cast(pa.string()) if pt.is_null(column.type) else column


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
