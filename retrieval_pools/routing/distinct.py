"""Rows that the grouping columns cannot tell apart: what is asked of each row's attributes is asked once for all."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

LEVEL_SEPARATOR = "\x1f"


class Column(Protocol):
    """What there is to know of a column, as `attributes.AttributeColumn` has it."""

    name: str
    kind: str
    edges: tuple[float, ...]


def distinct_attributes(entities: pa.Table, columns: Sequence[Column]) -> tuple[np.ndarray, list[dict[str, object]]]:
    """Numbers of rows that are alike, int64[num_rows], and the values of the first row of each number, by column.

    Columns that the table lacks are left out; numbers count from 0 in the order in which rows first have them.
    """
    known = [column for column in columns if column.name in entities.column_names]
    codes = np.zeros(entities.num_rows, np.int64)
    for column in known:
        of_column = _codes(entities[column.name], column)
        codes = _numbered(pa.array(codes * (of_column.max(initial=0) + 1) + of_column))
    first = np.unique(codes, return_index=True)[1]
    if not known:
        return codes, [{} for _ in first]
    return codes, entities.select([column.name for column in known]).take(pa.array(first)).to_pylist()


def _codes(values: pa.ChunkedArray, column: Column) -> np.ndarray:
    """Equal where a column's tokens are, int64[n]; more values than that may be told apart."""
    kind = values.type
    if column.kind == "number" and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        numbers = pc.fill_null(values.cast(pa.float64(), safe=False), np.nan).to_numpy()
        bins = np.searchsorted(np.array(column.edges, np.float64), numbers, side="right")
        return np.where(np.isfinite(numbers), bins + 1, 0).astype(np.int64)
    values = values.combine_chunks()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if not pa.types.is_string(kind.value_type) or values.flatten().null_count:
            values = pa.array([None if row is None else repr(row) for row in values.to_pylist()], pa.string())
        else:
            values = pc.binary_join(values, LEVEL_SEPARATOR)
    return _numbered(values)


def _numbered(values: pa.Array) -> np.ndarray:
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    return pc.fill_null(encoded.indices, len(encoded.dictionary)).to_numpy(zero_copy_only=False).astype(np.int64)
