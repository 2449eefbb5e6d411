"""The lock of a workspace, for one writer at a time, and asking whether a process holds it."""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from laserbatch.pipeline.errors import WorkspaceBusy, WorkspaceError

logger = logging.getLogger("laserbatch.storage")

NUM_TRIES, RETRY_AFTER_S = 5, 0.02  # while the lock is held


@contextmanager
def hold_lock(root: Path) -> Iterator[None]:
    """Hold the workspace in `root` for writing. Raises WorkspaceBusy, with pid and host, if another process holds it.

    The kernel holds the lock (flock) for as long as this process lives, so the lock of a dead process is free at once.
    The file names the holder, for people. It is never deleted: that could remove another process's lock.
    """
    descriptor = os.open(root / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _take(descriptor)
        except BlockingIOError:
            holder = _holder(descriptor) or "another process"
            raise WorkspaceBusy(
                f"the workspace {root} is in use by {holder}, or by workers that it left; wait for it to end, then "
                "give the command again."
            ) from None
        except OSError as error:
            raise WorkspaceError(
                f"{root} cannot be locked ({error}); expected a file system that supports flock. "
                "Put the workspace on a local disk or on NFS 4."
            ) from None
        left_by = _holder(descriptor)
        if left_by:
            logger.warning("the lock of %s was left by %s, which has ended; it is taken over", root, left_by)
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # on a full disk: the text is only for people, and `pools gc` must be able to make room
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> None:
    """Lock a file for writing. Raises BlockingIOError if it stays held; `status` holds it only for a moment."""
    for _ in range(NUM_TRIES - 1):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(RETRY_AFTER_S)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def probe_lock(path: Path) -> Literal["held", "free", "unknown"]:
    """Ask the file system whether a process holds a lock file, by taking the lock for the duration of the call.

    "held" is certain; "free" is certain only for this host. "unknown": the file cannot be opened, or there is no flock.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return "unknown"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError:
        return "unknown"
    finally:
        os.close(descriptor)
    return "free"


def _holder(descriptor: int) -> str:
    """The holder that the lock file names; empty if there is none, or it was killed before it wrote its name."""
    return os.pread(descriptor, 300, 0).decode(errors="replace").strip("\0")
