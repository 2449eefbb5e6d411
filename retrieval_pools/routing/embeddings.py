"""Embeddings that a team brings from its own recommender, in place of LightGCN's: one Parquet file a side.

Owns the format and its check: a column `<side>_id` and a column `vector`, lists of one width of finite floats. Rows
count from 0 within the file. Knows nothing of what the vectors mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing.ids import check_same_kind, normalised_ids
from laserbatch.retrieval_pools.routing.kmeans import EntityEmbeddings

VECTOR_COLUMN = "vector"
BATCH_ROWS = 1 << 16


def read_embeddings(path: Path, side: str, ids: pa.Array) -> EntityEmbeddings:
    """Vectors of entities from a file.

    Parameters
    ----------
    path : Path
    side : str
        "user" or "item".
    ids : pa.Array
        Normalised ids of the entities; rows of others are checked and left out.

    Returns
    -------
    EntityEmbeddings
        Of those of `ids` that the file has, in its order.

    Raises
    ------
    PoolError
        The file, a column of it or a row of it is not what it should be; all three are named.
    """
    source = _Source(Path(path), side)
    kept_ids, kept_vectors, kept_rows = [ids.slice(0, 0)], [], []
    first_row, width = 0, None
    for batch_ids, lists in source.batches():
        source.require(pc.is_valid(batch_ids), source.id_column, first_row, batch_ids, "no id")
        found_ids = normalised_ids(batch_ids, source.id_column, str(source))
        check_same_kind(found_ids, ids, str(source), f"the {side}s")
        vectors = source.vectors(lists, first_row, width)
        width = vectors.shape[1] if len(vectors) else width
        known = pc.is_in(found_ids, value_set=ids).to_numpy(zero_copy_only=False)
        kept_ids.append(found_ids.filter(pa.array(known)))
        kept_vectors.append(vectors[known])
        kept_rows.append(first_row + np.flatnonzero(known))
        first_row += len(found_ids)
    embeddings = EntityEmbeddings(
        pa.concat_arrays(kept_ids), np.concatenate(kept_vectors) if kept_vectors else np.empty((0, 1), np.float32)
    )
    source.require_each_once(embeddings.ids, np.concatenate([np.empty(0, np.int64), *kept_rows]))
    return embeddings


@dataclass(frozen=True)
class _Source:
    """A file of embeddings, as errors name it."""

    path: Path
    side: str

    @property
    def id_column(self) -> str:
        return f"{self.side}_id"

    def __str__(self) -> str:
        return f"routing.{self.side}_embeddings: {self.path}"

    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Ids and lists of the rows, in order."""
        try:
            file = pq.ParquetFile(self.path)
            self._check_columns(file.schema_arrow)
            for batch in file.iter_batches(BATCH_ROWS, columns=[self.id_column, VECTOR_COLUMN]):
                yield batch[self.id_column], batch[VECTOR_COLUMN]
        except (OSError, pa.ArrowException) as error:
            raise PoolError(f"{self} cannot be read ({error}); correct the path, or write the file again") from error

    def vectors(self, lists: pa.Array, first_row: int, width: int | None) -> np.ndarray:
        """float32 (n, width); `width` is that of the rows before, None at the first."""
        self.require(pc.is_valid(lists), VECTOR_COLUMN, first_row, lists, "no vector")
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        if width is None and len(lengths):
            width = int(lengths[0])
        expected = f"a vector of {width} numbers, as in row 0" if width else "a vector of at least one number"
        self.require(pa.array((lengths == width) & (lengths > 0)), VECTOR_COLUMN, first_row, lists, f"not {expected}")
        with np.errstate(over="ignore"):  # too large for float32: not finite, like what was so before
            numbers = pc.list_flatten(lists).to_numpy(zero_copy_only=False).astype(np.float32)
        vectors = numbers.reshape(len(lists), width or 1)
        is_finite = pa.array(np.isfinite(vectors).all(axis=1))
        self.require(is_finite, VECTOR_COLUMN, first_row, lists, "a number that is null, NaN or not finite")
        return vectors

    def require(self, is_sound: pa.Array, column: str, first_row: int, values: pa.Array, problem: str) -> None:
        """PoolError naming the first row that is not sound."""
        wrong = np.flatnonzero(~is_sound.to_numpy(zero_copy_only=False))
        if len(wrong):
            shown = str(values[int(wrong[0])].as_py())
            raise PoolError(
                f"{self}, column {column}, row {first_row + int(wrong[0])}: {problem} "
                f"(found {shown[:60]}{'...' if len(shown) > 60 else ''}); correct the row, or leave it out"
            )

    def require_each_once(self, ids: pa.Array, rows: np.ndarray) -> None:
        """PoolError naming the first row whose id an earlier row has."""
        codes = ids.dictionary_encode().indices.to_numpy()
        is_first = np.zeros(len(codes), bool)
        is_first[np.unique(codes, return_index=True)[1]] = True
        repeated = np.flatnonzero(~is_first)
        if len(repeated):
            place = int(repeated[0])
            raise PoolError(
                f"{self}, column {self.id_column}, row {rows[place]}: the id {ids[place].as_py()!r} was in an earlier "
                "row; leave one vector for each id"
            )

    def _check_columns(self, schema: pa.Schema) -> None:
        for name in (self.id_column, VECTOR_COLUMN):
            if name not in schema.names:
                raise PoolError(f"{self} has no column {name!r}; its columns are {', '.join(schema.names)}")
        types, kind = pa.types, schema.field(self.id_column).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)):
            raise PoolError(f"{self}, column {self.id_column}: ids are strings or integers, found {kind}")
        kind = schema.field(VECTOR_COLUMN).type
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not is_list or not types.is_floating(kind.value_type):
            raise PoolError(f"{self}, column {VECTOR_COLUMN}: expected lists of float, found {kind}")
