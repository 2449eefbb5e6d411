"""Texts that are to be encoded, in parts: rows of files, which are read where they are encoded."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.storage.parquet import ROW_GROUP_ROWS, num_rows_of, read_rows


@dataclass(frozen=True)
class TextPart:
    """Rows of knowledge files, in the order of files.

    Attributes
    ----------
    first : place of the first of them among all texts that are to be encoded.
    files : of each file its path and the rows in it, int64[n], ascending.
    fields : names of the parts of an answer that its vector is of; an answer without them, or none: the whole text.
    """

    first: int
    files: tuple[tuple[Path, np.ndarray], ...]
    fields: tuple[str, ...]

    @property
    def num_texts(self) -> int:
        return sum(len(rows) for _, rows in self.files)

    def read(self) -> list[str]:
        """The texts. Raises WorkspaceError, which names the file: one is missing or damaged."""
        texts, columns = [], ["text", "fields_json"] if self.fields else ["text"]
        for path, rows in self.files:
            records = read_rows(path, rows, columns)
            texts += _chosen_fields(records, self.fields) if self.fields else records["text"].to_pylist()
        return texts


@dataclass(frozen=True)
class Encoding:
    """Vectors of some texts."""

    vectors: np.ndarray  # float32 (num_texts, dim), rows of length 1
    num_truncated: int  # texts that were longer than the limit and lost their end


class PartsEncoder(Protocol):
    """What encodes parts, here or elsewhere."""

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        ...

    def part_size(self, num_texts: int) -> int:
        """Texts of a part, at most, where so many are to be encoded."""
        ...

    def encode_parts(
        self, parts: Sequence[TextPart], on_batch: Callable[[int], None]
    ) -> Iterator[tuple[TextPart, Encoding]]:
        """The vectors of each part, in any order; `on_batch` is called with the number of texts that were encoded."""
        ...


class TextsEncoder(Protocol):
    """What encodes texts, as `encoder.TextEncoder` does."""

    dim: int

    def encode(self, texts: list[str], on_batch: Callable[[int], None]) -> Encoding: ...


class LocalEncoder:
    """Encodes parts in this process."""

    def __init__(self, encoder: TextsEncoder) -> None:
        self._encoder, self.dim = encoder, encoder.dim

    def part_size(self, num_texts: int) -> int:
        return ROW_GROUP_ROWS

    def encode_parts(
        self, parts: Sequence[TextPart], on_batch: Callable[[int], None]
    ) -> Iterator[tuple[TextPart, Encoding]]:
        for part in parts:
            yield part, self._encoder.encode(part.read(), on_batch)


def text_parts(folder: Path, rows: np.ndarray, fields: Sequence[str], part_size: int) -> list[TextPart]:
    """Parts of at most `part_size` texts: `rows`, int64[n], are ascending ones of a folder's files in name order."""
    paths = sorted(folder.glob("*.parquet"))
    ends = np.cumsum([num_rows_of(path) for path in paths])
    file_of = np.searchsorted(ends, rows, side="right")
    parts = []
    for first in range(0, len(rows), part_size):
        part_slice = slice(first, first + part_size)
        files = []
        for number in np.unique(file_of[part_slice]).tolist():
            start = ends[number - 1] if number else 0
            files.append((paths[number], rows[part_slice][file_of[part_slice] == number] - start))
        parts.append(TextPart(first, tuple(files), tuple(fields)))
    return parts


def _chosen_fields(records: pa.Table, fields: Sequence[str]) -> list[str]:
    """The chosen fields of each answer, one per line; the whole text if it has none of them."""
    answers = map(json.loads, records["fields_json"].to_pylist())
    parts = ("\n".join(answer[name] for name in fields if name in answer) for answer in answers)
    return [part or text for part, text in zip(parts, records["text"].to_pylist(), strict=True)]
