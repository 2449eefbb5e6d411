"""Arrays and tables in files without a name, which are gone with them: for what grows with all entities of a night.

The kernel may take the pages of such an array back where memory is short, so a process is not ended for them.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, cast

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.storage.parquet import large_type
from laserbatch.retrieval_pools.atomic import TEMPORARY_SUFFIX, naming


@dataclass(frozen=True)
class MappedFiles:
    """Makes arrays and tables in files of a folder; None: in plain memory. Raises OSError where the disk is full."""

    folder: Path | None
    mappings: list[mmap.mmap] = field(default_factory=list)  # of those that `release` is about

    def empty(self, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
        """An array to write into."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self.folder is None or not num_bytes:
            return np.empty(shape, dtype)
        with _nameless(self.folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk would kill who writes into the mapping
            mapped = mmap.mmap(file.fileno(), num_bytes)
        self.mappings.append(mapped)
        return np.frombuffer(mapped, dtype).reshape(shape)

    def table(self, table: pa.Table) -> pa.Table:
        """The same table."""
        if self.folder is None or not table.num_rows:
            return table
        with _nameless(self.folder) as file:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.mappings.append(mapped)
        return pa.ipc.open_file(pa.py_buffer(mapped)).read_all()

    def array(self, values: pa.Array) -> pa.Array:
        """The same array."""
        return self.table(pa.table([values], ["values"]))["values"].chunk(0)

    def release(self) -> None:
        """Let go of the memory of all files, which are read again where they are needed."""
        for mapped in self.mappings:
            mapped.madvise(mmap.MADV_DONTNEED)


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
    with _nameless(folder) as values, _nameless(folder) as ends:
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


@contextmanager
def _nameless(folder: Path) -> Iterator[IO[bytes]]:
    """A file that is gone when nobody maps it; a file system that must name it shows it as a leftover for a moment."""
    with naming(folder, folder), tempfile.TemporaryFile(dir=folder, suffix=TEMPORARY_SUFFIX) as file:
        yield file


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
