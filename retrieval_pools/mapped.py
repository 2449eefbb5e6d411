"""Arrays and tables in memory-mapped files without a name, for data that grows with the number of entities of a night.

A file is gone when its arrays are. The kernel can reclaim their pages if memory is short, and so kills no process.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from laserbatch.retrieval_pools.atomic import TEMPORARY_SUFFIX, naming


@dataclass(frozen=True)
class MappedFiles:
    """Makes arrays and tables in files of a folder; None: in plain memory. Raises OSError if the disk is full."""

    folder: Path | None
    mappings: list[mmap.mmap] = field(default_factory=list)  # the mappings whose memory `release` lets go of

    def empty(self, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
        """An array to write into."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self.folder is None or not num_bytes:
            return np.empty(shape, dtype)
        with nameless_file(self.folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # otherwise a write on a full disk kills the process
            mapped = mmap.mmap(file.fileno(), num_bytes)
        self.mappings.append(mapped)
        return np.frombuffer(mapped, dtype).reshape(shape)

    def table(self, table: pa.Table) -> pa.Table:
        if self.folder is None or not table.num_rows:
            return table
        with nameless_file(self.folder) as file:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.mappings.append(mapped)
        return pa.ipc.open_file(pa.py_buffer(mapped)).read_all()

    def array(self, values: pa.Array) -> pa.Array:
        return self.table(pa.table([values], ["values"]))["values"].chunk(0)

    def release(self) -> None:
        """Let go of the memory of all files; pages are read from the files when they are next used."""
        for mapped in self.mappings:
            mapped.madvise(mmap.MADV_DONTNEED)


def by_code(
    parts: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]], num_codes: int, files: MappedFiles
) -> tuple[np.ndarray, np.ndarray]:
    """Group numbers by their codes.

    `parts` is called twice. Each part has codes from 0 to `num_codes` - 1 and as many numbers below 2^32. Returns where
    the numbers of each code begin and the last end, int64[num_codes + 1], and the numbers in the order of their codes,
    uint32[n] in a file. The numbers of a code stay in the order of the parts, and ascend within each part.
    """
    counts = np.zeros(num_codes, np.int64)
    for codes, _ in parts():
        counts += np.bincount(codes, minlength=num_codes)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    ordered, free = files.empty((int(starts[-1]),), np.uint32), starts[:-1].copy()
    for codes, numbers in parts():
        keys = codes.astype(np.int64) << 32 | numbers
        keys.sort()
        codes = keys >> 32
        firsts = np.flatnonzero(np.diff(codes, prepend=-1))
        codes, counts = codes[firsts], np.diff(firsts, append=len(keys))
        ordered[np.repeat(free[codes] - firsts, counts) + np.arange(len(keys))] = keys  # the lower half
        free[codes] += counts
    return starts, ordered


@contextmanager
def nameless_file(folder: Path) -> Iterator[IO[bytes]]:
    """A file that is gone when it is not mapped any more. On some file systems it shortly has a name, with `.tmp`."""
    with naming(folder, folder), tempfile.TemporaryFile(dir=folder, suffix=TEMPORARY_SUFFIX) as file:
        yield file
