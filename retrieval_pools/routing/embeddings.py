"""Ids and vectors of entities: what groups are made of.

Ids are one of two Arrow types, large_string or int64, so that tables of different origin compare equal.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.retrieval_pools.errors import PoolError


@dataclass(frozen=True)
class EntityEmbeddings:
    """One vector per entity of a side: `ids` (n, string or int64) and `vectors` float32 (n, dim), row by row."""

    ids: pa.Array
    vectors: np.ndarray


def id_column(table: pa.Table, name: str, table_name: str) -> pa.Array:
    """Normalised ids of one column; PoolError when it is missing, of another type, or has nulls."""
    return normalised_ids(_column(table, name, table_name), name, table_name)


def distinct_ids(table: pa.Table, name: str, table_name: str) -> tuple[pa.Array, np.ndarray]:
    """As `id_column`, but those that occur, ascending, and of each row the place among them, int32[num_rows]."""
    column = _column(table, name, table_name)
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    _require_ids(coded, name, table_name)
    coded = coded.combine_chunks()
    known, codes = normalised_ids(coded.dictionary, name, table_name), coded.indices.to_numpy()
    order = pc.sort_indices(known).to_numpy()
    order = order[np.bincount(codes, minlength=len(known))[order] > 0]
    places = np.zeros(len(known), np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    return known.take(pa.array(order)), places[codes]


def _column(table: pa.Table, name: str, table_name: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        raise PoolError(f"{table_name} has no column {name!r}; its columns are {', '.join(table.column_names)}")
    return table[name]


def _require_ids(ids: pa.Array | pa.ChunkedArray, name: str, table_name: str) -> None:
    if ids.null_count:
        raise PoolError(f"{table_name}.{name} has {ids.null_count} nulls; every row needs an id")


def normalised_ids(ids: pa.Array | pa.ChunkedArray, name: str, table_name: str) -> pa.Array:
    """Ids as large_string or int64."""
    arrow_type = ids.type.value_type if pa.types.is_dictionary(ids.type) else ids.type
    if pa.types.is_integer(arrow_type):
        target = pa.int64()
    elif pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        target = pa.large_string()
    else:
        raise PoolError(f"{table_name}.{name} is of type {ids.type}; ids are strings or integers")
    _require_ids(ids, name, table_name)
    ids = ids.cast(target)
    return ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids


def check_same_kind(ids: pa.Array, others: pa.Array, table_name: str, other_name: str) -> None:
    """PoolError when one of two normalised id arrays holds strings and the other integers."""
    if ids.type != others.type:
        raise PoolError(
            f"ids of {table_name} are {ids.type}, those of {other_name} are {others.type}; give both the same type"
        )
