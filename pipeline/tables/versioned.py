"""Tables of Delta Lake and Apache Iceberg, read at their current version by the libraries of these formats.

A folder of such a table holds the files of several versions, and only its log says which rows are current. Once per
version and process, the current rows are written to a Parquet file in the machine's temporary folder (TMPDIR) and read
from there; the file is removed when the process ends. Other formats with several versions are recognised and refused.

Folders written by `Dataset.save_to_disk` of Hugging Face's `datasets` are read in the same way, with pyarrow:
`state.json` names the valid files, streams of Arrow record batches. A `DatasetDict` has such a folder for each split.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from laserbatch.pipeline.errors import first_line
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.tables.fetched import scratch_for, shown_path
from laserbatch.pipeline.tables.findings import FaultyTable, Finding

DATASET, DATASET_DICT = "Hugging Face", "DatasetDict"
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_METADATA = re.compile(r"v?(\d+)(-[^.]*)?(\.gz)?\.metadata\.json(\.gz)?")
_HIVE_TRANSACTION = re.compile(r"(base|delta|delete_delta)_\d{7,}(_.*)?")
_WRITTEN: dict[tuple[Path, str, str], Path] = {}  # folder, identity and version of a table -> file of its rows
_WRITING = threading.Lock()


@dataclass(frozen=True)
class _Version:
    """A version of a table: its name, the table's identity, and a function that reads its rows."""

    name: str
    table_id: str
    rows: Callable[[], pa.Table | pa.RecordBatchReader]


def format_of(folder: Path) -> str | None:
    """The table format of a folder, such as Delta or Iceberg; None for plain files."""
    inside = {path.name for path in folder.iterdir()}
    metadata = (path.name for path in folder.glob("metadata/*"))
    is_of = {
        "Delta": "_delta_log" in inside,
        "Iceberg": any(_METADATA.fullmatch(name) or name == "version-hint.text" for name in metadata),
        "Hudi": ".hoodie" in inside,
        "Spark Structured Streaming": "_spark_metadata" in inside,
        "Paimon": {"snapshot", "manifest", "schema"} <= inside,
        "Lance": "_versions" in inside,
        "transactional Hive": any(map(_HIVE_TRANSACTION.fullmatch, inside)),
        DATASET: {_STATE, "dataset_info.json"} <= inside,
        DATASET_DICT: _SPLITS in inside,
    }
    return next((kind for kind, is_kind in is_of.items() if is_kind), None)


def current_rows(folder: Path, kind: str, table: str) -> Path:
    """A Parquet file with the rows of the current version of a table of a format, as `format_of` names it.

    Raises FaultyTable for another format, if the library is not installed, or if the library cannot read the table.
    """
    saved = ("pyarrow", partial(_saved, table=table))
    readers = {"Delta": ("deltalake", _delta), "Iceberg": ("pyiceberg", _iceberg), DATASET: saved, DATASET_DICT: saved}
    if kind not in readers:
        raise versions_refused(folder, kind, table)
    library, read = readers[kind]
    expected = f"{_with_article(kind)} table that {library} reads"
    try:
        with _WRITING:
            version = read(folder)
            key = folder.resolve(), version.table_id, version.name
            if key not in _WRITTEN:
                path = scratch_for(folder) / f"{version.name}.parquet"
                write_parquet(version.rows(), path)
                _WRITTEN[key] = path
            return _WRITTEN[key]
    except FaultyTable:
        raise
    except ImportError as error:
        reason = f"which is read with {library} ({first_line(error)})"
        found = f"{shown_path(folder)} is {_with_article(kind)} table, {reason}"
        advice = f"pip install 'laserbatch[{kind.lower()}]'; or {EXPORT}"
        raise FaultyTable(Finding("versioned-table", table, found, f"{library} to be installed", advice)) from None
    except Exception as error:  # each library has its own errors, and some derive from Exception alone
        reason = f"{type(error).__name__}: {first_line(error)}"
        found = f"{shown_path(folder)} is {_with_article(kind)} table that cannot be read ({reason})"
        raise FaultyTable(Finding("versioned-table", table, found, expected, EXPORT)) from None


EXPORT = "write its current rows as plain Parquet with the engine that wrote it, and give that folder"


def versions_refused(folder: Path, kind: str, table: str) -> FaultyTable:
    """The error for a folder with files of several versions that cannot be told apart here."""
    why = "whose `state.json` names its valid files" if kind == DATASET else "with files of several versions"
    found = f"{shown_path(folder)} is {_with_article(kind)} table, {why}"
    expected = "plain Parquet files, or the whole folder of a Delta, Iceberg or Hugging Face table"
    return FaultyTable(Finding("versioned-table", table, found, expected, EXPORT))


def _with_article(kind: str) -> str:
    return f"{'an' if kind.startswith('I') else 'a'} {kind}"


def _delta(folder: Path) -> _Version:
    from deltalake import DeltaTable

    opened = DeltaTable(str(folder))
    of_table = opened.metadata()
    name, table_id = f"version-{opened.version()}", str(of_table.id)
    is_mapped = of_table.configuration.get("delta.columnMapping.mode", "none") != "none"
    if opened.protocol().min_reader_version < 3 and not is_mapped:
        files = pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())
        return _Version(name, table_id, lambda: opened.to_pyarrow_dataset(filesystem=files).scanner().to_reader())

    def in_order() -> pa.Table:
        """The rows by deltalake's engine, which knows renamed columns and deletion vectors but has no fixed order."""
        schema = pa.schema(opened.schema().to_arrow())
        rows = pa.RecordBatchReader.from_stream(opened.scan()).read_all().cast(schema)
        return rows.sort_by([(field.name, "ascending") for field in schema if not pa.types.is_nested(field.type)])

    return _Version(name, table_id, in_order)


def _saved(folder: Path, table: str) -> _Version:
    paths = _saved_files(folder, table)
    table_id = " ".join(f"{stat.st_size} {stat.st_mtime_ns}" for stat in map(Path.stat, paths))
    name = hashlib.sha256((folder / _STATE).read_bytes()).hexdigest()[:16]
    return _Version(f"state-{name}", table_id, lambda: saved_rows(paths))


def _saved_files(folder: Path, table: str) -> list[Path]:
    """The valid files of a saved dataset, in its order. Raises ValueError if one is damaged."""
    if (folder / _SPLITS).is_file():
        splits = [path.parent.name for path in sorted(folder.glob(f"*/{_STATE}"))]
        found = f"has the splits {', '.join(splits)}" if splits else "has no split"
        raise _dataset_refused(
            folder, table, found, f"give the folder of one split, such as {(splits or ['train'])[0]}"
        )
    state: dict[str, Any] = json.loads((folder / _STATE).read_bytes())
    if state.get("_indices_files") or state.get("_indices_data_files"):
        found = "is a selection of rows, whose indices are in a separate file"
        raise _dataset_refused(folder, table, found, "call `flatten_indices()` before `save_to_disk`")
    paths = [folder / Path(file["filename"]).name for file in state["_data_files"]]
    if not paths:
        raise ValueError(f"{_STATE} names no files")
    for path in paths:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - len(_END_OF_STREAM)))
            if file.read() != _END_OF_STREAM:  # Arrow reads a stream without it as if it were whole
                raise ValueError(f"{path.name} is cut short: it does not end like a stream of Arrow record batches")
    return paths


def saved_rows(paths: list[Path]) -> pa.RecordBatchReader:
    """The rows of files of Arrow record batches, which are memory-mapped and read on demand."""
    with pa.memory_map(str(paths[0])) as file:
        schema = pa.ipc.open_stream(file).schema
    return pa.RecordBatchReader.from_batches(schema, _saved_batches(paths))


def _saved_batches(paths: list[Path]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        with pa.memory_map(str(path)) as file:
            yield from pa.ipc.open_stream(file)


def _dataset_refused(folder: Path, table: str, found: str, advice: str) -> FaultyTable:
    expected = "one dataset that `Dataset.save_to_disk` wrote with all of its rows"
    return FaultyTable(Finding("saved-dataset", table, f"{shown_path(folder)} {found}", expected, advice))


def _iceberg(folder: Path) -> _Version:
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
    from pyiceberg.serializers import FromInputFile
    from pyiceberg.table import StaticTable

    local = pafs.LocalFileSystem()

    def opened(path: Path) -> PyArrowFile:
        return PyArrowFile(str(path), str(path), local)

    newest = _newest_metadata(folder)
    metadata = FromInputFile.table_metadata(opened(newest))
    root = _without_scheme(metadata.location)

    class InThisFolder(PyArrowFileIO):
        """Reads files from the table's folder, also if the metadata names another location, from which it was moved."""

        def new_input(self, location: str) -> PyArrowFile:
            within = _without_scheme(location)
            if not within.startswith(f"{root}/") or ".." in within.split("/"):
                raise ValueError(f"its file {location} is not below {metadata.location}, where the table is")
            return opened(folder / within.removeprefix(f"{root}/"))

    snapshot = metadata.current_snapshot()
    table = StaticTable(("static", str(newest)), metadata, str(newest), InThisFolder(), NoopCatalog("static"))
    name = f"snapshot-{snapshot.snapshot_id if snapshot else 'none'}"
    table_id = f"{metadata.table_uuid} {metadata.current_schema_id}"
    return _Version(name, table_id, lambda: table.scan().to_arrow_batch_reader())


def _newest_metadata(folder: Path) -> Path:
    """The metadata file of the highest version. Raises ValueError if there is none, or if several have that version."""
    files = {path: int(match[1]) for path in folder.glob("metadata/*") if (match := _METADATA.fullmatch(path.name))}
    hint = folder / "metadata" / "version-hint.text"
    version_hint = hint.read_text(encoding="utf-8").strip() if hint.is_file() else ""
    highest = max(files.values(), default=-1)
    newest = [path for path, number in files.items() if number == highest]
    if not newest or (version_hint.isdecimal() and int(version_hint) > highest):
        raise ValueError(
            f"the newest file metadata/*.metadata.json is missing; version-hint.text says {version_hint or 'nothing'}"
        )
    if len(newest) > 1:
        names = " and ".join(sorted(path.name for path in newest))
        raise ValueError(f"{names} have the same version, and only the catalogue knows the current one")
    return newest[0]


def _without_scheme(location: str) -> str:
    """`bucket/table` of `s3://bucket/table` and `s3a://bucket/table`; `/table` of `file:///table` and `file:/table`."""
    return re.sub(r"^[a-z0-9]+:(//)?", "", location).rstrip("/")
