"""The input tables as they were known at the end of a day, in plain types.

Only the columns and rows that are kept are read: the cut by date is applied while scanning. Faults of rows are
`check.py`'s.
"""

import datetime
import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
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
from laserbatch.pipeline.tables.columns import ID, role_of, schema_findings
from laserbatch.pipeline.tables.fetched import shown_path
from laserbatch.pipeline.tables.findings import FaultyTable, unreadable
from laserbatch.pipeline.tables.schema import (
    CREATED_AT,
    TABLE_NAMES,
    TIMESTAMP_TYPE,
    table_files,
    tables_folder,
    time_scalar,
)


@dataclass(frozen=True)
class Tables:
    """The three input tables in plain types: ids are string or int64, times timestamp[us, UTC]."""

    users: pa.Table  # in file order; items too
    items: pa.Table
    interactions: pa.Table  # sorted by time, user, item; ids are dictionaries, whose values ascend

    def entities(self, side: Side) -> pa.Table:
        """The users or the items."""
        return self.users if side == "user" else self.items

    @cached_property
    def rows_of_interactions(self) -> dict[Side, np.ndarray]:
        """Of each interaction the row of its user, and of its item: int32[n]; -1 where that is not there."""
        rows = {}
        for side in SIDES:
            ids = self.interactions[f"{side}_id"]
            ids = (ids if pt.is_dictionary(ids.type) else ids.dictionary_encode()).combine_chunks()
            found = pc.index_in(ids.dictionary, value_set=self.entities(side)[f"{side}_id"].combine_chunks())
            rows[side] = pc.fill_null(found.take(ids.indices), -1).to_numpy()
        return rows


def read_tables(path: Path | str | None, as_of: datetime.date | None = None) -> Tables:
    """Read the tables of a folder, as known at the end of a day (UTC).

    Kept are interactions before its end, and entities created before it or with no `created_at`; without a day all.
    Raises TableError where a table or column is missing, has a wrong type, or its file cannot be read.
    """
    path, cutoff = tables_folder(path), None if as_of is None else end_of(as_of)
    users, items = (_read_table(path, table, cutoff) for table in ("users", "items"))
    tables = Tables(users, items, _by_time(_read_table(path, "interactions", cutoff)))
    if cutoff is None:
        return tables
    # An interaction that precedes its entity's own created_at would point to nothing.
    for side in SIDES:
        entities, kind = tables.entities(side), tables.interactions.schema.field(f"{side}_id").type.value_type
        if kind == entities[f"{side}_id"].type and CREATED_AT in entities.column_names:
            is_known = tables.rows_of_interactions[side] >= 0
            if not is_known.all():
                tables = replace(tables, interactions=tables.interactions.filter(pa.array(is_known)))
    return tables


def end_of(date: datetime.date) -> pa.Scalar:
    """The moment at which a day (UTC) is over."""
    midnight = datetime.datetime.combine(date, datetime.time(), datetime.UTC)
    return pa.scalar(midnight + datetime.timedelta(days=1), TIMESTAMP_TYPE)


@dataclass(frozen=True)
class OpenTables:
    """Users and items read, and interactions left in their files, with all of their columns, to be streamed."""

    users: pa.Table
    items: pa.Table
    interactions: ds.Dataset


def open_tables(path: Path | str | None) -> OpenTables:
    """The tables of a folder, of all days. Raises TableError as `read_tables` does."""
    path = tables_folder(path)
    users, items = (_read_table(path, table, None) for table in ("users", "items"))
    files = table_files(path, "interactions")
    try:
        interactions = ds.dataset([str(file) for file in files], format="parquet")
    except (pa.ArrowException, OSError) as error:
        raise FaultyTable(unreadable("interactions", shown_path(files[0]), error)) from None
    return OpenTables(users, items, interactions)


def _by_time(interactions: pa.Table) -> pa.Table:
    """Sorted by time, user, item, nulls last. What comes sorted, as logs do but within a second, is not copied."""
    times = interactions["timestamp"].combine_chunks().cast(pa.int64()).fill_null(np.iinfo(np.int64).max).to_numpy()
    ids = (interactions[f"{side}_id"].combine_chunks() for side in SIDES)
    user, item = (coded.indices.fill_null(len(coded.dictionary)).to_numpy() for coded in ids)
    order = np.arange(len(times), dtype=np.int32 if len(times) < 2**31 else np.int64)
    if np.any(times[1:] < times[:-1]):
        order[:] = np.argsort(times, kind="stable")
        times = times[order]
    is_alike = np.zeros(len(times), bool)
    is_alike[:-1] = times[1:] == times[:-1]
    is_alike[1:] |= is_alike[:-1].copy()
    places = np.flatnonzero(is_alike).astype(order.dtype)
    rows = order[places]
    by_id = rows[np.lexsort((item[rows], user[rows], times[places]))]
    if np.array_equal(order, np.arange(len(order), dtype=order.dtype)) and np.array_equal(by_id, rows):
        return interactions
    order[places] = by_id
    names, columns = interactions.column_names, interactions.columns
    del interactions, times, user, item, is_alike, places, rows, by_id
    for number in range(len(columns)):  # one at a time, and what it was is let go
        columns[number] = columns[number].take(pa.array(order))
        pa.default_memory_pool().release_unused()
    return pa.table(columns, names)


def _coded(column: pa.ChunkedArray) -> pa.Array:
    """Ids as codes, int32, of their distinct values, which ascend: what is sorted by code is sorted by id.

    Of a dictionary those are left out that no row has.
    """
    coded = column.combine_chunks()
    is_there = np.zeros(len(coded.dictionary), bool)
    is_there[coded.indices.drop_null().to_numpy()] = True
    order = pc.sort_indices(coded.dictionary)
    order = order.filter(pa.array(is_there).take(order))
    codes = np.zeros(len(is_there), np.int32)
    codes[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(codes).take(coded.indices), coded.dictionary.take(order))


def _read_table(path: Path, name: str, cutoff: pa.Scalar | None) -> pa.Table:
    parts = [_read_part(file, name, cutoff) for file in table_files(path, name)]
    try:
        table = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TableError(
            f"table {name}: its files differ in the type of a column: {error}. Write them alike."
        ) from None
    # Only now: a column without any value in one file takes its type from the others.
    kinds = [pa.string() if pt.is_null(kind) else kind for kind in table.schema.types]
    table = table.cast(pa.schema(list(zip(table.column_names, kinds, strict=True))))
    names, columns = table.column_names, table.columns
    del parts, table
    for number, kind in enumerate(kinds):  # one at a time, and what it was is let go
        if pt.is_dictionary(kind):
            columns[number] = _coded(columns[number])
    pa.default_memory_pool().release_unused()
    return pa.table(columns, names)


def _read_part(file: Path, name: str, cutoff: pa.Scalar | None) -> pa.Table:
    try:
        schema = pq.read_schema(file)
        for finding in schema_findings(name, shown_path(file), schema):
            raise FaultyTable(finding)
        wanted = [column for column in schema.names if role_of(name, column) is not None]
        time_column = "timestamp" if name == "interactions" else CREATED_AT
        coded = [column for column in wanted if name == "interactions" and role_of(name, column) is ID]
        columns: dict[str, pa.ChunkedArray] = {}
        # What is text is read as codes: most files have it so.
        texts = [column for column in coded if pt.is_string(schema.field(column).type)]
        with pq.ParquetFile(file, read_dictionary=texts, pre_buffer=False) as opened:
            kept = None
            if cutoff is not None and time_column in schema.names and not pt.is_null(schema.field(time_column).type):
                times = opened.read([time_column])[time_column]
                kept = pc.less(times, time_scalar(cutoff, times.type))
                kept = pc.fill_null(kept, name != "interactions")
                kept = None if pc.all(kept, min_count=0).as_py() else kept.combine_chunks()
                del times
            codes = opened.read(texts)  # side by side: their words are looked up one by one
            for column in wanted:  # one at a time, and what it was is let go
                values = codes[column].unify_dictionaries() if column in texts else opened.read([column])[column]
                values = values if kept is None else values.filter(kept)
                if column not in texts:
                    values = role_of(name, column).plain(values)
                columns[column] = values if column not in coded or column in texts else values.dictionary_encode()
                del values
                pa.default_memory_pool().release_unused()
        return pa.table(columns)
    except (pa.ArrowException, OSError) as error:
        raise FaultyTable(unreadable(name, shown_path(file), error)) from None


def describe(path: Path | str | None) -> dict[str, dict]:
    """What the tables are, for the manifest's `inputs`: by table `path` in the folder, `num_rows`, and `sha256`.

    The hash is of the file's contents; of several files, of their names and digests.
    """
    path, described = tables_folder(path), {}
    for name in TABLE_NAMES:
        files = table_files(path, name)
        num_rows = sum(_num_rows(file, name) for file in files)
        source, sha256 = files[0], sha256_file(files[0])
        if source.parent != path:
            source = source.parent
            lines = "".join(f"{sha256_file(file)}  {file.name}\n" for file in files)
            sha256 = hashlib.sha256(lines.encode()).hexdigest()
        described[name] = {"path": source.name, "num_rows": num_rows, "sha256": sha256}
    return described


def _num_rows(file: Path, name: str) -> int:
    try:
        return pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError) as error:
        raise FaultyTable(unreadable(name, shown_path(file), error)) from None
