"""Copying published runs to a place for readers elsewhere: `s3://bucket/prefix`, or any URI that pyarrow knows.

The place has the layout of a workspace: `runs/<run_id>/`, and `published.json`, which names the run to read. All files
of a run are written, read back and compared before the pointer is written as the last object; so readers see either the
earlier run or the new one. A delivery that was killed can go on: files with the same bytes stay.
"""

import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laserbatch.pipeline.errors import NotDelivered, WorkspaceError
from laserbatch.pipeline.storage.atomic import paths_below, read_json, sha256_file, write_json
from laserbatch.pipeline.storage.run_folder import RUN_ID, RunFolder
from laserbatch.pipeline.storage.uris import ADVICE, BLOCK_BYTES, filesystem_of, is_uri, naming_uri

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

FOLDERS = ("knowledge", "features", "quarantine", "postponed")  # a run's folders that are sent, besides single files
PLACES = "delivered-to.json"  # file of a workspace: all URIs that its runs were sent to, and the last run at each
NUM_AT_ONCE = 8  # files sent in parallel


@dataclass(frozen=True)
class Delivered:
    """The amount that one delivery sent; zero if everything was there."""

    num_files: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class Destination:
    """A place that published runs are copied to; make one with `Destination.at`."""

    uri: str
    filesystem: "FileSystem"
    root: str

    @classmethod
    def at(cls, uri: str) -> "Destination":
        """The destination at a URI. Raises ConfigError if pyarrow does not know the URI, or it has a credential."""
        return cls(uri, *filesystem_of(uri))

    def published(self) -> dict:
        """The pointer at the URI; empty before the first delivery, or if it is damaged."""
        with naming_uri(self.uri, NotDelivered):
            try:
                with self.filesystem.open_input_stream(f"{self.root}/published.json") as file:
                    pointer = json.loads(file.read())
            except (FileNotFoundError, json.JSONDecodeError):
                return {}
        return pointer if isinstance(pointer, dict) else {}

    def runs(self) -> list[str]:
        """Ids of the runs that have files there; files that belong to no run are ignored."""
        names = {name.split("/")[0] for name in self._files("runs")}
        return sorted(name for name in names if RUN_ID.fullmatch(name))

    def has(self, run: RunFolder) -> bool:
        """Whether the run of that id there is this run: `_SUCCESS` says when it was finished, to the nanosecond."""
        with naming_uri(self.uri, NotDelivered):
            try:
                there = self._sha256(f"{self.root}/runs/{run.run_id}/{run.success_path.name}")
            except FileNotFoundError:
                return True  # the next delivery sends it again
        return run.is_finished and there == sha256_file(run.success_path)

    def deliver(self, run: RunFolder) -> Delivered:
        """Copy a finished run and point readers to it; until then they see the earlier run.

        Raises NotDelivered if a file cannot be sent, or does not arrive as it was sent.
        """
        files = _described(run)
        lines = "".join(f"{sha256}  {name}\n" for name, (_, sha256) in files.items())
        pointer = {"run_id": run.run_id, "num_files": len(files), "sha256": hashlib.sha256(lines.encode()).hexdigest()}
        sizes = {name: num_bytes for name, (num_bytes, _) in files.items()}
        if self.published() == pointer and self._files(f"runs/{run.run_id}", if_before_pointer=True) == sizes:
            return Delivered()
        sent = self.copy(run, files)
        with naming_uri(self.uri, NotDelivered):
            self._point_to(pointer)
        return sent

    def copy(self, run: RunFolder, files: dict[str, tuple[int, str]] | None = None) -> Delivered:
        """Make the run's folder at the URI equal to the local one; the pointer stays."""
        files, folder = _described(run) if files is None else files, f"runs/{run.run_id}"
        with naming_uri(self.uri, NotDelivered):
            remote_sizes = self._files(folder)
            for name in remote_sizes.keys() - files.keys():
                self.filesystem.delete_file(f"{self.root}/{folder}/{name}")

            def sent(name: str) -> int:
                num_bytes, sha256 = files[name]
                target = f"{self.root}/{folder}/{name}"
                if remote_sizes.get(name) == num_bytes and self._sha256(target) == sha256:
                    return 0
                self._put(run.root / name, target)
                if self._sha256(target) != sha256:
                    raise NotDelivered(f"{self.uri}: {folder}/{name} is not the file that was sent. {ADVICE}.")
                return 1

            *names, last = files  # the last is `_SUCCESS`, by which readers of the folder itself see that it is whole
            with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
                are_sent = list(pool.map(sent, names))
            are_sent.append(sent(last))
        num_bytes = sum(files[name][0] for name, is_sent in zip(files, are_sent, strict=True) if is_sent)
        return Delivered(sum(are_sent), num_bytes)

    def require_writable(self) -> None:
        """Write and delete a small file. Raises NotDelivered if that fails. A folder is only looked at."""
        with naming_uri(self.uri, NotDelivered):
            if self.filesystem.type_name == "local":
                folder = next(path for path in (Path(self.root), *Path(self.root).parents) if path.exists())
                if not folder.is_dir() or not os.access(folder, os.W_OK):
                    raise OSError(f"files cannot be written to {folder}")
            else:
                with self.filesystem.open_output_stream(probe := f"{self.root}/.laserbatch-probe") as out:
                    out.write(b"a night of laserbatch may write here")
                self.filesystem.delete_file(probe)

    def remove(self, run_ids: Collection[str]) -> list[str]:
        """Delete some runs, after the pointer if it names one of them; returns those that were there."""
        removed = [run_id for run_id in self.runs() if run_id in run_ids]
        with naming_uri(self.uri, NotDelivered):
            if self.published().get("run_id") in removed:
                self.filesystem.delete_file(f"{self.root}/published.json")
            for run_id in removed:
                self.filesystem.delete_dir(f"{self.root}/runs/{run_id}")
        return removed

    def _files(self, folder: str, if_before_pointer: bool = False) -> dict[str, int]:
        """The sizes in bytes of the files under a folder at the URI, by their paths within it.

        With `if_before_pointer` without those that somebody changed after the pointer was written, which is the last.
        """
        from pyarrow.fs import FileSelector

        folder = f"{self.root}/{folder}"
        with naming_uri(self.uri, NotDelivered):
            infos = self.filesystem.get_file_info(FileSelector(folder, allow_not_found=True, recursive=True))
            if if_before_pointer:
                pointed_s = (self.filesystem.get_file_info(f"{self.root}/published.json").mtime_ns or 0) // 10**9
                infos = [info for info in infos if (info.mtime_ns or 0) // 10**9 <= pointed_s]
        return {info.path.removeprefix(f"{folder}/"): info.size for info in infos if info.is_file}

    def _put(self, source: Path, target: str) -> None:
        if self.filesystem.type_name == "local":
            self.filesystem.create_dir(target.rpartition("/")[0])
        with source.open("rb") as file, self.filesystem.open_output_stream(target) as out:
            shutil.copyfileobj(file, out, BLOCK_BYTES)

    def _point_to(self, pointer: dict) -> None:
        """Write the pointer by a single put, which an object store shows whole or not at all; on a disk by a rename.

        A stream to Azure empties the blob first; there the pointer is written next to it and then copied in one step.
        """
        target = f"{self.root}/published.json"
        if self.filesystem.type_name == "local":
            write_json(pointer, target)
            return
        is_emptied = self.filesystem.type_name == "abfs"
        with self.filesystem.open_output_stream(written := f"{target}.new" if is_emptied else target) as out:
            out.write(json.dumps(pointer, indent=1).encode())
        if is_emptied:
            self.filesystem.copy_file(written, target)
            self.filesystem.delete_file(written)

    def _sha256(self, path: str) -> str:
        digest = hashlib.sha256()
        with self.filesystem.open_input_stream(path) as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()


def deliveries(root: Path) -> dict[str, dict[str, str | None]]:
    """The last delivery to each URI to which the workspace at `root` began to send a run: its `run_id` and `at`.

    Both are None if no delivery there was completed. Raises WorkspaceError if the file is damaged.
    """
    path = root / PLACES
    expected = f'{{"s3://...": {{}}, ...}} with every place that {root} delivered to'
    record = read_json(path, f", or write {expected}") if path.exists() else {}
    if wrong := [uri for uri, last in record.items() if not (is_uri(uri) and isinstance(last, dict))]:
        raise WorkspaceError(f"{path}: {wrong[0]!r} is not a URI with its last delivery; write {expected}")
    return {uri: {"run_id": None, "at": None} | record[uri] for uri in sorted(record)}


def remember_place(root: Path, uri: str) -> None:
    """Record that a run of the workspace at `root` will be sent to a URI; call it before anything is sent."""
    write_json({uri.rstrip("/"): {}} | deliveries(root), root / PLACES)


def record_delivery(root: Path, uri: str, run_id: str) -> None:
    """Record that readers at a URI now see a run of the workspace at `root`, whichever command sent it."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_json(deliveries(root) | {uri.rstrip("/"): {"run_id": run_id, "at": now}}, root / PLACES)


def _described(run: RunFolder) -> dict[str, tuple[int, str]]:
    """The bytes and SHA-256 of each file of a run that is sent, by its path within the run; `_SUCCESS` is the last."""
    paths = [path for name in FOLDERS for path in sorted(paths_below(run.root / name))]
    paths = [path for path in paths if path.is_file() and not path.name.startswith(".")]
    paths += sorted(run.root.glob("*.parquet"))
    paths += [path for path in (run.manifest_path, run.report_path, run.success_path) if path.exists()]
    return {path.relative_to(run.root).as_posix(): (path.stat().st_size, sha256_file(path)) for path in paths}
