"""The memory that a process has freed and its allocators still hold."""

import ctypes

import pyarrow as pa


def give_back_memory() -> None:
    """Give what Arrow and the C library have free back to the kernel; where the C library cannot, only Arrow's."""
    pa.default_memory_pool().release_unused()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
