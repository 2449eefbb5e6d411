"""The files of a side's features: dividing ids into files, and writing one file.

A file holds a range of ids. Ranges stay the same from night to night, so that a file without changes is carried over as
it is.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from laserbatch.pipeline.encoding.codebook_file import Coding, read_codebook
from laserbatch.pipeline.encoding.schema import days_valid, feature_schema, moments, vector_column
from laserbatch.pipeline.encoding.vector_files import VectorFiles, VectorReader
from laserbatch.pipeline.storage.atomic import link_file, require_sha256
from laserbatch.pipeline.storage.figures import FeatureFile
from laserbatch.pipeline.storage.parquet import iter_parquet, iter_range, num_rows_of, write_parquet

PART_ROWS = 64 * 1024  # a file has at most twice this number of rows


def part_bounds(num_rows: int, id_at: Callable[[int], int | str], first_ids: Sequence[int | str]) -> list[int]:
    """The first row of each file, with rows in the order of ids, and the end of the last; 0 and 0 if there are no rows.

    `id_at` returns the id of a row. Files begin at `first_ids`, as those of the previous run do, ascending. A file of
    more than `2 * PART_ROWS` rows is divided, and then neighbours of at most `PART_ROWS` rows in all are joined.
    """
    starts = sorted({0, *(bisect_left(range(num_rows), first_id, key=id_at) for first_id in first_ids[1:])})
    pieces = []
    for start, stop in pairwise([*starts, num_rows]):
        num_pieces = 1 if stop - start <= 2 * PART_ROWS else -(-(stop - start) // PART_ROWS)
        pieces += [start + (stop - start) * piece // num_pieces for piece in range(num_pieces)]
    bounds = [0]
    for start, stop in pairwise([*pieces, num_rows]):
        if 0 < start < stop and stop - bounds[-1] > PART_ROWS:
            bounds.append(start)
    return [*bounds, num_rows]


@dataclass(frozen=True)
class WrittenPart:
    """A file of features, and the codes of the first level that occur in it."""

    file: FeatureFile
    clusters: tuple[int, ...]


@dataclass(frozen=True)
class PartTask:
    """Writes a file of a side's features."""

    side: str
    rows: Path  # Parquet file with the id, the provenance and the place of the vector of each row of the side
    start: int  # the file gets the rows from `start` to `stop`
    stop: int
    vectors: VectorFiles  # the vectors that these rows name
    coding: Coding
    checksums: Mapping[Path, str]  # of the earlier files from which these rows are taken
    is_unchanged: bool  # whether one of the earlier files has exactly these rows
    path: Path

    @property
    def inputs(self) -> list[Path]:
        files = [self.rows, *self.vectors.new.files, *(earlier.path for earlier in self.vectors.earlier)]
        return [*files, self.coding.codebook, *([self.coding.codes] if self.coding.codes else [])]

    @property
    def outputs(self) -> list[Path]:
        return [self.path]

    def run(self) -> WrittenPart:
        """Write the file. Raises WorkspaceError if an earlier file is not as it was written."""
        for path, sha256 in self.checksums.items():
            require_sha256(path, sha256)
        id_type = pq.read_schema(self.rows).field(f"{self.side}_id").type
        schema = feature_schema(self.side, id_type, self.vectors.new.dim)
        clusters: set[int] = set()
        if self.is_unchanged and _has_schema(earlier := self.vectors.earlier[0].path, schema):
            link_file(earlier, self.path)
            for batch in iter_parquet(self.path, ["cluster_id"]):
                clusters.update(batch["cluster_id"].unique().to_pylist())
            file = FeatureFile(self.path.name, num_rows_of(self.path), self.checksums[earlier])
        else:
            written = write_parquet(self._rows(clusters, schema), self.path, schema)
            file = FeatureFile(self.path.name, written.num_rows, written.sha256)
        return WrittenPart(file, tuple(sorted(clusters)))

    def _rows(self, clusters: set[int], schema: pa.Schema) -> Iterator[pa.Table]:
        """Yield the rows in groups; the clusters of their texts are added to `clusters`."""
        codebook, known = read_codebook(self.coding.codebook), None
        if self.coding.codes is not None:
            known = np.load(self.coding.codes, mmap_mode="r", allow_pickle=False)
        reader = VectorReader(self.vectors)
        columns = [f"{self.side}_id", "run_id", "fingerprint", "place"]
        for batch in iter_range(self.rows, self.start, self.stop, columns):
            ids, run_ids, fingerprints, places = batch.columns
            places = places.to_numpy()
            vectors, codes = reader.take(places)
            if known is None:
                codes[:] = -1
            else:
                codes[places < 0] = known[-1 - places[places < 0]]
            is_uncoded = codes[:, 0] < 0
            codes[is_uncoded] = codebook.codes(vectors[is_uncoded])
            clusters.update(np.unique(codes[:, 0]).tolist())
            since = moments(days_valid(run_ids))
            of_batch = [ids, vector_column(vectors), *map(pa.array, codes.T), run_ids, fingerprints, since]
            yield pa.table(of_batch, schema.names)


def _has_schema(path: Path, schema: pa.Schema) -> bool:
    written = pq.read_schema(path)
    return (written.names, written.metadata) == (schema.names, schema.metadata)
