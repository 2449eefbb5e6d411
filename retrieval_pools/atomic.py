"""Files that appear whole or not at all, and replace earlier ones in one step.

A file is written under a temporary name next to its target, synced, and renamed to the target. A process that dies in
between leaves at most a `.tmp` name, which readers ignore.
"""

import hashlib
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"


def temporary_beside(path: Path) -> Path:
    """A unique temporary name next to `path`, for a file or folder that will be renamed to `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


@contextmanager
def naming(path: Path, temporary: Path) -> Iterator[None]:
    """Make an OSError of the block name `path` if it names `temporary` or, as a write to an open file does, no file."""
    try:
        yield
    except OSError as error:
        error.filename = str(error.filename or path).replace(str(temporary), str(path))
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def paths_below(folder: Path | str, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files and folders below a folder, also those that links lead to; a link to a folder `above` is not followed."""
    above |= {os.path.realpath(folder)}
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        yield path
        if path.is_dir() and not (path.is_symlink() and os.path.realpath(path) in above):
            yield from paths_below(path, above)


def copy_mode(source: Path, target: Path) -> None:
    """Give a file the mode of another one, on a file system that has modes."""
    with suppress(OSError):
        shutil.copymode(source, target)


def remove_folder(path: Path) -> None:
    """Delete a folder, which disappears in one step; a process that dies in between leaves a `.tmp` name."""
    removed = temporary_beside(path)
    os.replace(path, removed)
    remove(removed)


def remove(path: Path) -> None:
    """Delete a file or a folder, and the folder that a link leads to; a missing path is not an error."""
    if path.is_symlink() and path.is_dir():
        shutil.rmtree(path.resolve())
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of all files under a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def freed_bytes(paths: Iterable[Path]) -> int:
    """The bytes that removing files and folders frees; a file with further hard links elsewhere frees none."""
    files = (file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if not file.is_dir())
    found = Counter((status.st_dev, status.st_ino, status.st_size, status.st_nlink) for status in map(os.lstat, files))
    return sum(size for (_, _, size, num_links), num_found in found.items() if num_found >= num_links)


def sha256_file(path: Path | str) -> str:
    """Hex SHA-256 of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path where the block must create a file, which is renamed to `path` unless the block raises."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        with naming(path, temporary):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):  # on a read-only file system it would hide the error that matters
            temporary.unlink(missing_ok=True)
        raise
