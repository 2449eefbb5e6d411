"""Ids and vectors of entities, as tables and a team's own recommender bring them.

Ids are one of two Arrow types, large_string or int64, so that tables of different origin compare equal. Vectors may
come in one Parquet file a side, in place of LightGCN's: a column `<side>_id` and a column `vector`, lists of one width
of finite floats. Rows are named counting from 0.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.retrieval_pools.errors import PoolError

SIDES = ("user", "item")
VECTOR_COLUMN = "vector"


@dataclass(frozen=True)
class EntityEmbeddings:
    """One vector per entity of a side: `ids` (n, string or int64) and `vectors` float32 (n, dim), row by row."""

    ids: pa.Array
    vectors: np.ndarray


def id_column(table: pa.Table, name: str, table_name: str) -> pa.Array:
    """Normalised ids of one column; PoolError when it is missing, of another type, or has nulls."""
    if name not in table.column_names:
        raise PoolError(f"{table_name} has no column {name!r}; its columns are {', '.join(table.column_names)}")
    return normalised_ids(table[name], name, table_name)


def normalised_ids(ids: pa.Array | pa.ChunkedArray, name: str, table_name: str) -> pa.Array:
    """Ids as large_string or int64."""
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


def read_embeddings(path: Path, side: str, ids: pa.Array) -> EntityEmbeddings:
    """Vectors of entities from a file.

    Parameters
    ----------
    side : "user" or "item".
    ids : normalised ids of the entities; rows of others are checked and left out.

    Returns
    -------
    EntityEmbeddings
        Of those of `ids` that the file has, in its order.

    Raises
    ------
    PoolError
        The file, a column of it or a row of it is not what it should be; all three are named.
    """
    source, id_name = f"routing.{side}_embeddings: {path}", f"{side}_id"
    try:
        _check_columns(pq.read_schema(path), source, id_name)
        table = pq.read_table(path, columns=[id_name, VECTOR_COLUMN], partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise PoolError(f"{source} cannot be read ({error}); correct the path, or write the file again") from error
    _require(table[id_name].is_valid(), table[id_name], f"{source}, column {id_name}", "no id")
    found_ids = id_column(table, id_name, source)
    check_same_kind(found_ids, ids, source, f"the {side}s")
    vectors = _vectors(table[VECTOR_COLUMN], f"{source}, column {VECTOR_COLUMN}")
    known = pc.is_in(found_ids, value_set=ids).to_numpy(zero_copy_only=False)
    codes = found_ids.dictionary_encode().indices.to_numpy()
    is_first = np.zeros(len(codes), bool)
    is_first[np.unique(codes, return_index=True)[1]] = True
    _require(is_first | ~known, found_ids, f"{source}, column {id_name}", "the id was in an earlier row")
    return EntityEmbeddings(found_ids.filter(pa.array(known)), vectors[known])


def _vectors(lists: pa.ChunkedArray, where: str) -> np.ndarray:
    """float32 (n, width), checked."""
    _require(lists.is_valid(), lists, where, "no vector")
    lengths = pc.list_value_length(lists).to_numpy()
    width = int(lengths[0]) if len(lengths) else 1
    expected = f"a vector of {width} numbers, as in row 0" if width else "a vector of at least one number"
    _require((lengths == width) & (lengths > 0), lists, where, f"not {expected}")
    with np.errstate(over="ignore"):  # too large for float32: not finite, like what was so before
        vectors = pc.list_flatten(lists).to_numpy().astype(np.float32).reshape(len(lists), width)
    _require(np.isfinite(vectors).all(axis=1), lists, where, "a number that is null, NaN or not finite")
    return vectors


def _require(
    is_sound: pa.ChunkedArray | np.ndarray, values: pa.Array | pa.ChunkedArray, where: str, problem: str
) -> None:
    """PoolError naming the first row that is not sound."""
    wrong = np.flatnonzero(~np.asarray(is_sound))
    if len(wrong):
        shown = str(values[int(wrong[0])].as_py())
        raise PoolError(
            f"{where}, row {wrong[0]}: {problem} (found {shown[:60]}{'...' if len(shown) > 60 else ''}); "
            "correct the row, or leave it out"
        )


def _check_columns(schema: pa.Schema, source: str, id_name: str) -> None:
    for name in (id_name, VECTOR_COLUMN):
        if name not in schema.names:
            raise PoolError(f"{source} has no column {name!r}; its columns are {', '.join(schema.names)}")
    types, kind = pa.types, schema.field(id_name).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)):
        raise PoolError(f"{source}, column {id_name}: ids are strings or integers, found {kind}")
    kind = schema.field(VECTOR_COLUMN).type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_floating(kind.value_type):
        raise PoolError(f"{source}, column {VECTOR_COLUMN}: expected lists of float, found {kind}")
