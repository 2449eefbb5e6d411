"""Files and folders that appear whole or not at all, and replace earlier ones in one step.

They are written under a temporary name next to the target, synced, then renamed to it. A process that dies in between
leaves at most a `.tmp` name, which readers ignore. If the file system cannot exchange two folders, the earlier folder
has a `.replaced` name for a moment; if the process dies in that moment, the next writer moves it back.
"""

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from laserbatch.pipeline.errors import ConfigError, WorkspaceError
from laserbatch.retrieval_pools.atomic import TEMPORARY_SUFFIX, atomic_path, naming, sync, temporary_beside
from laserbatch.retrieval_pools.atomic import copy_mode as copy_mode
from laserbatch.retrieval_pools.atomic import freed_bytes as freed_bytes
from laserbatch.retrieval_pools.atomic import paths_below as paths_below
from laserbatch.retrieval_pools.atomic import remove as remove
from laserbatch.retrieval_pools.atomic import remove_folder as remove_folder
from laserbatch.retrieval_pools.atomic import sha256_file as sha256_file
from laserbatch.retrieval_pools.atomic import size_bytes as size_bytes

REPLACED_SUFFIX = ".replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux's renameat2
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name by a hard link, or copy it if the file system has no hard links.

    Only for files that are never changed in place: this module replaces files as a whole.
    """
    if target.exists() and target.samefile(source):
        return
    with atomic_path(target) as temporary:
        try:
            os.link(source.resolve(), temporary)  # otherwise a symlink itself would be linked
        except OSError:
            shutil.copyfile(source, temporary)
            with suppress(OSError):  # such a file system may have no modes either
                shutil.copystat(source, temporary)


@contextmanager
def atomic_folder(path: Path | str, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to fill, which becomes `path` unless the block raises an error.

    Raises ConfigError if `path` is not empty and `overwrite` False, a file, or the current folder or above it.
    """
    path = Path(path)
    if path.is_symlink():
        path = path.resolve()  # the folder that the link names is replaced, and the link stays
    if Path.cwd().is_relative_to(path.resolve()):
        raise ConfigError(f"{path} is the folder that this command runs in, or above it. Give another folder.")
    restore_replaced(path)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; expected a folder to write to, or none. Give another path.")
    _require_free(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    temporary.mkdir()
    try:
        with naming(path, temporary):
            yield temporary
            for folder, _, files in os.walk(temporary):
                for name in files:
                    sync(Path(folder, name))
                sync(Path(folder))
            _require_free(path, overwrite)  # another process may have filled it meanwhile
            if not path.is_dir():
                os.replace(temporary, path)
            elif _exchange(temporary, path):
                sync(path.parent)
                shutil.rmtree(temporary)  # now the earlier folder
            else:
                replaced = temporary.with_suffix(REPLACED_SUFFIX)
                os.replace(path, replaced)
                os.replace(temporary, path)
                sync(path.parent)
                shutil.rmtree(replaced)
            sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _require_free(path: Path, overwrite: bool) -> None:
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise ConfigError(f"{path} is there already and not empty. Give another folder, or pass --overwrite.")


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; returns False if this system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(second))


def folders_beside(path: Path, suffix: str) -> list[Path]:
    """The folders of a path with REPLACED_SUFFIX, which a killed writer moved out of the way and did not delete.

    With TEMPORARY_SUFFIX those that a killed writer left, or that a writer still fills.
    """
    start = f".{path.name}."
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted(folder for folder in beside if folder.name.startswith(start) and folder.suffix == suffix)


def restore_replaced(path: Path) -> None:
    """Move the folder that a killed writer moved out of the way back; delete those whose successor is there.

    Call it only while no other process writes `path`.
    """
    replaced = folders_beside(path, REPLACED_SUFFIX)
    if replaced and not path.exists():
        os.replace(replaced.pop(), path)
    for folder in replaced:
        shutil.rmtree(folder)


def leftovers(folder: Path | str) -> list[Path]:
    """The outermost temporary files and folders that killed writers left anywhere under a folder."""
    paths = sorted(path for path in paths_below(folder) if path.match(f".*{TEMPORARY_SUFFIX}"))
    return [path for path in paths if not any(other in path.parents for other in paths)]


def remove_leftovers(folder: Path | str) -> int:
    """Delete the temporary files that killed writers left anywhere under a folder; returns the number of paths.

    Call it only while no other process writes there (the workspace's lock is held).
    """
    paths = leftovers(folder)
    for path in paths:
        remove(path)
    return len(paths)


def canonical_json(data: Mapping) -> str:
    """JSON with sorted keys and no spaces, for hashing: equal data give equal text. NaN is refused."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)


def write_json(data: Mapping, path: Path | str) -> None:
    """Write a mapping as indented JSON, atomically, in the order of its keys. Raises ValueError for NaN."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    write_text(text + "\n", path)


def write_text(text: str, path: Path | str) -> None:
    """Write a UTF-8 text file, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode())


def share_weights(beside: Path) -> None:
    """Give weights in and below a file's folder its mode; safetensors ignores the umask and makes them private."""
    for path in beside.parent.rglob("*.safetensors"):
        copy_mode(beside, path)


def require_sha256(path: Path, sha256: str, otherwise: str = "") -> None:
    """Raise WorkspaceError if a file is missing or is not as its run recorded it; `otherwise` as in `read_json`."""
    if not path.exists() or sha256_file(path) != sha256:
        fault = f"is damaged or was changed: its SHA-256 is not {sha256[:12]}..., as its run recorded it"
        raise WorkspaceError(f"{path} {fault if path.exists() else 'is missing'}. Restore it from a copy{otherwise}.")


def read_json(path: Path | str, otherwise: str = "") -> dict:
    """Read a JSON object. Raises WorkspaceError if the file is missing or does not hold one.

    `otherwise`, ", or ...", tells the user what to do if there is no copy of the file.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError(f"it holds a {type(data).__name__}")
    except FileNotFoundError:
        raise WorkspaceError(
            f"{path} is missing; expected the JSON file that a run writes there. Restore it from a copy{otherwise}."
        ) from None
    except ValueError as error:
        raise WorkspaceError(
            f"{path} is damaged: {error}; expected a JSON object. Restore it from a copy{otherwise}."
        ) from None
    return data
