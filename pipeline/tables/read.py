"""Reading the input tables as they were known at the end of a day.

Owns the cut by date and the normalisation to plain types. Reads only the columns and rows that are kept: the cut is
applied while scanning. Does not look for faults in rows; that is `check.py`.
"""

import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pyarrow.types as pt

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import sha256_file
from laserbatch.pipeline.tables import schema as sc


@dataclass(frozen=True)
class Tables:
    """The three input tables in plain types.

    Attributes
    ----------
    users : `user_id` (string or int64), attributes, optional `created_at` timestamp[us, UTC]; in file order.
    items : `item_id`, `title`, attributes, optional `created_at`; in file order.
    interactions : `user_id`, `item_id`, `timestamp` timestamp[us, UTC], optional `rating`; sorted by time, user, item.
    """

    users: pa.Table
    items: pa.Table
    interactions: pa.Table

    def entities(self, side: Side) -> pa.Table:
        """The users or the items."""
        return self.users if side == "user" else self.items


def read_tables(path: Path | str | None, as_of: datetime.date | None = None) -> Tables:
    """Read the tables, as known at the end of a day.

    Parameters
    ----------
    path : folder with users, items and interactions, each `<name>.parquet` or `<name>/*.parquet`.
    as_of : keep interactions before the end of this day (UTC), and entities created before it or with no `created_at`;
        None keeps everything.

    Returns
    -------
    Tables
        Ids keep their kind: strings are string, integers int64.

    Raises
    ------
    TableError
        The path is None or no folder; a table or column is missing, has a wrong type, or its file cannot be read.
    """
    path, cutoff = sc.tables_folder(path), None
    if as_of is not None:
        day_after = datetime.datetime.combine(as_of, datetime.time(), datetime.UTC) + datetime.timedelta(days=1)
        cutoff = pa.scalar(day_after, sc.TIMESTAMP_TYPE)
    users = _read_table(path, "users", cutoff)
    items = _read_table(path, "items", cutoff)
    interactions = _read_table(path, "interactions", cutoff)
    if cutoff is not None:
        # An interaction that precedes its entity's own created_at would point to nothing.
        for table, column in ((users, "user_id"), (items, "item_id")):
            if interactions[column].type == table[column].type and sc.CREATED_AT in table.column_names:
                interactions = interactions.filter(pc.is_in(interactions[column], value_set=table[column]))
    order = [("timestamp", "ascending"), ("user_id", "ascending"), ("item_id", "ascending")]
    return Tables(users, items, interactions.sort_by(order))


def _read_table(path: Path | str, name: str, cutoff: pa.Scalar | None) -> pa.Table:
    parts = [_read_part(file, name, cutoff) for file in sc.table_files(path, name)]
    try:
        table = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TableError(
            f"table {name}: its files differ in the type of a column: {error}. Write them alike."
        ) from None
    # Only now: a column without any value in one file takes its type from the others.
    nothing_known = [field.name for field in table.schema if pt.is_null(field.type)]
    for column in nothing_known:
        table = table.set_column(table.column_names.index(column), column, table[column].cast(pa.string()))
    return table


def _read_part(file: Path, name: str, cutoff: pa.Scalar | None) -> pa.Table:
    try:
        schema = pq.read_schema(file)
        _require_columns(file, name, schema)
        wanted = [column for column in schema.names if name != "interactions" or column in sc.INTERACTION_COLUMNS]
        kept = None
        time_column = "timestamp" if name == "interactions" else sc.CREATED_AT
        if cutoff is not None and time_column in schema.names and not pt.is_null(schema.field(time_column).type):
            kept = pc.field(time_column) < sc.time_scalar(cutoff, schema.field(time_column).type)
            if name != "interactions":
                kept = kept | pc.field(time_column).is_null()
        table = ds.dataset(str(file), format="parquet").to_table(columns=wanted, filter=kept)
        columns = {column: _plain(table[column], column, name) for column in wanted}
        return pa.table(columns)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, name, error) from None


def _num_rows(file: Path, name: str) -> int:
    try:
        return pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, name, error) from None


def _unreadable(file: Path, name: str, error: Exception) -> TableError:
    first_line = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return TableError(f"table {name}: {file} cannot be read: {first_line}. Write the file again.")


def _plain(column: pa.ChunkedArray, name: str, table: str) -> pa.ChunkedArray:
    if name == sc.CREATED_AT or (table == "interactions" and name == "timestamp"):
        return sc.timestamps(column)
    if pt.is_null(column.type) and name not in _id_columns(table):
        return column
    plain = sc.plain_column(column)
    return plain.cast(sc.id_type(column.type)) if name in _id_columns(table) else plain


def _id_columns(table: str) -> tuple[str, ...]:
    return ("user_id", "item_id") if table == "interactions" else (sc.ID_COLUMNS[table],)


def _require_columns(file: Path, name: str, schema: pa.Schema) -> None:
    for column in sc.REQUIRED_COLUMNS[name]:
        if column not in schema.names:
            raise TableError(
                f"table {name}: {file} lacks the column {column!r}; it has {', '.join(schema.names)}. "
                "Rename the column that holds it, or map it with `laserbatch data import table`."
            )
    wrong = next(iter(wrong_types(name, schema)), None)
    if wrong is not None:
        raise TableError(
            f"table {name}, column {wrong.column}: {file} holds {wrong.found}; expected {wrong.expected}; "
            f"{wrong.advice}."
        )


@dataclass(frozen=True)
class WrongType:
    """A column whose type is not accepted, and what can be done about it."""

    column: str
    found: str
    expected: str
    advice: str


def wrong_types(name: str, schema: pa.Schema) -> list[WrongType]:
    """The columns of a table whose types are not accepted, in column order. Missing columns are not its matter."""
    wrong = []
    for field in schema:
        kind, column = field.type, field.name
        if column in _id_columns(name):
            accepted, expected = sc.id_type(kind) is not None, sc.ID_EXPECTED
        elif name == "interactions" and column == "timestamp":
            accepted, expected = sc.is_time_type(kind), sc.TIME_EXPECTED
        elif name == "interactions" and column == "rating":
            accepted, expected = sc.is_number_type(sc.plain_type(kind)), "a number"
        elif name == "interactions":
            continue  # other columns are not read
        elif column == sc.CREATED_AT:
            accepted, expected = sc.is_time_type(kind) or pt.is_null(kind), sc.TIME_EXPECTED
        elif name == "items" and column == "title":
            accepted, expected = sc.plain_type(kind) == pa.string(), "a string"
        else:
            accepted, expected = sc.is_attribute_type(kind), sc.ATTRIBUTE_EXPECTED
        if not accepted:
            wrong.append(WrongType(column, str(kind), expected, _advice(column, kind, expected)))
    return wrong


def _advice(column: str, kind: pa.DataType, expected: str) -> str:
    if pt.is_null(kind):
        return "it holds nothing: fill it in" + (", or leave it out" if column == "rating" else "")
    if expected == sc.ATTRIBUTE_EXPECTED:
        return (
            "leave it out (`laserbatch data import table` with the `attributes` that you want), or write its parts as "
            "columns of their own"
        )
    if not sc.is_attribute_type(kind) or pt.is_time(kind) or pt.is_duration(kind):
        return "write it so; bytes as text, for example in hexadecimal"
    if expected == sc.ID_EXPECTED:
        wanted = "int64" if pt.is_floating(kind) or pt.is_decimal(kind) else "string"
        return f"write it so; `laserbatch data import table` does with `ids: {{{column}: {wanted}}}` in its mapping"
    unit = ", if its mapping names the `unit`" if expected == sc.TIME_EXPECTED else ""
    return f"`laserbatch data import table` converts it{unit}"


def describe(path: Path | str | None) -> dict[str, dict]:
    """What the tables are, for the manifest's `inputs`.

    Returns
    -------
    dict
        By table: `path` (relative to the folder), `num_rows`, and `sha256` of the file's contents; of several files,
        the SHA-256 of their names and digests.

    Raises
    ------
    TableError
        A table is missing, or a file cannot be read.
    """
    path, described = sc.tables_folder(path), {}
    for name in sc.TABLE_NAMES:
        files = sc.table_files(path, name)
        num_rows = sum(_num_rows(file, name) for file in files)
        is_one_file = files[0].parent == path
        digests = [sha256_file(file) for file in files]
        if is_one_file:
            sha256 = digests[0]
        else:
            lines = "".join(f"{digest}  {file.name}\n" for digest, file in zip(digests, files, strict=True))
            sha256 = hashlib.sha256(lines.encode()).hexdigest()
        source = files[0] if is_one_file else files[0].parent
        described[name] = {"path": source.name, "num_rows": num_rows, "sha256": sha256}
    return described
