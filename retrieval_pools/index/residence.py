"""Keeping a mapped pool in memory: its pages are asked for before the first draft needs them.

A draft reads some hundred far places. Where each of them first has to come from the disk, or has no entry in the page
table, drafts take up to milliseconds. The pages are the page cache's: all processes of a machine share them, and the
kernel takes them back when it needs them. In large pages a draft takes a tenth less: a file has them as it was written,
and when it is read from the disk for here; in small ones what others had read before stays. Knows nothing of what the
arrays mean.
"""

import mmap
from collections.abc import Iterable

import numpy as np

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python's mmap has no name for


def make_resident(arrays: Iterable[np.ndarray], max_bytes: int) -> bool:
    """Have the pages of mapped arrays read and mapped, in large pages where the file system has them.

    Arrays hold the same either way.

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
        _ask_for(file)
        _touch(file)
    return True


def _mapped_file(array: np.ndarray) -> mmap.mmap | None:
    owner = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, mmap.mmap) else None


def _ask_for(file: mmap.mmap) -> None:
    _advise(file, "MADV_HUGEPAGE")
    if not _advise(file, _POPULATE_READ):
        _advise(file, "MADV_WILLNEED")  # older kernels read ahead, but map nothing


def _touch(file: mmap.mmap) -> None:
    """Read a byte of each page: in a virtual machine the host maps what the disk wrote when it is first read."""
    np.frombuffer(file, np.uint8)[:: mmap.PAGESIZE].max()


def _advise(file: mmap.mmap, advice: int | str) -> bool:
    try:
        file.madvise(advice if isinstance(advice, int) else getattr(mmap, advice))
    except (AttributeError, OSError):  # a system or a kernel without it
        return False
    return True
