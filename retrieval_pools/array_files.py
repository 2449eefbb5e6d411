"""One-dimensional `.npy` files written and read piece by piece, byte for byte those of `np.save`.

Owns nothing but the files: knows neither pools nor what the arrays mean.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

CHUNK_VALUES = 1 << 18
_format = np.lib.format


class ArrayWriter:
    """An array that is written as it is made; its length is known when it is closed. Use it in a `with` block.

    The block closes the file.
    """

    def __init__(self, path: Path, dtype: np.dtype | str) -> None:
        self.path, self.dtype, self.length = path, np.dtype(dtype), 0
        self._file = open(path, "wb")  # noqa: SIM115
        self._write_header()

    def write(self, values: np.ndarray) -> None:
        """Append values, which are cast to the array's dtype. Raises OSError when the disk is full."""
        self._file.write(memoryview(np.ascontiguousarray(values, self.dtype)).cast("B"))
        self.length += len(values)

    def flush(self) -> None:
        """Make what was written visible in the file, whose header then tells its length so far."""
        self._file.seek(0)
        self._write_header()
        self._file.seek(0, 2)
        self._file.flush()

    def _write_header(self) -> None:
        # numpy pads headers so that another length fits in the same place
        header = {"descr": _format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        _format.write_array_header_1_0(self._file, header)

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
        _format.read_magic(file)
        (length,), _, dtype = _format.read_array_header_1_0(file)
        for place in range(0, length, CHUNK_VALUES):
            yield np.fromfile(file, dtype, min(CHUNK_VALUES, length - place))


def map_array(path: Path) -> np.ndarray:
    """The array of a file, memory-mapped and read-only; in memory when it is empty."""
    mapped = (
        np.load(path, mmap_mode="r", allow_pickle=False) if _num_values(path) else np.load(path, allow_pickle=False)
    )
    array = np.asarray(mapped)
    array.flags.writeable = False
    return array


def _num_values(path: Path) -> int:
    with open(path, "rb") as file:
        _format.read_magic(file)
        return _format.read_array_header_1_0(file)[0][0]
