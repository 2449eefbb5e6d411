"""Folders that `Dataset.save_to_disk` of Hugging Face's `datasets` wrote, read with pyarrow alone.

Such a folder has `dataset_info.json`, `state.json`, which names the files that count, and these files, streams of Arrow
record batches. A `DatasetDict` is a folder of such folders, one for each split.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from laserbatch.pipeline.tables.fetched import shown_path
from laserbatch.pipeline.tables.findings import FaultyTable, Finding

DATASET, DATASET_DICT = "Hugging Face", "DatasetDict"
STATE, _SPLITS = "state.json", "dataset_dict.json"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def saved_format(names: set[str]) -> str | None:
    """`DATASET` or `DATASET_DICT` if files of these names mark a folder as such; else None."""
    if {STATE, "dataset_info.json"} <= names:
        return DATASET
    return DATASET_DICT if _SPLITS in names else None


def saved_files(folder: Path, table: str) -> list[Path]:
    """The files of a saved dataset that count, in its order.

    Raises FaultyTable for a DatasetDict and for a selection of rows, and ValueError or OSError where a file is damaged.
    """
    if (folder / _SPLITS).is_file():
        splits = [path.parent.name for path in sorted(folder.glob(f"*/{STATE}"))]
        found = f"holds the splits {', '.join(splits) or 'of none'}"
        raise _refused(folder, table, found, f"give the folder of one split, such as {(splits or ['train'])[0]}")
    state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    if state.get("_indices_files") or state.get("_indices_data_files"):
        found = "is a selection of rows, whose indices lie in a file of their own"
        raise _refused(folder, table, found, "call `flatten_indices()` before `save_to_disk`")
    paths = [folder / Path(file["filename"]).name for file in state["_data_files"]]
    if not paths:
        raise ValueError(f"{STATE} names no files")
    for path in paths:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - len(_END_OF_STREAM)))
            if file.read() != _END_OF_STREAM:  # Arrow reads a stream without it as if it were whole
                raise ValueError(f"{path.name} does not end as a stream of Arrow record batches does")
    return paths


def saved_rows(paths: list[Path]) -> pa.RecordBatchReader:
    """The rows of files of Arrow record batches, which are mapped, and read as they are asked for."""
    with pa.memory_map(str(paths[0])) as file:
        schema = pa.ipc.open_stream(file).schema
    return pa.RecordBatchReader.from_batches(schema, _batches(paths))


def _batches(paths: list[Path]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        with pa.memory_map(str(path)) as file:
            yield from pa.ipc.open_stream(file)


def _refused(folder: Path, table: str, found: str, advice: str) -> FaultyTable:
    expected = "one dataset that `Dataset.save_to_disk` wrote with all of its rows"
    return FaultyTable(Finding("saved-dataset", table, f"{shown_path(folder)} {found}", expected, advice))
