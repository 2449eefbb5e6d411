"""One-dimensional arrays in files: written and read piece by piece, worked on in threads, kept in memory.

The files are `.npy`, byte for byte those of `np.save`.
"""

import io
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeVar

import numpy as np

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK_VALUES = 1 << 17
BLOCK_BYTES = 2 << 20  # written at once, each at a multiple of it: so Linux keeps a file in large pages, if it can
MAX_THREADS = 2  # of each step of a build; what each has in hand is in memory, and the reader is one thread
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python's mmap has no name for
_format = np.lib.format
# numpy parses a header as Python, which CPython 3.11 sometimes fails at while another thread parses too.
_header_lock = threading.Lock()


class ArrayWriter:
    """An array that is written as it is made; its length is known when it is closed. Use it in a `with` block.

    The block closes the file.
    """

    def __init__(self, path: Path, dtype: np.dtype | str) -> None:
        self.path, self.dtype, self.length = path, np.dtype(dtype), 0
        self._file = open(path, "wb")  # noqa: SIM115
        self._pending = bytearray(self._header())
        self._num_bytes = len(self._pending)

    def write(self, values: np.ndarray) -> None:
        """Append values, which are cast to the array's dtype. Raises OSError when the disk is full."""
        data = memoryview(np.ascontiguousarray(values, self.dtype)).cast("B")
        room = BLOCK_BYTES - self._num_bytes % BLOCK_BYTES
        if len(data) < room:
            self._pending += data
        else:
            end = room + (len(data) - room) // BLOCK_BYTES * BLOCK_BYTES
            self._pending += data[:room]
            self._write_pending()
            self._file.write(data[room:end])
            self._pending += data[end:]
        self._num_bytes += len(data)
        self.length += len(values)

    def flush(self) -> None:
        """Make what was written visible in the file, whose header then tells its length so far."""
        self._write_pending()
        self._file.seek(0)
        self._file.write(self._header())
        self._file.seek(0, 2)
        self._file.flush()

    def _write_pending(self) -> None:
        self._file.write(self._pending)
        self._pending.clear()

    def _header(self) -> bytes:
        # numpy pads headers so that another length fits in the same place
        header = {"descr": _format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        written = io.BytesIO()
        _format.write_array_header_1_0(written, header)
        return written.getvalue()

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self.flush()


def read_chunks(path: Path) -> Iterator[np.ndarray]:
    """The array of a file in pieces of at most CHUNK_VALUES, one of them in memory at a time."""
    with open(path, "rb") as file:
        with _header_lock:
            (length,), dtype = _read_header(file)
        for place in range(0, length, CHUNK_VALUES):
            yield np.fromfile(file, dtype, min(CHUNK_VALUES, length - place))


def map_array(path: Path) -> np.ndarray:
    """The array of a file, memory-mapped and read-only; in memory when it is empty.

    Raises
    ------
    ValueError, EOFError : the file is no array.
    """
    with _header_lock:
        with open(path, "rb") as file:
            shape, _ = _read_header(file)
        array = np.asarray(np.load(path, mmap_mode=None if 0 in shape else "r", allow_pickle=False))
    array.flags.writeable = False
    return array


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    _format.read_magic(file)
    shape, _, dtype = _format.read_array_header_1_0(file)
    return shape, dtype


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map`, ahead of who reads it by one result a thread and no more: that much is in memory beside what is read.

    Items are taken by the reader's thread, when it asks for a result. An error of the function is raised in the place
    of its result. Where the process may use one core only, this is `map`.
    """
    num_threads = min(_num_usable_cores(), MAX_THREADS)
    if num_threads == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="pool-build") as threads:
        underway = deque()
        for item in items:
            underway.append(threads.submit(function, item))
            if len(underway) > num_threads:
                yield underway.popleft().result()
        while underway:
            yield underway.popleft().result()


def _num_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def make_resident(arrays: Iterable[np.ndarray], max_bytes: int) -> bool:
    """Have the pages of mapped arrays read and mapped before they are needed; the arrays hold the same either way.

    A draft reads some hundred far places. Where each of them first has to come from the disk, or has no entry in the
    page table, drafts take up to milliseconds. The pages are the page cache's: all processes of a machine share them,
    and the kernel takes them back when it needs them. In large pages, where the file system has them, a draft takes a
    tenth less: a file has them as it was written, and when it is read from the disk for here.

    Parameters
    ----------
    arrays : those that are not memory-mapped are passed over.
    max_bytes : nothing happens where they are more.

    Returns
    -------
    bool
        Whether the pages are there now.
    """
    mapped = [found for array in arrays if (found := _mapped_file(array)) is not None]
    if sum(map(len, mapped)) > max_bytes:
        return False
    for file in mapped:
        _advise(file, "MADV_HUGEPAGE")
        if not _advise(file, _POPULATE_READ):
            _advise(file, "MADV_WILLNEED")  # older kernels read ahead, but map nothing
        # A byte of each page: in a virtual machine the host maps what the disk wrote when it is first read.
        np.frombuffer(file, np.uint8)[:: mmap.PAGESIZE].max()
    return True


def _mapped_file(array: np.ndarray) -> mmap.mmap | None:
    owner = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, mmap.mmap) else None


def _advise(file: mmap.mmap, advice: int | str) -> bool:
    try:
        file.madvise(advice if isinstance(advice, int) else getattr(mmap, advice))
    except (AttributeError, OSError):  # a system or a kernel without it
        return False
    return True
