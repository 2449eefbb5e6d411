"""Keeping a mapped pool in memory: its pages are asked for before the first draft needs them.

A draft reads some hundred far places. Where each of them first has to come from the disk, or has no entry in the page
table, drafts take up to milliseconds. The pages are the page cache's: all processes of a machine share them, and the
kernel takes them back when it needs them. Knows nothing of what the arrays mean.
"""

import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np

MOST_OF_AVAILABLE = 0.25  # of the memory that is to be had: a larger pool is left where it is
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python's mmap has no name for
_MEMORY_INFO = Path("/proc/meminfo")
_GROUP_MEMORY = Path("/sys/fs/cgroup")


def make_resident(arrays: Iterable[np.ndarray]) -> bool:
    """Have the pages of mapped arrays read and mapped, in large pages where the file system has them.

    Nothing happens where they are more than MOST_OF_AVAILABLE of the memory that is to be had. Arrays hold the same
    either way.

    Parameters
    ----------
    arrays : those that are not memory-mapped are passed over.

    Returns
    -------
    bool
        Whether the pages are there now.
    """
    mapped = [found for array in arrays if (found := _mapped_file(array)) is not None]
    available = available_bytes()
    if available is None or sum(map(len, mapped)) > MOST_OF_AVAILABLE * available:
        return False
    for file in mapped:
        _ask_for(file)
        _touch(file)
    return True


def available_bytes(memory_info: Path = _MEMORY_INFO, group: Path = _GROUP_MEMORY) -> int | None:
    """Memory that may be used without swapping, the page cache counted as free; None where nothing tells.

    Parameters
    ----------
    memory_info : what the kernel says of the machine.
    group : what it says of the container, version 2 of control groups; it may not be there.
    """
    try:
        lines = memory_info.read_text(encoding="ascii").splitlines()
        of_machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = next(int(line.split()[1]) for line in stat if line.startswith("file "))
    except (OSError, StopIteration, ValueError):
        return of_machine
    return of_machine if limit == "max" else max(0, min(of_machine, int(limit) - used + cached))


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
