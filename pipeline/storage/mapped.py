"""A column that grows with all entities of a night, as one array in files without a name (`retrieval_pools.mapped`)."""

import mmap
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import IO, cast

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.storage.parquet import large_type
from laserbatch.retrieval_pools.mapped import nameless_file


def mapped_column(chunks: Iterable[pa.Array], folder: Path | None, kind: pa.DataType | None = None) -> pa.Array:
    """The values of all chunks as one array, in files of a folder; None: in memory. None of them is null.

    `kind` is the array's type: numbers, large strings or large lists of numbers; None: the large type of the first
    chunk's, and nulls where there is no chunk. Raises OSError where the disk is full.
    """
    chunks = iter(chunks)
    first = next(chunks, None)
    if first is None:
        return pa.array([], kind or pa.null())
    kind = kind or large_type(first.type)
    if folder is None:
        return pa.chunked_array([chunk.cast(kind) for chunk in (first, *chunks)], kind).combine_chunks()
    with nameless_file(folder) as values, nameless_file(folder) as ends:
        length, total = 0, 0
        _write(ends, np.zeros(1, np.int64))
        for chunk in chain([first], chunks):
            column, length = chunk.cast(kind), length + len(chunk)
            if pa.types.is_primitive(kind):
                _write(values, column.to_numpy())
                continue
            _, offsets, *_ = column.buffers()
            bounds = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
            _write(ends, bounds[1:] - bounds[0] + total)
            _write(values, _flat(column)[bounds[0] : bounds[-1]])
            total += int(bounds[-1] - bounds[0])
        data, offsets = _mapped(values), _mapped(ends)
    if pa.types.is_primitive(kind):
        return pa.Array.from_buffers(kind, length, [None, data])
    if pa.types.is_large_list(kind):
        flat = pa.Array.from_buffers(cast(pa.LargeListType, kind).value_type, total, [None, data])
        return pa.Array.from_buffers(kind, length, [None, offsets], children=[flat])
    return pa.Array.from_buffers(kind, length, [None, offsets, data])


def _flat(column: pa.Array) -> np.ndarray:
    """The values of lists one after another, or the bytes of texts."""
    if pa.types.is_large_list(column.type):
        return column.values.to_numpy()
    return np.frombuffer(column.buffers()[2] or b"", np.uint8)


def _write(file: IO[bytes], values: np.ndarray) -> None:
    file.write(np.ascontiguousarray(values).data)


def _mapped(file: IO[bytes]) -> pa.Buffer:
    file.flush()
    is_empty = not os.fstat(file.fileno()).st_size  # such a file cannot be mapped
    return pa.py_buffer(b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
