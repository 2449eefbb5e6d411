"""All versions of a workspace's pools: published whole, listed, switched between, never changed.

    <root>/CURRENT               the version that the next run opens
    <root>/<version>/user/       a pool; likewise item/; and whatever else the builder puts in (routers)
    <root>/<version>/checksums.json  checksums of all files but the arrays, whose checksums are in the pools' manifests
    <root>/<version>@2/          a whole replacement, published later under the same name

A run opens its pools by version, so versions published meanwhile do not affect it. There is one builder at a time: the
publisher holds the workspace's lock.
"""

from __future__ import annotations  # `list` is a method below

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from laserbatch.retrieval_pools import atomic
from laserbatch.retrieval_pools.errors import OtherPoolFormat, PoolError
from laserbatch.retrieval_pools.index.build import staged_folder, sync_folder
from laserbatch.retrieval_pools.index.manifest import REBUILD, PoolManifest, Side
from laserbatch.retrieval_pools.index.pool import Pool

SIDES: tuple[Side, ...] = ("user", "item")
Result = TypeVar("Result")

CURRENT_NAME = "CURRENT"
CHECKSUMS_NAME = "checksums.json"
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FOLDER = re.compile(rf"{_VERSION.pattern}(?:@\d+)?")


@dataclass(frozen=True)
class PoolVersion:
    """One published version.

    Parameters
    ----------
    pools : the manifests of the sides that have a pool.
    problem : why the version cannot be used, or None. Only manifests and file sizes were checked.
    is_other_format : whether the problem is that another version of laserbatch wrote it.
    """

    version: str
    folder: Path
    is_current: bool
    pools: dict[Side, PoolManifest]
    problem: str | None
    is_other_format: bool = False


@dataclass(frozen=True)
class GcResult:
    """The versions and leftovers that a garbage collection removed, or would remove."""

    versions: tuple[str, ...]  # oldest first
    num_leftovers: int  # number of folders and files that dead builders left
    num_bytes: int  # bytes freed on disk in all


@dataclass(frozen=True)
class PoolStore:
    """The pool versions in a folder, which need not exist yet."""

    root: Path

    def current_version(self) -> str | None:
        """The version that a run should open; None before the first. Raises PoolError if that version is not there."""
        version = self._pointed_to()
        if version is not None and version not in self._folders():
            raise PoolError(
                f"{self.root / CURRENT_NAME} names the pools {version!r}, which do not exist; {self._listed}. "
                "Choose one with `laserbatch pools use VERSION`, or run `laserbatch pools rebuild`."
            )
        return version

    def folder(self, version: str) -> Path:
        """The folder of a version. Raises PoolError if there is none, or one of its published files is missing."""
        return self.read(version, lambda folder: folder)

    def read(self, version: str, read: Callable[[Path], Result], *, verify: bool = False) -> Result:
        """Return the result of a function of a version's folder; it is called again if a rebuild replaces the folder.

        Raises PoolError as `folder` does and, with `verify`, if a file other than an array has changed.
        """
        while True:
            folders = self._folders().get(version)
            if folders is None:
                advice = f"`laserbatch pools rebuild --run {version}` builds the pools of that run"
                raise PoolError(f"there are no pools {version!r} in {self.root}; {self._listed}. {advice}.")
            try:
                _require_files(folders[-1], verify)
                return read(folders[-1])
            except (PoolError, OSError):
                if folders[-1].is_dir():
                    raise

    def open(self, version: str, side: Side, tokenizer_hash: str | None = None, *, verify: bool = False) -> Pool | None:
        """The pool of one side; None if the version has none. Raises PoolError as `read` and `Pool.open` do."""

        def opened(folder: Path) -> Pool | None:
            has_pool = (folder / side).is_dir()
            return Pool.open(folder / side, tokenizer_hash, verify=verify) if has_pool else None

        return self.read(version, opened, verify=verify)

    def verify(self, version: str) -> tuple[Side, ...]:
        """Compare every file with its checksum; PoolError if one differs. Returns the sides that have a pool."""
        return tuple(side for side in SIDES if self.open(version, side, verify=True) is not None)

    def list(self) -> list[PoolVersion]:
        """All versions, sorted by name; names begin with the run's date."""
        current = self._pointed_to()
        folders = self._folders()
        return [self._describe(version, paths[-1], version == current) for version, paths in folders.items()]

    def use(self, version: str) -> None:
        """Verify a version and make it current, for the next run to open; a run that is under way keeps its own."""
        self.verify(version)
        self._point_to(version)

    def use_none_of(self, versions: Collection[str]) -> bool:
        """Remove the pointer to the current version if that is one of `versions`; returns whether it was."""
        is_among = self._pointed_to() in versions
        if is_among:
            (self.root / CURRENT_NAME).unlink()
        return is_among

    def collect(self, keep: int, in_use: Collection[str] = (), dry_run: bool = False) -> GcResult:
        """Remove old versions, and what dead builders left. The workspace's lock must be held.

        A version disappears in one step. Processes of this machine that have mapped its files can go on reading them.

        Parameters
        ----------
        keep : number of the newest versions, by name, that stay, at least 1; the current one is always among them.
        in_use : versions that stay at any age.
        dry_run : remove nothing, only return what would be removed.
        """
        folders = self._folders()
        versions, current = tuple(folders), self._pointed_to()
        newest = [version for version in reversed(versions) if version != current]
        retained = {current, *in_use, *newest[: keep - (current in versions)]}
        old = tuple(version for version in versions if version not in retained)
        leftovers = [*self.root.glob(f".*{atomic.TEMPORARY_SUFFIX}")] if self.root.is_dir() else []
        leftovers += [path for version in versions if version not in old for path in folders[version][:-1]]
        num_bytes = atomic.freed_bytes([*(path for name in old for path in folders[name]), *leftovers])
        if not dry_run:
            for version in old:
                self._remove(version)
            for path in leftovers:
                atomic.remove(path)
        return GcResult(old, len(leftovers), num_bytes)

    def drop(self, version: str) -> None:
        """Remove a version; if it was current, no version is current then. A missing version is not an error."""
        self.use_none_of([version])
        self._remove(version)

    def _remove(self, version: str, but_newest: bool = False) -> None:
        """Remove the folders of a version, the oldest first: if the process dies, no replaced folder is the version."""
        folders = self._folders().get(version, [])
        for folder in folders[:-1] if but_newest else folders:
            atomic.remove_folder(folder)

    @contextmanager
    def publish(self, version: str, make_current: bool = True) -> Iterator[Path]:
        """Yield a folder to build a version's pools in; it is published and made current unless the block raises.

        Publishing the same content again changes only the pointer. Other content under the same name (the version was
        damaged, or of an older format) replaces the old one in one step: readers always find the old or the new one.

        Parameters
        ----------
        version : the name; give it the run's id, which begins with the date and identifies the configuration.
        make_current : False leaves that to a later `use`.

        Yields
        ------
        The folder in which to put `user/` and `item/`, as `build_pool` makes them, and files that belong to them.

        Raises
        ------
        PoolError, OSError
            The name is invalid; or the disk is full, and the published versions are untouched.
        """
        if not _VERSION.fullmatch(version) or version == CURRENT_NAME:
            raise PoolError(f"{version!r} cannot name pools; expected letters, digits, dots, dashes and underscores.")
        with staged_folder(self.root / version) as staging:
            yield staging
            (staging / CHECKSUMS_NAME).unlink(missing_ok=True)  # a hard link to another version's file, which stays
            sums = json.dumps(_content(staging, but=".npy"), indent=1)
            (staging / CHECKSUMS_NAME).write_text(sums + "\n", encoding="utf-8")
            sync_folder(staging)
            self._put(staging, version)
            if make_current:
                self._point_to(version)

    def _put(self, staging: Path, version: str) -> None:
        folders = self._folders().get(version)
        if folders is None:
            os.replace(staging, self.root / version)
        elif _content(staging) != _content(folders[-1]):
            os.replace(staging, self.root / f"{version}@{_number(folders[-1]) + 1}")
        self._remove(version, but_newest=True)

    def _pointed_to(self) -> str | None:
        pointer = self.root / CURRENT_NAME
        return pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else None

    def _point_to(self, version: str) -> None:
        with atomic.atomic_path(self.root / CURRENT_NAME) as temporary:
            temporary.write_text(version + "\n", encoding="utf-8")

    def _describe(self, version: str, folder: Path, is_current: bool) -> PoolVersion:
        pools: dict[Side, PoolManifest] = {}
        problem, is_other_format = None, False
        try:
            for side in SIDES:
                if (pool := self.open(version, side)) is not None:
                    pools[side] = pool.manifest
        except PoolError as error:
            problem, is_other_format = str(error), isinstance(error, OtherPoolFormat)
        return PoolVersion(version, folder, is_current, pools, problem, is_other_format)

    def _folders(self) -> dict[str, list[Path]]:
        """The folders of each version, by its name; the last one is its content and replaced the others."""
        paths = [path for path in self.root.iterdir() if path.is_dir()] if self.root.is_dir() else []
        folders: dict[str, list[Path]] = {}
        for path in sorted((path for path in paths if _FOLDER.fullmatch(path.name)), key=_number):
            folders.setdefault(path.name.partition("@")[0], []).append(path)
        return dict(sorted(folders.items()))

    @property
    def _listed(self) -> str:
        versions = self._folders()
        return f"there are: {', '.join(versions)}" if versions else "there are none"


def _number(folder: Path) -> int:
    return int(folder.name.partition("@")[2] or 1)


def _require_files(folder: Path, verify: bool) -> None:
    """Raise PoolError if one of a version's published files is missing or, with `verify`, has changed."""
    path = folder / CHECKSUMS_NAME
    if not path.is_file():  # published by an earlier laserbatch
        return
    try:
        checksums = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise PoolError(f"{path} is damaged: {error}. {REBUILD}") from None
    for name, sha256 in checksums.items():
        if not (folder / name).is_file():
            raise PoolError(f"{folder / name} is missing. {REBUILD}")
        if verify and atomic.sha256_file(folder / name) != sha256:
            raise PoolError(f"{folder / name} is damaged: it does not fit its checksum in {path}. {REBUILD}")


def _content(folder: Path, but: str | None = None) -> dict[str, str]:
    """Checksum of every file below a folder, without those of the suffix `but`; equal for equal content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != but)
    return {str(path.relative_to(folder)): atomic.sha256_file(path) for path in files}
