"""Codes that new vectors have already: those of an earlier vector with the same bits, even if centroids moved."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.encoding.codebook import digests
from laserbatch.pipeline.encoding.schema import LEVELS, vectors_of
from laserbatch.pipeline.encoding.vector_files import NewVectors, heads
from laserbatch.pipeline.storage.parquet import iter_parquet, read_parquet, write_parquet

_SCHEMA = pa.schema({"digest": pa.uint64()} | dict.fromkeys(LEVELS, pa.int32()))


@dataclass(frozen=True)
class KnownCodesTask:
    """Writes the digests of the vectors of a feature file that are among new ones, with their codes."""

    new: NewVectors
    features: Path
    path: Path

    @property
    def inputs(self) -> list[Path]:
        return [self.features, *self.new.files]

    @property
    def outputs(self) -> list[Path]:
        return [self.path]

    def run(self) -> None:
        new_digests, new_heads = map(np.unique, self.new.digests())

        def known(batch: pa.RecordBatch) -> pa.Table:
            vectors = vectors_of(batch)
            rows = np.flatnonzero(_is_among(heads(vectors), new_heads))  # digests of all would take longer
            of_rows = digests(vectors[rows])
            is_known = _is_among(of_rows, new_digests)
            codes = (batch[name].take(pa.array(rows[is_known])) for name in LEVELS)
            return pa.table([pa.array(of_rows[is_known]), *codes], schema=_SCHEMA)

        write_parquet(map(known, iter_parquet(self.features, ["vector", *LEVELS])), self.path, _SCHEMA)


def codes_of(new: NewVectors, files: Sequence[Path]) -> np.ndarray:
    """Codes of new vectors in the files of tasks, of equal ones the first: int32 (num_new, num_levels); -1 without."""
    tables = [_SCHEMA.empty_table(), *map(read_parquet, files)]
    known_digests, first = np.unique(np.concatenate([of["digest"].to_numpy() for of in tables]), return_index=True)
    codes = np.concatenate([np.column_stack([of[name].to_numpy() for name in LEVELS]) for of in tables])
    new_codes = np.full((new.num_rows, len(LEVELS)), -1, np.int32)
    if len(known_digests):
        new_digests, _ = new.digests()
        is_known = _is_among(new_digests, known_digests)
        new_codes[is_known] = codes[first[np.searchsorted(known_digests, new_digests[is_known])]]
    return new_codes


def _is_among(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Whether each value is among known ones, which ascend: bool[n]."""
    if not len(known):
        return np.zeros(len(values), bool)
    return known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values
