"""The files of a side's vectors: one file per part for new texts, and the feature files of earlier texts.

Readers take rows of both, one row group at a time. A file of new vectors has a digest of each vector, so that reading a
damaged vector is noticed. This module knows no texts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.encoding.codebook import digests
from laserbatch.pipeline.encoding.schema import LEVELS, vector_column, vectors_of
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.atomic import atomic_path
from laserbatch.pipeline.storage.parquet import iter_range, num_rows_of


@dataclass(frozen=True)
class Encoding:
    vectors: np.ndarray  # float32 (num_texts, dim), rows of length 1
    num_truncated: int  # texts that were cut at the limit


def save_vectors(encoding: Encoding, path: Path) -> None:
    """Write vectors with their digests, for `NewVectors`."""
    vectors = np.ascontiguousarray(encoding.vectors, np.float32)
    batch = pa.record_batch([pa.array(digests(vectors)), vector_column(vectors)], names=["digest", "vector"])
    batch = batch.replace_schema_metadata({"num_truncated": str(encoding.num_truncated)})
    with atomic_path(path) as temporary, pa.ipc.new_file(str(temporary), batch.schema) as writer:
        writer.write_batch(batch)


def is_saved(path: Path, num_texts: int) -> bool:
    """Whether a file holds the vectors of `num_texts` texts, and none is damaged."""
    try:
        saved = _mapped(path)
        digest = saved["digest"].to_numpy()
        return len(digest) == num_texts and np.array_equal(digests(vectors_of(saved)), digest)
    except (WorkspaceError, KeyError):
        return False


@dataclass(frozen=True)
class NewVectors:
    """Vectors in the files of a folder, one file per part; all but the last have `part_size` rows."""

    folder: Path
    part_size: int
    num_rows: int
    dim: int

    def file(self, number: int) -> Path:
        return self.folder / f"{number:05}.arrow"

    @property
    def files(self) -> list[Path]:
        return [self.file(number) for number in range(-(-self.num_rows // self.part_size))]

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of rows, int64[n], in any order: float32 (n, dim).

        Raises WorkspaceError, which names the file and the row, if a vector is damaged.
        """
        vectors = np.empty((len(rows), self.dim), np.float32)
        part_of = rows // self.part_size
        order = np.argsort(part_of, kind="stable")
        numbers, starts = np.unique(part_of[order], return_index=True)
        for number, places in zip(numbers.tolist(), np.split(order, starts)[1:], strict=True):
            path, in_file = self.file(number), rows[places] - number * self.part_size
            saved = _mapped(path)
            vectors[places] = vectors_of(saved)[in_file]
            is_damaged = digests(vectors[places]) != saved["digest"].to_numpy()[in_file]
            if is_damaged.any():
                raise WorkspaceError(
                    f"{path}, row {in_file[is_damaged][0]}: the vector does not fit its checksum. Remove the file; "
                    "the same command encodes its texts again."
                )
        return vectors

    def digests(self) -> np.ndarray:
        """The digests of all rows: uint64 (num_rows,)."""
        return np.concatenate([np.zeros(0, np.uint64), *(_mapped(path)["digest"].to_numpy() for path in self.files)])

    def num_truncated(self) -> int:
        """The number of texts that were cut at the limit."""
        return sum(int(_mapped(path).schema.metadata[b"num_truncated"]) for path in self.files)


def _mapped(path: Path) -> pa.RecordBatch:
    """Map a file of vectors into memory: only the rows that are used are read from disk."""
    try:
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_file(file).get_batch(0)
    except (pa.ArrowException, OSError) as error:
        raise WorkspaceError(
            f"{path} is damaged or missing: {error}. Remove it; the same command encodes its texts again."
        ) from None


@dataclass(frozen=True)
class FeatureRows:
    """Rows `start` to `stop` of a feature file; `first` is the row `start` among all rows of the side."""

    path: Path
    start: int
    stop: int
    first: int


def all_rows(files: Sequence[Path]) -> list[FeatureRows]:
    rows, first = [], 0
    for path in files:
        rows.append(FeatureRows(path, 0, num_rows_of(path), first))
        first += rows[-1].stop
    return rows


def rows_between(files: Iterable[FeatureRows], start: int, stop: int) -> tuple[FeatureRows, ...]:
    """The parts of whole files that hold rows `start` to `stop` of the side."""
    overlaps = ((of, max(start - of.first, 0), min(stop - of.first, of.stop)) for of in files)
    return tuple(FeatureRows(of.path, low, high, of.first + low) for of, low, high in overlaps if low < high)


@dataclass(frozen=True)
class VectorFiles:
    """The files of vectors of new and of earlier texts.

    A place is a number: the row of an earlier vector, counted over all feature files of its side, or `-1 - row` for a
    new vector.
    """

    new: NewVectors
    earlier: tuple[FeatureRows, ...] = ()


class VectorReader:
    """Reads vectors of both kinds; one batch of earlier vectors is in memory."""

    def __init__(self, files: VectorFiles) -> None:
        self._files, self._batches = files, _earlier_batches(files.earlier)
        self._batch, self._start = pa.record_batch({}), 0

    def take(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The vectors at some places, float32 (n, dim), and their codes, int32 (n, num_levels).

        Rows of earlier vectors must ascend, also from call to call. Codes are from feature files, -1 for new vectors.
        """
        is_new = places < 0
        vectors = np.empty((len(places), self._files.new.dim), np.float32)
        vectors[is_new] = self._files.new.read(-1 - places[is_new])
        codes = np.full((len(places), len(LEVELS)), -1, np.int32)
        pending = np.flatnonzero(~is_new)
        while len(pending):
            while places[pending[0]] >= self._start + self._batch.num_rows:
                self._start, self._batch = next(self._batches)
            batch = self._batch
            here = pending[places[pending] < self._start + batch.num_rows]
            vectors[here] = vectors_of(batch)[places[here] - self._start]
            codes[here] = np.column_stack([batch[name].to_numpy()[places[here] - self._start] for name in LEVELS])
            pending = pending[len(here) :]
        return vectors, codes


def _earlier_batches(earlier: Iterable[FeatureRows]) -> Iterator[tuple[int, pa.RecordBatch]]:
    for rows in earlier:
        first = rows.first
        for batch in iter_range(rows.path, rows.start, rows.stop, ["vector", *LEVELS]):
            yield first, batch
            first += batch.num_rows
