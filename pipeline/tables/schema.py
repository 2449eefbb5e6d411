"""The input schema: which tables there are, their columns, and the types in which columns are read.

    users         user_id, attributes..., created_at?
    items         item_id, title, attributes..., created_at?
    interactions  user_id, item_id, timestamp, rating?, event?

Each table is `<name>.parquet` or a folder `<name>/` of Parquet files, also in sub-folders and Hive partitions. Ids are
strings or integers; an attribute is any scalar column, or a list of strings (a set, or a path such as that of a
category, broad to narrow). When read, columns take plain types: string, int64 ids, times in UTC, lists of strings.
`columns.py` defines what a column may hold, `parts.py` where the files of a table lie.
"""

import re
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

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


def in_unit(values: pa.Array | pa.ChunkedArray, unit: str) -> pa.Array | pa.ChunkedArray:
    """Integers as timestamps of a unit; seconds and other columns are unchanged."""
    if unit == "s" or not pt.is_integer(values.type):
        return values
    return values.cast(pa.int64()).cast(pa.timestamp(unit, tz="UTC"))
