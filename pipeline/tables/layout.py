"""Listing of the files in a folder that hold the rows of a table, and of the columns in the names of its folders.

Sub-folders and Hive partitions (`date=2025-02-28/`) are read; of a table with several versions, only the current one
(`versioned.py`). A folder whose writer has not finished is refused. Every other file is left out and named. Of a file
with rows, at most the first four bytes are read here.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from laserbatch.pipeline.tables.fetched import shown_path
from laserbatch.pipeline.tables.findings import FaultyTable, Finding
from laserbatch.pipeline.tables.versioned import DATASET_DICT, current_rows, format_of, versions_refused

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
MAX_NAMED = 10
SUCCESS = "_SUCCESS"
PARQUET = (".parquet", ".parq", ".pq")
_CODECS = (".gz", ".gzip", ".snappy", ".zst", ".zstd", ".br", ".brotli", ".lz4")  # pandas writes `table.parquet.gzip`
_CSV = re.compile(r"\.(csv|tsv)(\.(gz|bz2|zst|lz4))?$", re.IGNORECASE)
# Folders of unfinished jobs of Hadoop, Spark, Hive, Impala, S3A, EMR and Kafka Connect.
_STAGING = re.compile(
    r"_temporary|_tmp.*|\.tmp.*|_staging|\.staging.*|\.spark-staging.*|\.hive-staging.*|_impala_insert_staging|"
    r"__magic.*|\.emrfs_staging.*|\+tmp"
)
# Unfinished files of Hadoop, Flink, browsers, scp, rclone, gsutil and azcopy; with a random ending, of rsync and AWS.
_HALF_WRITTEN = re.compile(
    r".*\.(tmp|temp|partial|part|filepart|incomplete|crdownload|download|writing)|.*\._COPYING_|.*_\.gstmp|"
    r".*\.(inprogress|in-progress|pending)(\..*)?|\.azDownload-.*|\.distcp\.tmp\..*|"
    r".*\.(parquet|parq|pq|csv|tsv)\.(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{6,8}"
)
_DATABASE_LOGS = ("-wal", "-shm", "-journal", ".wal")  # logs of a database in use, which are read with it
_BOOKKEEPING = re.compile(rf"{SUCCESS}|_(common_)?metadata|_(started|committed)_.*|.*_\$folder\$")  # holds no rows


@dataclass(frozen=True)
class ListedFile:
    """A file with rows. `partitions`: the columns in the names of its folders, as text; None for null."""

    path: Path
    partitions: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    """The files of a table in name order, and the files left out, each with the reason."""

    files: list[ListedFile]
    left_out: dict[Path, str]


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet: by its suffix, or by its first bytes if it has none or one like `.parquet.gz`."""
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    if suffixes[-1] in PARQUET:
        return True
    if suffixes[-1] and not (suffixes[-1] in _CODECS and suffixes[-2] in PARQUET):
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def is_parquet_or_csv(path: Path) -> bool:
    return _CSV.search(path.name) is not None or is_parquet(path)


def list_folder(
    folder: Path, table: str, has_rows: Callable[[Path], bool] = is_parquet, siblings: Iterable[Path] = ()
) -> Listing:
    """All files with rows under a folder. If one of its `siblings` has `_SUCCESS`, the folder must have it, too.

    Raises FaultyTable if a writer has not finished, several versions lie together, or a partition's name is invalid.
    """
    left_out: dict[Path, str] = {}
    if kind := format_of(folder):
        return Listing([ListedFile(current_rows(folder, kind, table))], {})

    def files_under(at: Path, partitions: dict[str, str | None]) -> list[ListedFile]:
        folders, paths, others = _read_level(at, folder, table)
        files = [ListedFile(path, partitions) for path in paths if has_rows(path)]
        reason = "is not Parquet" if has_rows is is_parquet else "is neither Parquet nor CSV"
        left_out.update(others | {path: reason for path in paths if not has_rows(path)})
        with_rows = []
        for sub in folders:
            if below := files_under(sub, partitions | _partition(sub, partitions, table)):
                with_rows.append(sub)
                files += below
        _require_success(with_rows, with_rows, table)
        return files

    files = files_under(folder, {})
    if files:
        _require_success([folder], siblings, table)
    return Listing(sorted(files, key=lambda file: file.path.relative_to(folder).parts), left_out)


def list_pattern(source: Path, pattern: str, table: str) -> Listing:
    """The files that a pattern matches, without hidden and empty ones; for a folder, all files with rows in it.

    Raises FaultyTable like `list_folder`, for the folders of the files.
    """
    parts = Path(pattern).parts
    num_fixed = next((number for number, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts))
    base = source.joinpath(*parts[:num_fixed])
    siblings = sorted(path for path in base.parent.glob("*") if path.is_dir()) if num_fixed else []
    if num_fixed == len(parts) and base.is_dir():
        _require_plain(_folders(base.parent, source), table)
        listing, named = list_folder(base, table, is_parquet_or_csv, siblings), _partitions(base, source, table)
        return Listing([ListedFile(file.path, named | file.partitions) for file in listing.files], listing.left_out)
    matched = sorted(path for path in source.glob(pattern) if path.is_file())
    _require_plain({folder for path in matched for folder in _folders(path.parent, source)}, table)
    left_out: dict[Path, str] = {}
    if num_fixed < len(parts):
        folders = {base} | {folder for path in matched for folder in _folders(path.parent, base)}
        levels = [_read_level(folder, base, table) for folder in sorted(folders) if folder.is_dir()]
        left_out = {path: reason for *_, others in levels for path, reason in others.items()}
        with_rows = {path for _, files, _ in levels for path in files}
        if parts[-1].startswith((".", "_")):
            with_rows |= {path for path, reason in left_out.items() if reason == HIDDEN}
        matched = [path for path in matched if path in with_rows]
        for folder in folders:
            beside = sorted(other for other in folders if other.parent == folder.parent and other != base)
            read = [other for other in beside if any(other in path.parents for path in matched)]
            _require_success(read, read, table)
        if matched:
            _require_success([base], siblings, table)
    left_out = {path: reason for path, reason in left_out.items() if path not in matched}
    return Listing([ListedFile(path, _partitions(path.parent, source, table)) for path in matched], left_out)


def unnamed_files(source: Path, listings: Iterable[Listing]) -> dict[Path, str]:
    """The other files and sub-folders in the folders of listed files, with the reason why they are left out."""
    listings = list(listings)
    listed = {file.path for listing in listings for file in listing.files}
    left_out = {path: reason for listing in listings for path, reason in listing.left_out.items() if path not in listed}
    logs = {path.with_name(path.name + suffix) for path in listed for suffix in _DATABASE_LOGS}
    folders = {folder for path in listed for folder in _folders(path.parent, source)}
    known = listed | logs | folders
    for folder in sorted(folders):
        for path in sorted(folder.iterdir()):
            # The mapping itself may be there.
            is_silent = _BOOKKEEPING.fullmatch(path.name) or _is_checksum(path) or path.suffix in (".yaml", ".yml")
            if path not in known and not is_silent:
                left_out.setdefault(path, "is not named by `files` of the mapping")
    return left_out


def name_left_out(left_out: dict[Path, str]) -> list[str]:
    """A sentence for each reason, with the files that are left out for it."""
    sentences = []
    for reason in dict.fromkeys(left_out.values()):
        paths = [path for path, own_reason in left_out.items() if own_reason == reason]
        names = ", ".join(shown_path(path) for path in paths[:MAX_NAMED])
        more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
        sentences.append(f"left out, because it {reason}: {names}{more}")
    return sentences


HIDDEN = "is hidden (its name begins with . or _)"


def _read_level(folder: Path, root: Path, table: str) -> tuple[list[Path], list[Path], dict[Path, str]]:
    """The direct contents of a folder: sub-folders to read, files that may have rows, and what is left out."""
    _require_plain([folder], table)
    folders, files, left_out = [], [], {}
    for path in sorted(folder.iterdir()):
        is_hidden = _is_hidden(path.name)
        if not path.exists():
            raise _unfinished(table, f"{shown_path(path)} is a link to a missing file")
        elif path.is_symlink() and _is_read_anyway(path.resolve(), root.resolve()):
            left_out[path] = "is a link to another part of the table"
        elif path.is_dir():
            is_staging = _STAGING.fullmatch(path.name) is not None
            if is_staging and (path.name == "_temporary" or any(inner.is_file() for inner in path.rglob("*"))):
                raise _unfinished(table, f"{shown_path(path)} holds files that a job has not yet moved to their place")
            if is_hidden:
                left_out[path] = HIDDEN
            else:
                folders.append(path)
        elif _is_checksum(path):
            _require_checksum(path, table)
        elif _HALF_WRITTEN.fullmatch(path.name):
            raise _unfinished(table, f"{shown_path(path)} is a file that is still being written")
        elif _BOOKKEEPING.fullmatch(path.name):
            continue
        elif is_hidden:
            left_out[path] = HIDDEN
        elif not path.stat().st_size:
            left_out[path] = "is empty"
        else:
            files.append(path)
    removed = _removed_by_commits(folder, table)
    left_out |= {path: "was replaced by a later commit (`_committed_...`)" for path in files if path.name in removed}
    return folders, [path for path in files if path.name not in removed], left_out


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _is_read_anyway(path: Path, root: Path) -> bool:
    """Whether a file or folder lies under a root, but in no hidden folder there."""
    return path.is_relative_to(root) and not any(map(_is_hidden, path.relative_to(root).parts))


def _is_checksum(path: Path) -> bool:
    return path.name.startswith(".") and path.suffix == ".crc"


def _require_checksum(path: Path, table: str) -> None:
    """Refuse a checksum file of Hadoop whose data file is missing, or has a size that does not fit."""
    of = path.with_name(path.name[1:].removesuffix(".crc"))
    if not of.exists():
        raise _unfinished(table, f"{shown_path(path)} is the checksum of a missing file")
    with path.open("rb") as file:
        head = file.read(8)
    bytes_per_sum = int.from_bytes(head[4:], "big")
    if head[:4] == b"crc\0" and bytes_per_sum:
        num_sums, num_bytes = (path.stat().st_size - 8) // 4, of.stat().st_size
        if num_sums != -(-num_bytes // bytes_per_sum):
            found = f"{shown_path(of)} has {num_bytes:,} bytes, which does not fit its checksum {path.name}"
            raise _unfinished(table, found)


def _removed_by_commits(folder: Path, table: str) -> set[str]:
    """Names of files that Databricks commits have replaced. Raises FaultyTable for a commit that has not ended."""
    removed: set[str] = set()
    for path in sorted(folder.glob("_started_*")):
        if not path.with_name(path.name.replace("_started_", "_committed_", 1)).exists():
            raise _unfinished(table, f"{shown_path(path)} has no _committed_ file: its job has not ended")
    for path in sorted(folder.glob("_committed_*")):
        try:
            removed |= set(json.loads(path.read_bytes()).get("removed", ()))
        except (ValueError, AttributeError):
            raise _unfinished(table, f"{shown_path(path)} is not a complete JSON object") from None
    return removed


def _require_success(folders: Iterable[Path], siblings: Iterable[Path], table: str) -> None:
    """Refuse the first folder without `_SUCCESS` if a sibling has one."""
    done = next((sibling for sibling in siblings if (sibling / SUCCESS).is_file()), None)
    open_one = next((folder for folder in folders if not (folder / SUCCESS).is_file()), None)
    if done is not None and open_one is not None:
        found = f"{shown_path(open_one)} has no {SUCCESS}, but {shown_path(done)} next to it has one"
        raise _unfinished(table, found, f"; if its writer makes no {SUCCESS}, make an empty one at the end")


def _unfinished(table: str, found: str, more: str = "") -> FaultyTable:
    advice = "wait until its writer has ended; if it was killed, remove the files that it left and write them again"
    return FaultyTable(Finding("unfinished", table, found, "a table whose writer has ended", advice + more))


def _folders(path: Path, root: Path) -> list[Path]:
    """A folder and its parents, up to a root."""
    return [folder for folder in (path, *path.parents) if folder.is_relative_to(root)]


def _partitions(folder: Path, root: Path, table: str) -> dict[str, str | None]:
    """The columns in the names of folders, from below a root down to `folder`."""
    partitions: dict[str, str | None] = {}
    for part in reversed(_folders(folder, root)[:-1]):
        partitions |= _partition(part, partitions, table)
    return partitions


def _partition(folder: Path, known: dict[str, str | None], table: str) -> dict[str, str | None]:
    """The column in the name of a folder such as `city=K%C3%B6ln`; none for any other name."""
    key, is_partition, value = folder.name.partition("=")
    if not is_partition:
        return {}
    fault, expected = None, "one folder `column=value` for each partition column"
    try:
        key, value = unquote(key, errors="strict"), unquote(value, errors="strict")
        if not key or key in known:
            fault = f"repeats the column {key} of a folder above it" if key else "names no column"
    except UnicodeDecodeError:
        fault, expected = "has a name that is not UTF-8", "text in UTF-8 after % signs"
    if fault is not None:
        found = f"the folder {shown_path(folder)} {fault}"
        raise FaultyTable(Finding("bad-partition", table, found, expected, "rename the folder"))
    return {key: None if value in ("", NULL_PARTITION) else value}


def _require_plain(folders: Iterable[Path], table: str) -> None:
    """Refuse folders of formats that keep several versions. A DatasetDict passes: each of its splits has a folder."""
    for folder in folders:
        if (kind := format_of(folder)) and kind != DATASET_DICT:
            raise versions_refused(folder, kind, table)
