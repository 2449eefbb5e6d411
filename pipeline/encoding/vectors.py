"""Vectors as columns of Arrow, and as arrays."""

import numpy as np
import pyarrow as pa


def vector_column(vectors: np.ndarray, is_null: np.ndarray | None = None) -> pa.Array:
    """Vectors, float32 (n, dim), as a column; `is_null`, bool (n,), are null."""
    mask = None if is_null is None else pa.array(is_null)
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1], mask=mask)


def vectors_of(rows: pa.RecordBatch | pa.Table) -> np.ndarray:
    """The vectors of a feature table, or of a batch of it: float32 (num_rows, dim)."""
    column = rows["vector"].combine_chunks() if isinstance(rows, pa.Table) else rows["vector"]
    return column.flatten().to_numpy().reshape(len(column), column.type.list_size)
