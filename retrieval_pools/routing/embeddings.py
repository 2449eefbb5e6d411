"""Ids and vectors of entities, from which groups are made.

Ids are normalised to large_string or int64, so that ids of different tables compare equal. Your own recommender may
supply the vectors, in place of LightGCN's, in a Parquet file per side: a column `<side>_id` and a column `vector`,
lists of one length of finite floats. Messages number rows from 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.mapped import MappedFiles

VECTOR_COLUMN = "vector"
ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class EntityEmbeddings:
    """One vector per entity of a side: `ids` (n, string or int64) and `vectors` float32 (n, dim), row by row."""

    ids: pa.Array
    vectors: np.ndarray


def id_column(table: pa.Table, name: str, table_name: str) -> pa.Array:
    """The normalised ids of a column; PoolError if it is missing, of another type, or has nulls."""
    return normalised_ids(_column(table, name, table_name), name, table_name)


def distinct_ids(interactions: pa.Table, name: str, scratch: Path | None = None) -> tuple[pa.Array, np.ndarray]:
    """The distinct ids of a column, normalised and ascending, and the place of each row's id among them, int32[n].

    Both are in files without a name in the folder `scratch`; None: in memory. Raises PoolError as `id_column` does.
    """
    column = _column(interactions, name, "interactions")
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    _require_ids(coded, name, "interactions")
    coded = coded.combine_chunks()
    distinct, codes = normalised_ids(coded.dictionary, name, "interactions"), coded.indices.to_numpy()
    order = pc.sort_indices(distinct).to_numpy()
    order = order[count_codes(codes, len(distinct))[order] > 0]
    place_of = np.zeros(len(distinct), np.int32)
    place_of[order] = np.arange(len(order), dtype=np.int32)
    files = MappedFiles(scratch)
    places = files.empty((len(codes),), np.int32)
    for part in parts_of(len(codes)):
        places[part] = place_of[codes[part]]
    return files.array(distinct.take(pa.array(order))), places


def parts_of(num_rows: int) -> Iterator[slice]:
    """Slices of rows, at least one, to limit memory: numpy copies an array that it counts or indexes by to 64 bits."""
    return (slice(start, start + ROWS_AT_ONCE) for start in range(0, max(num_rows, 1), ROWS_AT_ONCE))


def count_codes(codes: np.ndarray, num_codes: int) -> np.ndarray:
    """The number of occurrences of each code: int64[num_codes]."""
    counts = np.zeros(num_codes, np.int64)
    for part in parts_of(len(codes)):
        counts += np.bincount(codes[part], minlength=num_codes)
    return counts


def _column(table: pa.Table, name: str, table_name: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        raise PoolError(f"{table_name} has no column {name!r}; its columns are {', '.join(table.column_names)}")
    return table[name]


def _require_ids(ids: pa.Array | pa.ChunkedArray, name: str, table_name: str) -> None:
    if ids.null_count:
        raise PoolError(f"{table_name}.{name} has {ids.null_count} nulls; expected an id in every row")


def normalised_ids(ids: pa.Array | pa.ChunkedArray, name: str, table_name: str) -> pa.Array:
    """Ids as large_string or int64; PoolError if they are of another kind, or have nulls."""
    arrow_type = ids.type.value_type if pa.types.is_dictionary(ids.type) else ids.type
    if pa.types.is_integer(arrow_type):
        target = pa.int64()
    elif pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        target = pa.large_string()
    else:
        raise PoolError(f"{table_name}.{name} is of type {ids.type}; expected strings or integers")
    _require_ids(ids, name, table_name)
    try:
        ids = ids.cast(target)
    except pa.ArrowInvalid as error:
        raise PoolError(f"{table_name}.{name}: {error}; expected strings, or integers below 2**63") from None
    return ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids


def check_same_kind(ids: pa.Array, other_ids: pa.Array, table_name: str, other_name: str) -> None:
    """Raise PoolError if one of two normalised id arrays holds strings and the other integers."""
    if ids.type != other_ids.type:
        raise PoolError(
            f"ids of {table_name} are {ids.type}, but ids of {other_name} are {other_ids.type}; write both in one type"
        )


def read_embeddings(path: Path, side: str, ids: pa.Array) -> EntityEmbeddings:
    """Read the vectors of the entities `ids` (normalised) from a side's file, in the order of the file.

    Raises PoolError, which names the file, column and row, if an id or a vector is invalid.
    """
    source, id_name = f"routing.{side}_embeddings: {path}", f"{side}_id"
    try:
        names = pq.read_schema(path).names
        for name in (id_name, VECTOR_COLUMN):
            if name not in names:
                raise PoolError(f"{source} has no column {name!r}; its columns are {', '.join(names)}")
        table = pq.read_table(path, columns=[id_name, VECTOR_COLUMN], partitioning=None)
        lists = table[VECTOR_COLUMN].combine_chunks().cast(pa.large_list(pa.float32()), safe=False)
    except (OSError, pa.ArrowException) as error:
        raise PoolError(f"{source} cannot be read ({error}); correct the path, or write the file again") from error
    file_ids = id_column(table, id_name, source)
    check_same_kind(file_ids, ids, source, f"the {side}s")
    codes = file_ids.dictionary_encode().indices.to_numpy()
    is_first = np.zeros(len(codes), bool)
    is_first[np.unique(codes, return_index=True)[1]] = True
    _require(is_first, file_ids, f"{source}, column {id_name}", "the id was in an earlier row")
    lengths = pc.fill_null(pc.list_value_length(lists), -1).to_numpy()
    width = max(int(lengths[0]), 1) if len(lengths) else 1
    where, expected = f"{source}, column {VECTOR_COLUMN}", f"expected a vector of {width} finite numbers"
    _require(lengths == width, lists, where, expected)
    vectors = pc.list_flatten(lists).to_numpy(zero_copy_only=False).reshape(len(lists), width)
    _require(np.isfinite(vectors).all(axis=1), lists, where, expected)
    is_known = pc.is_in(file_ids, value_set=ids)
    return EntityEmbeddings(file_ids.filter(is_known), vectors[is_known.to_numpy(zero_copy_only=False)])


def _require(is_sound: np.ndarray, values: pa.Array, where: str, problem: str) -> None:
    """Raise PoolError, naming the first row for which `is_sound` is False."""
    if not is_sound.all():
        row = int(np.argmin(is_sound))
        shown = str(values[row].as_py())
        raise PoolError(
            f"{where}, row {row}: {problem} (found {shown[:60]}{'...' if len(shown) > 60 else ''}); "
            "correct the row, or leave it out"
        )
