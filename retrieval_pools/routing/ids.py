"""Entity ids in one of two Arrow types, large_string or int64, so that tables of different origin compare equal."""

import pyarrow as pa

from laserbatch.retrieval_pools.errors import PoolError

SIDES = ("user", "item")


def id_column(table: pa.Table, name: str, table_name: str) -> pa.Array:
    """Normalised ids of one column; PoolError when it is missing, of another type, or has nulls."""
    if name not in table.column_names:
        raise PoolError(f"{table_name} has no column {name!r}; its columns are {', '.join(table.column_names)}")
    return normalised_ids(table[name], name, table_name)


def normalised_ids(ids: pa.Array | pa.ChunkedArray, name: str, table_name: str) -> pa.Array:
    """Ids as large_string or int64, so that tables written by different tools compare equal."""
    arrow_type = ids.type.value_type if pa.types.is_dictionary(ids.type) else ids.type
    if pa.types.is_integer(arrow_type):
        target = pa.int64()
    elif pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        target = pa.large_string()
    else:
        raise PoolError(f"{table_name}.{name} is of type {ids.type}; ids are strings or integers")
    if ids.null_count:
        raise PoolError(f"{table_name}.{name} has {ids.null_count} nulls; every row needs an id")
    ids = ids.cast(target)
    return ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids


def check_same_kind(ids: pa.Array, others: pa.Array, table_name: str, other_name: str) -> None:
    """PoolError when one of two normalised id arrays holds strings and the other integers."""
    if ids.type != others.type:
        raise PoolError(
            f"ids of {table_name} are {ids.type}, those of {other_name} are {others.type}; give both the same type"
        )
