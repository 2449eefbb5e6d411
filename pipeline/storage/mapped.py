"""Arrays and tables in mapped files without a name, which are gone with what lies in them.

Their memory is not the process's own: the kernel writes it to disk where it is short.
"""

import math
import mmap
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class MappedFiles:
    """Makes arrays and tables in files of a folder; None: in plain memory."""

    folder: Path | None
    mappings: list[mmap.mmap] = field(default_factory=list)  # of those that `release` is about

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array to write into. Raises OSError where the disk has no room for it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.folder is None or not num_bytes:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk would kill who writes into the mapping
            mapped = mmap.mmap(file.fileno(), num_bytes)
        self.mappings.append(mapped)
        return np.frombuffer(mapped, dtype).reshape(shape)

    def table(self, table: pa.Table) -> pa.Table:
        """The same table."""
        if self.folder is None or not table.num_rows:
            return table
        with tempfile.TemporaryFile(dir=self.folder) as file:
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
