"""The input tables as they were known at the end of a day, in plain types.

Only the columns and rows that are kept are read: the cut by date is applied while scanning. Faults of rows are
`check.py`'s.
"""

import datetime
import hashlib
from dataclasses import dataclass
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
from laserbatch.pipeline.tables.columns import role_of, schema_findings
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
    interactions: pa.Table  # sorted by time, user, item

    def entities(self, side: Side) -> pa.Table:
        """The users or the items."""
        return self.users if side == "user" else self.items

    @cached_property
    def rows_of_interactions(self) -> dict[Side, np.ndarray]:
        """Of each interaction the row of its user, and of its item: int32[n]; -1 where that is not there."""
        rows = {}
        for side in SIDES:
            among = self.entities(side)[f"{side}_id"].combine_chunks()
            found = pc.index_in(self.interactions[f"{side}_id"], value_set=among)
            rows[side] = pc.fill_null(found, -1).to_numpy()
        return rows


def read_tables(path: Path | str | None, as_of: datetime.date | None = None) -> Tables:
    """Read the tables of a folder, as known at the end of a day (UTC).

    Kept are interactions before its end, and entities created before it or with no `created_at`; without a day all.
    Raises TableError where a table or column is missing, has a wrong type, or its file cannot be read.
    """
    path, cutoff = tables_folder(path), None
    if as_of is not None:
        day_after = datetime.datetime.combine(as_of, datetime.time(), datetime.UTC) + datetime.timedelta(days=1)
        cutoff = pa.scalar(day_after, TIMESTAMP_TYPE)
    users, items, interactions = (_read_table(path, table, cutoff) for table in TABLE_NAMES)
    if cutoff is not None:
        # An interaction that precedes its entity's own created_at would point to nothing.
        for table, column in ((users, "user_id"), (items, "item_id")):
            if interactions[column].type == table[column].type and CREATED_AT in table.column_names:
                interactions = interactions.filter(pc.is_in(interactions[column], value_set=table[column]))
    return Tables(users, items, _by_time(interactions))


def _by_time(interactions: pa.Table) -> pa.Table:
    """Sorted by time, user, item. What comes sorted, as logs do but for events of one moment, is not copied."""
    keys = [("timestamp", "ascending"), ("user_id", "ascending"), ("item_id", "ascending")]
    if interactions["timestamp"].null_count:
        return interactions.sort_by(keys)
    times = interactions["timestamp"].cast(pa.int64()).to_numpy()
    order = np.arange(len(times))
    if np.any(times[1:] < times[:-1]):
        order = np.argsort(times, kind="stable")
        times = times[order]
    is_next_alike = np.append(times[1:] == times[:-1], False)[: len(times)]
    places = np.flatnonzero(is_next_alike | np.roll(is_next_alike, 1))
    moments = interactions.select([name for name, _ in keys]).take(pa.array(order[places]))
    order[places] = order[places][pc.sort_indices(moments, keys).to_numpy()]
    is_sorted = np.array_equal(order, np.arange(len(order)))
    return interactions if is_sorted else interactions.take(pa.array(order))


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
    return table.cast(pa.schema(list(zip(table.column_names, kinds, strict=True))))


def _read_part(file: Path, name: str, cutoff: pa.Scalar | None) -> pa.Table:
    try:
        schema = pq.read_schema(file)
        for finding in schema_findings(name, shown_path(file), schema):
            raise FaultyTable(finding)
        wanted = [column for column in schema.names if role_of(name, column) is not None]
        kept = None
        time_column = "timestamp" if name == "interactions" else CREATED_AT
        if cutoff is not None and time_column in schema.names and not pt.is_null(schema.field(time_column).type):
            kept = pc.field(time_column) < time_scalar(cutoff, schema.field(time_column).type)
            if name != "interactions":
                kept = kept | pc.field(time_column).is_null()
        table = ds.dataset(str(file), format="parquet").to_table(columns=wanted, filter=kept)
        return pa.table({column: role_of(name, column).plain(table[column]) for column in wanted})
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
