"""The codebook file of a side: reading it, writing it, and making it from a night's vectors.

A new vector with the same bits as an earlier one gets its codes, even if centroids moved (`KnownCodesTask`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.encoding.codebook import Codebook, Level, digests, fit_codebook, followed
from laserbatch.pipeline.encoding.schema import LEVELS, vector_column, vectors_of
from laserbatch.pipeline.encoding.vector_files import NewVectors, VectorFiles, VectorReader
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.atomic import atomic_path, require_sha256
from laserbatch.pipeline.storage.parquet import iter_parquet, read_parquet, write_parquet

CLUSTER_SEED = 0  # with another seed all clusters are fitted anew
MAX_FITTED_ROWS = 50_000  # if there are more vectors, every n-th is taken
_KNOWN_CODES = pa.schema({"digest": pa.uint64()} | dict.fromkeys(LEVELS, pa.int32()))


@dataclass(frozen=True)
class Coding:
    """The files by which vectors get their codes."""

    codebook: Path
    # The codes that new vectors already have, int32 (num_new, num_levels), -1 if none; earlier vectors keep theirs.
    codes: Path | None  # None: all vectors are coded anew


@dataclass(frozen=True)
class CodebookTask:
    """Makes the codebook of a night, and writes the codes that new vectors already have."""

    side: str
    places: Path  # Parquet file with the place of each vector of the side (`VectorFiles`), in the order of ids
    vectors: VectorFiles
    num_clusters: int  # as configured
    before: Path | None  # file of the codebook to continue; None: a new codebook is fitted
    known: tuple[Path, ...]  # files with codes of vectors in `before`, as `KnownCodesTask` writes them
    output: Coding  # files to write; if its codebook is `before`, the codebook stays as it is

    @property
    def inputs(self) -> list[Path]:
        return [self.places, *self.vectors.new.files, *self.known, *([self.before] if self.before else [])]

    @property
    def outputs(self) -> list[Path]:
        return [self.output.codebook, *([self.output.codes] if self.output.codes else [])]

    def run(self) -> None:
        codes = codes_of(self.vectors.new, self.known)
        if self.output.codes is not None:
            with atomic_path(self.output.codes) as temporary, temporary.open("wb") as file:
                np.save(file, codes, allow_pickle=False)
        if self.output.codebook == self.before:
            return
        parts = (batch["place"].to_numpy() for batch in iter_parquet(self.places, ["place"]))
        places = np.concatenate([np.zeros(0, np.int64), *(part[part < 0] if self.before else part for part in parts)])
        if self.before is None:
            codebook = fit_codebook(self._vectors_at(_spread(places)), self.num_clusters, CLUSTER_SEED)
        else:
            codebook = read_codebook(self.before)
            sample = _spread(places)
            sample = sample[codes[-1 - sample, 0] < 0]  # vectors that had codes before do not count again
            if len(sample):
                codebook = followed(codebook, self._vectors_at(sample), self.num_clusters, CLUSTER_SEED)
        write_codebook(codebook, self.output.codebook, self.side, self.vectors.new.dim)

    def _vectors_at(self, places: np.ndarray) -> np.ndarray:
        return VectorReader(self.vectors).take(places)[0]


def _spread(places: np.ndarray) -> np.ndarray:
    """At most `MAX_FITTED_ROWS` of the places, evenly spread."""
    return places[:: max(1, -(-len(places) // MAX_FITTED_ROWS))]


def read_codebook(path: Path) -> Codebook:
    """Read a codebook. Raises WorkspaceError if the file is damaged, lacks a column or is no codebook."""
    table = read_parquet(path, ["level", "num_vectors", "vector"])
    metadata = {key.decode(): value.decode() for key, value in (pq.read_schema(path).metadata or {}).items()}
    levels = []
    if missing := {"laserbatch.codebook", *(f"laserbatch.radius.{name}" for name in LEVELS)} - metadata.keys():
        raise WorkspaceError(f"{path} is not a codebook: its metadata lacks {min(missing)}. Restore it from a copy.")
    for name in LEVELS:
        rows = table.filter(pc.equal(table["level"], name))
        radius = float(metadata[f"laserbatch.radius.{name}"])
        levels.append(Level(vectors_of(rows), rows["num_vectors"].to_numpy(), radius))
    return Codebook(tuple(levels), metadata["laserbatch.codebook"])


def write_codebook(codebook: Codebook, path: Path, side: str, dim: int) -> None:
    metadata = {"laserbatch.record": "centroids", "laserbatch.version": "2", "laserbatch.side": side}
    metadata["laserbatch.codebook"] = codebook.key
    for name, level in zip(LEVELS, codebook.levels, strict=True):
        metadata[f"laserbatch.radius.{name}"] = repr(level.radius)
    schema = pa.schema(
        [
            pa.field("level", pa.string(), nullable=False),  # the column of feature tables that has its codes
            pa.field("code", pa.int32(), nullable=False),
            pa.field("num_vectors", pa.int64(), nullable=False),  # number of vectors it was made of, over all nights
            pa.field("vector", pa.list_(pa.float32(), dim), nullable=False),
        ],
        metadata,
    )
    sizes = [len(level.centroids) for level in codebook.levels]
    columns = [
        pa.array(np.repeat(LEVELS, sizes)),
        pa.array(np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])),
        pa.array(np.concatenate([level.weights for level in codebook.levels]).astype(np.int64)),
        vector_column(np.concatenate([level.centroids.reshape(-1, dim) for level in codebook.levels])),
    ]
    write_parquet(pa.table(columns, schema=schema), path)


@dataclass(frozen=True)
class KnownCodesTask:
    """Writes the digests and codes of those vectors of a feature file that are among the new ones.

    Raises WorkspaceError if the file differs from its checksum (None: not known).
    """

    new: NewVectors
    features: Path
    sha256: str | None
    path: Path

    @property
    def inputs(self) -> list[Path]:
        return [self.features, *self.new.files]

    @property
    def outputs(self) -> list[Path]:
        return [self.path]

    def run(self) -> None:
        if self.sha256 is not None:
            require_sha256(self.features, self.sha256)
        tables = [_KNOWN_CODES.empty_table()]
        for batch in iter_parquet(self.features, ["vector", *LEVELS]):
            of_rows = pa.array(digests(vectors_of(batch)))
            tables.append(pa.table([of_rows, *(batch[name] for name in LEVELS)], schema=_KNOWN_CODES))
        is_known = pc.is_in((table := pa.concat_tables(tables))["digest"], value_set=pa.array(self.new.digests()))
        write_parquet(table.filter(is_known), self.path)


def codes_of(new: NewVectors, files: Sequence[Path]) -> np.ndarray:
    """The first codes of each new vector in the files of `KnownCodesTask`s: int32 (num_new, num_levels), -1 if none."""
    known = pa.concat_tables([_KNOWN_CODES.empty_table(), *map(read_parquet, files)])
    rows = pc.index_in(pa.array(new.digests()), value_set=known["digest"])
    return np.column_stack([known[name].take(rows).fill_null(-1).to_numpy() for name in LEVELS])
