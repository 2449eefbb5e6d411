"""The input schema: which tables there are, their columns, and where their files lie.

    users         user_id, attributes..., created_at?
    items         item_id, title, attributes..., created_at?
    interactions  user_id, item_id, timestamp, rating?, event?

Each table is `<name>.parquet` or a folder `<name>/` of Parquet files, also in sub-folders and Hive partitions. Ids are
strings or integers; an attribute is any scalar column, or a list of strings (a set, or a path such as that of a
category, broad to narrow). When read, columns take plain types: string, int64 ids, times in UTC, lists of strings.
`columns.py` defines what a column may hold, `layout.py` what a folder may hold.
"""

import re
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.storage.atomic import REPLACED_SUFFIX, folders_beside
from laserbatch.pipeline.tables import fetched, layout, parts
from laserbatch.pipeline.tables.findings import FaultyTable, Finding, unreadable

TABLE_NAMES = ("users", "items", "interactions")
ENTITY_TABLES = {"user": "users", "item": "items"}  # side -> table
ID_COLUMNS = {"users": "user_id", "items": "item_id"}
REQUIRED_COLUMNS = {
    "users": ("user_id",),
    "items": ("item_id", "title"),
    "interactions": ("user_id", "item_id", "timestamp"),
}
CREATED_AT = "created_at"
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
PATH_TYPE = pa.list_(pa.string())
# Times outside 1900 to 2200 are in another unit: milliseconds read as seconds are tens of thousands of years away.
EARLIEST_S, LATEST_S = -2_208_988_800, 7_258_118_400
TimeUnit = Literal["s", "ms", "us", "ns"]
UNITS_PER_SECOND: dict[str, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def tables_folder(path: Path | str) -> Path:
    """The local folder of tables, or of the local copy of tables at a URI. Raises TableError if it is not there."""
    path = fetched.local_tables(path, TABLE_NAMES)
    if not path.is_dir():
        found = f"{path} is not {'a folder' if path.exists() else 'there'}"
        expected, advice = "a folder with the tables users, items and interactions", "check the path"
        if replaced := folders_beside(path, REPLACED_SUFFIX):
            advice = f"a command that replaced them was killed: give it again, or move {replaced[-1]} to {path}"
        raise FaultyTable(Finding("missing-table", "tables", found, expected, advice))
    return path


def require_only_tables(folder: Path) -> None:
    """Refuse to replace a folder that holds anything other than the files of an import, one for each table."""
    expected = {f"{name}.parquet" for name in TABLE_NAMES}
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in expected or not path.is_file())
    if foreign:
        names = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise TableError(f"{folder} has {names}, and only tables are replaced. Give another folder, or move them away.")


def list_table(root: Path | str, table: str) -> layout.Listing:
    """The Parquet files of a table (for a URI, of its local copy), and the files of its folder that are left out.

    Raises FaultyTable if there is neither `<table>.parquet` nor a folder `<table>` with Parquet files, or if there are
    both, and like `list_folder`.
    """
    root = fetched.local_tables(root, TABLE_NAMES)
    file, folder = root / f"{table}.parquet", root / table
    # Spark and others make a folder named users.parquet.
    folders = [path for path in (folder, file) if path.is_dir()]
    others = [root / f"{name}{suffix}" for name in TABLE_NAMES if name != table for suffix in ("", ".parquet")]
    siblings = [other for other in others if other.is_dir()]
    try:
        listings = [layout.list_folder(path, table, siblings=siblings) for path in folders]
    except OSError as error:
        raise FaultyTable(unreadable(table, fetched.shown_path(folders[0]), error)) from None
    with_rows = [layout.Listing([layout.ListedFile(file)], {})] if file.is_file() else []
    with_rows += [listing for listing in listings if listing.files]
    if len(with_rows) > 1:
        found = f"both {fetched.shown_path(file)} and {fetched.shown_path(folder)} exist"
        raise FaultyTable(Finding("missing-table", table, found, "one of them", "remove the other"))
    if not with_rows:
        found = f"{fetched.shown_path(folders[-1])} has no .parquet files" if folders else "the table is missing"
        if not folders and (near := sorted(path.name for path in root.glob(f"*{table}*"))):
            found += f"; files with similar names are {', '.join(near)}"
        found = "; ".join([found, *(text for listing in listings for text in layout.name_left_out(listing.left_out))])
        at, advice = fetched.shown_path(root / table), "write it there, or make it with `laserbatch data import`"
        expected = f"{at}.parquet or {at}/*.parquet"
        raise FaultyTable(Finding("missing-table", table, found, expected, advice))
    return with_rows[0]


def table_parts(root: Path | str, table: str) -> list[parts.TablePart]:
    """The Parquet files of a table with the columns of their folders. Raises FaultyTable like `list_table`."""
    return parts.typed_parts(list_table(root, table).files, table)


def attribute_columns(schema: pa.Schema, table: str) -> list[str]:
    """Names of an entity table's attributes: every named column but its id, title and created_at."""
    own = (*REQUIRED_COLUMNS[table], CREATED_AT)
    return [name for name in schema.names if name not in own and not is_unnamed(name)]


def is_unnamed(column: str) -> bool:
    """Whether a column has no real name: pandas' row numbers, or the column made by a delimiter at line ends."""
    return re.fullmatch(r"\s*|Unnamed: \d+|__index_level_\d+__", column) is not None


def is_text(kind: pa.DataType) -> bool:
    return pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind)


def is_list(kind: pa.DataType) -> bool:
    return hasattr(kind, "value_field")  # all list types have it, and no others


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type in which a column is read: dictionaries, views and large types lose their encoding."""
    if pt.is_dictionary(kind):
        return plain_type(kind.value_type)
    if is_text(kind) or pt.is_null(kind):
        return pa.string()
    return PATH_TYPE if is_list(kind) and plain_type(kind.value_type) == pa.string() else kind


def id_type(kind: pa.DataType) -> pa.DataType | None:
    """The type in which an id column is read: string or int64; None if it cannot be an id."""
    plain = plain_type(kind)
    if pt.is_integer(plain):
        return pa.int64()
    return plain if plain == pa.string() and not pt.is_null(kind) else None


def is_attribute_type(kind: pa.DataType) -> bool:
    plain = plain_type(kind)
    kinds = (pt.is_nested, pt.is_interval, pt.is_binary, pt.is_large_binary, pt.is_fixed_size_binary, pt.is_binary_view)
    return plain == PATH_TYPE or not any(is_kind(plain) for is_kind in kinds)


def is_time_type(kind: pa.DataType) -> bool:
    return pt.is_timestamp(kind) or pt.is_date(kind) or pt.is_integer(kind)


def is_number_type(kind: pa.DataType) -> bool:
    kind = plain_type(kind)
    return pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind) or pt.is_boolean(kind)


def plain_column(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """A column in its plain type; NaN becomes null, and a column of type null keeps its type."""
    if pt.is_null(column.type):
        return column  # another file of the table may give it a type
    if pt.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    plain = plain_type(column.type)
    if column.type != plain:
        column = column.cast(plain)
    return pc.if_else(pc.is_nan(column), pa.scalar(None, plain), column) if pt.is_floating(plain) else column


def widened(column: pa.ChunkedArray | pa.Array, kind: pa.DataType) -> pa.ChunkedArray | pa.Array:
    """The column; if `kind` is a wider float, by the shortest decimals: 11.36, not 11.359999656677246 or 11.359375.

    Whole numbers stay as they are: a float16 may be 10008, whose shortest decimals are 10010.
    """
    if column.type not in (pa.float16(), pa.float32()) or kind not in (pa.float32(), pa.float64()):
        return column
    exact = column.cast(kind)
    if column.type == pa.float16():  # Arrow would write all of its decimals
        column = pa.array(
            column.to_numpy(zero_copy_only=False).astype(str).astype(object),
            mask=column.is_null().to_numpy(zero_copy_only=False),
        )
    is_whole = pc.and_(pc.equal(pc.round(exact), exact), pc.less(pc.abs(exact), 2.0**53))
    return pc.if_else(is_whole, exact, column.cast(pa.string()).cast(kind))


def plain_ids(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return plain_column(column).cast(id_type(column.type))


def timestamps(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Times as timestamp[us, UTC], from timestamps (without a zone: UTC), dates, or integer unix seconds.

    Raises ArrowInvalid for a value outside what 64 bits of microseconds can hold.
    """
    if pt.is_integer(column.type):
        column = column.cast(pa.int64()).cast(pa.timestamp("s"))
    elif pt.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    # Nanoseconds are cut to microseconds; everything else must fit exactly.
    return column.cast(TIMESTAMP_TYPE, safe=not (pt.is_timestamp(column.type) and column.type.unit == "ns"))


def time_scalar(moment: pa.Scalar, kind: pa.DataType) -> pa.Scalar:
    """A timestamp[us, UTC] scalar as a value of a time column's own type, to compare with unread values."""
    if pt.is_integer(kind):
        return moment.cast(pa.timestamp("s", tz="UTC")).cast(pa.int64())  # a narrower type may not hold it
    return moment.cast(pa.timestamp("us")).cast(kind) if pt.is_date(kind) else moment.cast(kind)
