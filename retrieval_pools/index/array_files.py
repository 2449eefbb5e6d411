"""One-dimensional `.npy` files written and read piece by piece, byte for byte those of `np.save`.

Owns nothing but the files: knows neither pools nor what the arrays mean.
"""

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

CHUNK_VALUES = 1 << 17
BLOCK_BYTES = 2 << 20  # written at once, each at a multiple of it: so Linux keeps a file in large pages, if it can
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
