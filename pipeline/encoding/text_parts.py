"""Texts to encode, in parts: a part names rows of files, and the process that encodes it reads them.

The vectors of each part go to a separate file (`vector_files`), which the process that made the parts reads.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.encoding.vector_files import Encoding, NewVectors, is_saved, save_vectors
from laserbatch.pipeline.storage.parquet import ROW_GROUP_ROWS, iter_range, num_rows_of, read_rows, write_parquet

if TYPE_CHECKING:  # importing it loads torch
    from laserbatch.pipeline.encoding.encoder import TextEncoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextPart:
    """Some texts of knowledge files: those from `start` to `stop` of a list of all texts to encode."""

    rows_file: Path  # Parquet file with the list: rows, numbered over all knowledge files
    start: int
    stop: int
    files: tuple[tuple[Path, int, int], ...]  # that hold its texts: path, number of the first row, number of rows
    fields: tuple[str, ...]  # parts of an answer to encode; the whole text if it has none of them, or none are named
    vectors: Path  # file that gets their vectors, in the order of the list

    @property
    def num_texts(self) -> int:
        return self.stop - self.start

    @property
    def inputs(self) -> list[Path]:
        """The files that the process that encodes the part must see."""
        return [self.rows_file, *(path for path, _, _ in self.files)]

    def read(self) -> tuple[list[str], np.ndarray]:
        """The texts in the order of files, and the place of each in the part: int64[n].

        Raises WorkspaceError, which names the file, if one is missing or damaged.
        """
        batches = iter_range(self.rows_file, self.start, self.stop, ["row"])
        rows = np.concatenate([batch["row"].to_numpy() for batch in batches])
        places = np.argsort(rows)
        rows, texts, columns = rows[places], [], ["text", "fields_json"] if self.fields else ["text"]
        for path, first, num_rows in self.files:
            in_file = rows[(rows >= first) & (rows < first + num_rows)] - first
            records = read_rows(path, in_file, columns)
            texts += _chosen_fields(records, self.fields) if self.fields else records["text"].to_pylist()
        return texts, places

    def encode(self, encoder: "TextEncoder", on_batch: Callable[[int], None] = lambda num_texts: None) -> None:
        texts, places = self.read()
        encoding = encoder.encode(texts, on_batch)
        vectors = np.empty_like(encoding.vectors)
        vectors[places] = encoding.vectors
        save_vectors(Encoding(vectors, encoding.num_truncated), self.vectors)

    @property
    def is_encoded(self) -> bool:
        """Whether the file of its vectors is there and whole."""
        return is_saved(self.vectors, self.num_texts)


class Task(Protocol):
    """Work that another process or machine may do."""

    @property
    def inputs(self) -> list[Path]: ...  # the files that the process that runs it must see
    @property
    def outputs(self) -> list[Path]: ...  # the files that exist afterwards
    def run(self) -> Any: ...


class PartsEncoder(Protocol):
    """Encodes parts and runs the tasks that make features of their vectors, in this process or on a cluster."""

    @property
    def dim(self) -> int: ...  # the length of a vector

    def part_size(self, num_texts: int) -> int:
        """The largest number of texts of a part, if `num_texts` are to be encoded."""
        ...

    def encode_parts(self, parts: Sequence[TextPart], on_batch: Callable[[int], None]) -> None:
        """Write the vectors of each part, unless they exist; `on_batch` gets the number of texts that were encoded."""
        ...

    def run_tasks(self, tasks: Iterable[Task]) -> list[Any]:
        """Run tasks and return their results, in the order of the tasks."""
        ...


class LocalEncoder:
    """Encodes parts in this process, with an encoder that is loaded when it is needed."""

    def __init__(self, load: "Callable[[], TextEncoder]") -> None:
        self._load = load

    @cached_property
    def _encoder(self) -> "TextEncoder":
        return self._load()

    @property
    def dim(self) -> int:
        return self._encoder.dim

    def part_size(self, num_texts: int) -> int:
        return ROW_GROUP_ROWS

    def encode_parts(self, parts: Sequence[TextPart], on_batch: Callable[[int], None]) -> None:
        for part in parts:
            if part.is_encoded:
                on_batch(part.num_texts)
            else:
                part.encode(self._encoder, on_batch)

    def run_tasks(self, tasks: Iterable[Task]) -> list[Any]:
        return [task.run() for task in tasks]


def text_parts(files: Sequence[Path], rows: np.ndarray, fields: Sequence[str], vectors: NewVectors) -> list[TextPart]:
    """Divide texts into parts, whose vectors `vectors` will read; writes the list of rows into its folder.

    `rows`, int64[n], are numbered over all files; the rows of a part are near each other in files.
    """
    rows_file, part_size = vectors.folder / "texts.parquet", vectors.part_size
    write_parquet(pa.table({"row": rows}), rows_file)
    ends = np.cumsum([0, *map(num_rows_of, files)])
    parts = []
    for number, start in enumerate(range(0, len(rows), part_size)):
        of_part = rows[start : start + part_size]
        holders = np.unique(np.searchsorted(ends, of_part, side="right") - 1).tolist()
        held = tuple((files[holder], int(ends[holder]), int(ends[holder + 1] - ends[holder])) for holder in holders)
        parts.append(TextPart(rows_file, start, start + len(of_part), held, tuple(fields), vectors.file(number)))
    return parts


def _chosen_fields(records: pa.Table, fields: Sequence[str]) -> list[str]:
    """The chosen fields of each answer, one per line; the whole text if it has none of them."""
    answers = map(json.loads, records["fields_json"].to_pylist())
    parts = ["\n".join(answer[name] for name in fields if answer.get(name, "").strip()) for answer in answers]
    if parts and not any(parts):
        logger.warning(
            "none of %d texts has a field that `encode` in its template names (%s), so whole texts are encoded; the "
            "first text has %s", len(parts), ", ".join(fields), records["fields_json"][0],
        )  # fmt: skip
    return [part or text for part, text in zip(parts, records["text"].to_pylist(), strict=True)]
