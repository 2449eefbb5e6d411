"""Columns that grow with the number of entities, as arrays in files without a name (see `retrieval_pools.mapped`)."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.storage.parquet import large_type
from laserbatch.retrieval_pools.mapped import GrowingArray


def mapped_column(chunks: Iterable[pa.Array], folder: Path | None, kind: pa.DataType | None = None) -> pa.Array:
    """The values of all chunks as one array; see `mapped_columns`."""
    return mapped_columns(([chunk] for chunk in chunks), folder, [kind])[0]


def mapped_columns(
    batches: Iterable[Sequence[pa.Array]], folder: Path | None, kinds: Sequence[pa.DataType | None]
) -> list[pa.Array]:
    """The columns of all batches, each as one array, in files of a folder; None: in memory. Values must not be null.

    `kinds` are the arrays' types: numbers, large strings or large lists of numbers; None: the large type of the first
    batch's column, or the null type if there is no batch. Raises OSError if the disk is full.
    """
    with ExitStack() as files:
        columns = [_Column(kind, folder, files) for kind in kinds]
        for batch in batches:
            for column, chunk in zip(columns, batch, strict=True):
                column.append(chunk)
        return [column.array() for column in columns]


class _Column:
    """A column whose values go to a growing array, and their bounds, if they differ in size, to another."""

    def __init__(self, kind: pa.DataType | None, folder: Path | None, files: ExitStack) -> None:
        self._kind, self._length, self._total = kind, 0, 0
        self._values, self._ends = GrowingArray(folder, files), GrowingArray(folder, files)

    def append(self, chunk: pa.Array) -> None:
        self._kind = self._kind or large_type(chunk.type)
        column, self._length = chunk.cast(self._kind), self._length + len(chunk)
        if pa.types.is_primitive(self._kind):
            return self._values.append(column.to_numpy())
        _, offsets, *_ = column.buffers()
        bounds = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        self._ends.append(bounds[:-1] - bounds[0] + self._total)
        is_list = pa.types.is_large_list(self._kind)
        values = column.values.to_numpy() if is_list else np.frombuffer(column.buffers()[2] or b"", np.uint8)
        self._values.append(values[bounds[0] : bounds[-1]])
        self._total += int(bounds[-1] - bounds[0])

    def array(self) -> pa.Array:
        if not self._length or self._kind is None:
            return pa.nulls(0, self._kind or pa.null())
        data = pa.py_buffer(self._values.array())
        if pa.types.is_primitive(self._kind):
            return pa.Array.from_buffers(self._kind, self._length, [None, data])
        self._ends.append(np.array([self._total]))
        offsets = pa.py_buffer(self._ends.array())
        if pa.types.is_large_list(self._kind):
            flat = pa.Array.from_buffers(cast(pa.LargeListType, self._kind).value_type, self._total, [None, data])
            return pa.Array.from_buffers(self._kind, self._length, [None, offsets], children=[flat])
        return pa.Array.from_buffers(self._kind, self._length, [None, offsets, data])
