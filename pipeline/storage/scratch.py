"""Temporary folders (in TMPDIR) that hold personal data; those of a killed process are removed by the next one.

A folder is locked (flock) for as long as its process lives, so a folder that can be locked belongs to a process that is
gone. On a file system without flock such folders stay: there it is unknown whether their process lives.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

PREFIX = "laserbatch-scratch-"
RAY_PREFIX = "laserbatch-ray-"  # for folders of Ray's own files, whose paths must be short
MIN_AGE_S = 60  # a younger folder may belong to a process that has not locked it yet


class ScratchFolder:
    """A new folder in the temporary folder; it is deleted by `remove`, at the end of a `with` block, or of the process.

    Folders of dead processes are removed first, so that at most those of the last command are there. `within` is
    another folder to make it in, and `prefix` the beginning of its name.
    """

    def __init__(self, purpose: str, within: str | None = None, prefix: str | None = None) -> None:
        remove_dead_scratch()
        prefix = prefix or f"{PREFIX}{purpose}-"
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, dir=within, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # without flock other processes cannot lock it either, and leave it alone
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Delete the folder; may be called again."""
        self._folder.cleanup()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_dead_scratch(
    within: Sequence[str] = (), prefix: str = PREFIX, on_wait: Callable[[float], object] | None = None
) -> int:
    """Delete scratch folders whose process is gone, in the temporary folder or in others; returns their number.

    A folder without a lock that is younger than MIN_AGE_S stays. With `on_wait` this waits until it is old enough, and
    calls that with the number of seconds.
    """
    folders = map(Path, within or [tempfile.gettempdir()])
    ages = {path: _unlocked_age_s(path) for folder in folders for path in sorted(folder.glob(f"{prefix}*"))}
    young = [path for path, age in ages.items() if age is not None and age < MIN_AGE_S]
    dead = [path for path, age in ages.items() if age is not None and age >= MIN_AGE_S]
    if on_wait is not None and young:
        on_wait(wait_s := MIN_AGE_S - min(ages[path] or 0 for path in young))
        time.sleep(wait_s)
        dead += [path for path in young if _unlocked_age_s(path) is not None]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return sum(not path.exists() for path in dead)


def _unlocked_age_s(path: Path) -> float | None:
    """The age of a folder that no process locks; None if one does, or if that is unknown.

    Unknown are folders of other users, and all folders on a file system without flock.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return max(0.0, time.time() - os.fstat(descriptor).st_mtime)
    except OSError:
        return None
    finally:
        os.close(descriptor)
