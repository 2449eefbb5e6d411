"""Arrays and tables in memory-mapped files without a name, for data that grows with the number of entities of a night.

A file is gone when its arrays are. The kernel can reclaim their pages if memory is short, and so kills no process.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from laserbatch.retrieval_pools.atomic import TEMPORARY_SUFFIX, naming
from laserbatch.retrieval_pools.compiled import cached

ROWS_AT_ONCE = 1024 * 1024  # rows that `by_code` sorts at once, on average


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


class GrowingArray:
    """An array to which parts, (n,) or (n, k), are appended: in a file of a folder (None: in memory).

    Its length need not be known, and writing it costs less than half of storing into a mapped file.
    """

    def __init__(self, folder: Path | None, files: ExitStack) -> None:
        self._file = folder and files.enter_context(nameless_file(folder))
        self._parts = list[np.ndarray]()

    def append(self, values: np.ndarray) -> None:
        if self._file:
            self._file.write(np.ascontiguousarray(values).data)
            values = np.empty((0, *values.shape[1:]), values.dtype)
        self._parts.append(values)

    def array(self) -> np.ndarray:
        """All parts; at least one was appended."""
        values = np.concatenate(self._parts) if not self._file else self._parts[0]
        if not self._file or not self._file.tell():
            return values
        self._file.flush()
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, values.dtype).reshape(-1, *values.shape[1:])


def by_code(
    parts: Iterable[tuple[np.ndarray, Sequence[np.ndarray]]], num_codes: int, max_rows: int, folder: Path | None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Group rows by their codes, which are from 0 to `num_codes` - 1; rows of one code stay in the order of the parts.

    Each part has the codes of its rows, (n,), and their columns, (n,) or (n, k). There is at least one part, and about
    `max_rows` rows at most. Returns where the rows of each code begin and the last end, int64[num_codes + 1], and the
    columns in the order of codes, in files of `folder` (None: in memory).

    Each part is sorted by ranges of codes and written; then each range is read from all parts and sorted by code. So
    nothing is read or written in random order, which costs several times as much once the rows fit into no cache.
    """
    shift = max(num_codes * ROWS_AT_ONCE // max(max_rows, 1), 1).bit_length() - 1
    num_ranges, bounds, num_rows = (num_codes >> shift) + 1, list[np.ndarray](), 0
    with ExitStack() as files:
        stored, ordered = list[GrowingArray](), list[GrowingArray]()
        for codes, columns in parts:
            order, ends = _stable_order(codes, 0, shift, num_ranges)
            stored = stored or [GrowingArray(folder, files) for _ in (codes, *columns)]
            for kept, values in zip(stored, (codes, *columns), strict=True):
                kept.append(values[order])
            bounds.append(num_rows + np.concatenate([[0], ends]))
            num_rows += len(codes)
        by_part, starts = [kept.array() for kept in stored], np.zeros(num_codes + 1, np.int64)
        ordered = [GrowingArray(folder, files) for _ in by_part[1:]]
        for number, of_range in enumerate(zip(*(pairwise(of_part.tolist()) for of_part in bounds), strict=True)):
            codes, *columns = (np.concatenate([values[start:stop] for start, stop in of_range]) for values in by_part)
            first = number << shift
            order, ends = _stable_order(codes, first, 0, min(1 << shift, num_codes - first))
            starts[first + 1 :][: len(ends)] = starts[first] + ends
            for kept, values in zip(ordered, columns, strict=True):
                kept.append(values[order])
        return starts, [kept.array() for kept in ordered]


@cached()
def _stable_order(codes, base, shift, num_keys):
    """The stable order of codes by their keys, `code - base >> shift`, and where each key ends in it: int64, both."""
    ends = np.zeros(num_keys, np.int64)
    for code in codes:
        ends[(code - base) >> shift] += 1
    place = np.cumsum(ends) - ends
    order = np.empty(len(codes), np.int64)
    for row in range(len(codes)):
        key = (codes[row] - base) >> shift
        order[place[key]] = row
        place[key] += 1
    return order, place


@contextmanager
def nameless_file(folder: Path) -> Iterator[IO[bytes]]:
    """A file that is gone when it is not mapped any more. On some file systems it shortly has a name, with `.tmp`."""
    with naming(folder, folder), tempfile.TemporaryFile(dir=folder, suffix=TEMPORARY_SUFFIX) as file:
        yield file
