"""One-dimensional arrays in files: writing and reading in pieces, mapping, working in threads, keeping in memory.

The files are `.npy` files with the same bytes as those of `np.save`.
"""

import io
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import DTypeLike

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK_VALUES = 1 << 17
NUM_THREADS = 2  # threads of each step of a build; each has a piece in memory, and a single thread reads the results
_format = np.lib.format
# numpy parses a header as Python code, which sometimes fails in CPython 3.11 while another thread parses too.
_header_lock = threading.Lock()


class ArrayWriter:
    """Writes an array to a file piece by piece. The end of the `with` block writes its length and closes the file."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self._dtype, self._length = np.dtype(dtype), 0
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        self._file.write(self._header())

    def write(self, values: np.ndarray) -> None:
        """Append values, which are cast to the array's dtype. Raises OSError when the disk is full."""
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self._length += len(values)

    def _header(self) -> bytes:
        # numpy pads headers so that another length fits in the same place
        header = {"descr": _format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self._length,)}
        written = io.BytesIO()
        _format.write_array_header_1_0(written, header)
        return written.getvalue()

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._file:
            if error is None:
                self._file.seek(0)
                self._file.write(self._header())


def read_chunks(path: Path) -> Iterator[np.ndarray]:
    """Yield the array of a file in pieces of at most CHUNK_VALUES values, one of them in memory at a time."""
    with open(path, "rb") as file:
        with _header_lock:
            (length,), dtype = _read_header(file)
        for place in range(0, length, CHUNK_VALUES):
            yield np.fromfile(file, dtype, min(CHUNK_VALUES, length - place))


def map_array(path: Path) -> np.ndarray:
    """The array of a file, read-only and memory-mapped (an empty one is in plain memory).

    Raises ValueError or EOFError if the file is not an array.
    """
    with _header_lock:
        with open(path, "rb") as file:
            shape, _ = _read_header(file)
        array = np.asarray(np.load(path, mmap_mode=None if 0 in shape else "r", allow_pickle=False))
    array.flags.writeable = False
    return array


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    _format.read_magic(file)
    try:
        shape, _, dtype = _format.read_array_header_1_0(file)
    except TokenError as error:  # numpy does not catch it
        raise ValueError(f"its header cannot be read: {error}") from None
    return shape, dtype


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map` in NUM_THREADS threads, at most NUM_THREADS results ahead of the reader, which limits the memory.

    The reader's thread takes the items, when it asks for a result. An error of the function is raised in place of its
    result.
    """
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pool-build") as threads:
        underway = deque()
        for item in items:
            underway.append(threads.submit(function, item))
            if len(underway) > NUM_THREADS:
                yield underway.popleft().result()
        while underway:
            yield underway.popleft().result()


def make_resident(arrays: Iterable[np.ndarray], max_bytes: int) -> bool:
    """Read the pages of mapped arrays before they are needed, unless they exceed `max_bytes`; returns whether it did.

    A draft reads some hundred places that are far apart. While they still have to come from the disk, or have no entry
    in the page table, a draft takes up to milliseconds. The pages are in the page cache: all processes of a machine
    share them, and the kernel reclaims them when it needs memory.
    """
    mapped = [array for array in arrays if isinstance(_owner(array), mmap.mmap)]
    if sum(array.nbytes for array in mapped) > max_bytes:
        return False
    for array in mapped:
        array.view(np.uint8)[:: mmap.PAGESIZE].max()
    return True


def give_back(*arrays: np.ndarray | None) -> None:
    """Let go of the pages of mapped arrays; they are read again when they are next used."""
    for array in arrays:
        if isinstance(mapped := _owner(array), mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED)


def _owner(array: object) -> object:
    while isinstance(array, np.ndarray):
        array = array.base
    return array
