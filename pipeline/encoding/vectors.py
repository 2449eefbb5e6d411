"""Vectors as columns of Arrow, and as arrays."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class VectorForm:
    """How vectors are written: by what they are projected, float32 (n, dim) to (n, smaller); and in what type."""

    dim: int
    project: Callable[[np.ndarray], np.ndarray] | None = None
    dtype: type = np.float32

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.list_(pa.from_numpy_dtype(self.dtype), self.dim)

    def column(self, vectors: np.ndarray, is_null: np.ndarray | None = None) -> pa.Array:
        """Vectors, float32 (n, dim), as a column; `is_null`, bool (n,), are null."""
        flat = self.numbers(vectors).reshape(-1)
        mask = None if is_null is None else pa.array(is_null)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), self.dim, mask=mask)

    def numbers(self, vectors: np.ndarray) -> np.ndarray:
        projected = vectors if self.project is None else self.project(vectors)
        return np.ascontiguousarray(projected, self.dtype)

    def formed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Feature tables with their vectors in this form."""
        for batch in batches:
            place = batch.schema.get_field_index("vector")
            yield batch.set_column(place, "vector", self.column(vectors_of(batch)))


def vectors_of(rows: pa.RecordBatch | pa.Table) -> np.ndarray:
    """The vectors of a feature table, or of a batch of it: float32 (num_rows, dim)."""
    column = rows["vector"].combine_chunks() if isinstance(rows, pa.Table) else rows["vector"]
    return column.flatten().to_numpy().reshape(len(column), column.type.list_size)
