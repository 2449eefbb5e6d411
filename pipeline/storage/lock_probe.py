"""Whether a process, on whichever host, holds a lock file, as far as its file system tells."""

import fcntl
import os
from pathlib import Path
from typing import Literal

LockState = Literal["held", "free", "unknown"]


def probe_lock(path: Path) -> LockState:
    """Ask the file system whether a process holds the flock of a file; the lock is held for no longer than the call.

    "held" is certain. "free" is certain of this host; of others only where `has_shared_locks`. "unknown": the file
    cannot be opened, or its file system has no flock.
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


def has_shared_locks(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether a lock that another host takes on a file is seen here; False also where that is not known."""
    kind, options = _mount(path, mounts)
    if kind.startswith("nfs"):
        return not options & {"nolock", "local_lock=flock", "local_lock=all"}
    if kind == "lustre":
        return "flock" in options
    # FUSE, 9p, virtiofs and SMB lock on each host for itself, unless they are told otherwise.
    return bool(kind) and not kind.startswith(("fuse", "9p", "virtiofs", "cifs", "smb"))


def _mount(path: Path, mounts: Path) -> tuple[str, set[str]]:
    """Type and options of the file system of a path; nothing where it is not known."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return "", set()
    path, found, longest = path.resolve(), ("", set()), -1
    for line in lines:
        fields, _, of_kind = line.partition(" - ")
        at = Path(fields.split()[4].encode().decode("unicode_escape"))
        if path.is_relative_to(at) and len(at.parts) >= longest:  # of two mounts at one folder the later one counts
            kind, _, options = of_kind.split(" ", 2)
            longest, found = len(at.parts), (kind, {*fields.split()[5].split(","), *options.split(",")})
    return found
