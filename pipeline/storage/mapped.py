"""Columns that grow with the number of entities, as arrays in files without a name (see `retrieval_pools.mapped`)."""

import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, cast

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.storage.parquet import large_type
from laserbatch.retrieval_pools.mapped import nameless_file


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
    """A column whose values are written to a file, and their bounds, if they differ in size, to another."""

    def __init__(self, kind: pa.DataType | None, folder: Path | None, files: ExitStack) -> None:
        self._kind, self._chunks = kind, list[pa.Array]()
        self._files = folder and [files.enter_context(nameless_file(folder)) for _ in ("values", "ends")]
        self._length = self._total = 0

    def append(self, chunk: pa.Array) -> None:
        self._kind = self._kind or large_type(chunk.type)
        column, self._length = chunk.cast(self._kind), self._length + len(chunk)
        if not self._files:
            self._chunks.append(column)
        elif pa.types.is_primitive(self._kind):
            _write(self._files[0], column.to_numpy())
        else:
            _, offsets, *_ = column.buffers()
            bounds = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
            _write(self._files[1], bounds[:-1] - bounds[0] + self._total)
            is_list = pa.types.is_large_list(self._kind)
            values = column.values.to_numpy() if is_list else np.frombuffer(column.buffers()[2] or b"", np.uint8)
            _write(self._files[0], values[bounds[0] : bounds[-1]])
            self._total += int(bounds[-1] - bounds[0])

    def array(self) -> pa.Array:
        kind = self._kind or pa.null()
        if not self._files or pa.types.is_null(kind):
            return pa.chunked_array(self._chunks, kind).combine_chunks()
        values, ends = self._files
        if pa.types.is_primitive(kind):
            return pa.Array.from_buffers(kind, self._length, [None, _mapped(values)])
        _write(ends, np.array([self._total]))
        data, offsets = _mapped(values), _mapped(ends)
        if pa.types.is_large_list(kind):
            flat = pa.Array.from_buffers(cast(pa.LargeListType, kind).value_type, self._total, [None, data])
            return pa.Array.from_buffers(kind, self._length, [None, offsets], children=[flat])
        return pa.Array.from_buffers(kind, self._length, [None, offsets, data])


def _write(file: IO[bytes], values: np.ndarray) -> None:
    file.write(np.ascontiguousarray(values).data)


def _mapped(file: IO[bytes]) -> pa.Buffer:
    file.flush()
    is_empty = not os.fstat(file.fileno()).st_size  # such a file cannot be mapped
    return pa.py_buffer(b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
