"""Knowledge records to feature rows: vectors and cluster ids ("ID features") beside the ids they belong to.

Only the generated text is encoded. A history in front of it would push the knowledge out of the encoder's limit, and
would bring the history into the features by another door.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.encoding.codebook import Codebook, Level, digests, fit_codebook, followed
from laserbatch.pipeline.encoding.schema import LEVELS, centroid_schema, days_valid, feature_schema, moments
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.text_parts import PartsEncoder, text_parts
from laserbatch.pipeline.encoding.vectors import vector_column, vectors_of
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import link_file, sha256_file
from laserbatch.pipeline.storage.figures import FeatureFigures
from laserbatch.pipeline.storage.parquet import (
    ROW_GROUP_ROWS,
    as_large,
    iter_parquet,
    read_parquet,
    rows_among,
    write_parquet,
)
from laserbatch.pipeline.storage.run_folder import RunFolder

CLUSTER_SEED = 0  # another one would fit all clusters anew
MAX_FITTED_ROWS = 50_000  # of more vectors every n-th is taken


@dataclass(frozen=True)
class EarlierFeatures:
    """The features of one side of a run that was written before."""

    run: RunFolder
    figures: FeatureFigures

    @property
    def path(self) -> Path:
        return self.run.root / self.figures.file


@dataclass(frozen=True)
class FeatureWriter:
    """Writes the features of one side of a run's texts, `feature_schema` in the order of ids, and their codebook.

    In memory are ids and provenance; texts and vectors a row group at a time.

    Attributes
    ----------
    load_encoder : called with the number of texts whose vectors are not known.
    fields : those of `TextPart`.
    on_batch : called with the number of texts that a batch encoded.
    """

    run: RunFolder
    side: Side
    load_encoder: Callable[[int], PartsEncoder]
    encoder_id: str
    settings: EncodingSettings
    fields: Sequence[str] = ()
    on_batch: Callable[[int], None] = lambda num_texts: None

    def write(self, earlier: EarlierFeatures | None = None, codes_of: RunFolder | None = None) -> FeatureFigures:
        """Write both files.

        Parameters
        ----------
        earlier : of the same encoder. The vectors of texts that are among them are taken over, which are bit for bit
            what encoding again would give; so are their codes, and the codebook goes on from theirs. Where all texts
            are among them, so are the files.
        codes_of : the run whose plain texts these are: its codes and codebook are taken as they are.
        """
        side, settings = self.side, self.settings
        table, centroids = self.run.features_path(side), self.run.centroids_path(side)
        earlier_path = None if earlier is None else earlier.path
        with_codes = codes_of or (None if earlier is None else earlier.run)
        texts = _Texts.read(self.run.knowledge_folder(side), earlier_path, f"{side}_id")
        before = None if with_codes is None else _read_codebook(with_codes.centroids_path(side))
        if codes_of is None and before is not None and not before.is_for(settings.num_clusters, CLUSTER_SEED):
            before = None
        encoder = self.load_encoder(texts.num_new) if earlier_path is None or texts.num_new else None
        dim = pq.read_schema(earlier_path).field("vector").type.list_size if encoder is None else encoder.dim
        schema = feature_schema(side, texts.id_type, dim)
        is_same = before is not None and not texts.num_new
        if is_same and earlier is not None and _holds_all(earlier, texts.earlier_rows, schema):
            link_file(earlier.path, table)
            link_file(earlier.run.centroids_path(side), centroids)
            return replace(earlier.figures, num_encoded=0, num_truncated=0)
        table.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=table.parent, buffering=0) as scratch:
            new = _NewVectors(scratch, dim, texts.num_new)
            num_truncated = 0 if encoder is None else self._encode(texts.order[texts.earlier_rows < 0], encoder, new)
            vectors = _MergedVectors(texts.earlier_rows, new, earlier_path)
            previous_codes = _codes_before(
                new, None if before is None or with_codes is None else with_codes.features_path(side)
            )
            if before is None:
                codebook, reused_codes = fit_codebook(vectors.sample(), settings.num_clusters, CLUSTER_SEED), None
            elif codes_of is None:
                codebook, reused_codes = _followed_by(before, new, previous_codes[:, 0] < 0, settings), previous_codes
            else:
                codebook, reused_codes = before, previous_codes
            clusters: set[int] = set()
            rows = _feature_rows(texts, vectors, codebook, reused_codes, clusters)
            written = write_parquet((pa.table(columns, schema.names) for columns in rows), table, schema)
        _write_codebook(codebook, centroids, side, dim)
        return FeatureFigures(
            file=table.relative_to(self.run.root).as_posix(),
            num_rows=written.num_rows,
            sha256=written.sha256,
            dim=dim,
            centroids=centroids.relative_to(self.run.root).as_posix(),
            num_clusters=len(clusters),
            num_encoded=texts.num_new,
            num_truncated=num_truncated,
            encoder=self.encoder_id,
            codebook=codebook.key,
        )

    def _encode(self, rows: np.ndarray, encoder: PartsEncoder, new: "_NewVectors") -> int:
        """Write the vectors of some rows, given in the order of ids; returns how many texts lost their end."""
        by_file, row_of, num_truncated = np.sort(rows).astype(np.int64), np.argsort(rows), 0
        folder = self.run.knowledge_folder(self.side)
        parts = text_parts(folder, by_file, self.fields, encoder.part_size(len(rows)))
        for part, encoding in encoder.encode_parts(parts, self.on_batch):
            new.write(row_of[part.first : part.first + part.num_texts], encoding.vectors)
            num_truncated += encoding.num_truncated
        return num_truncated


@dataclass(frozen=True)
class _Texts:
    """The texts of a side: ids and provenance in the order of files, and the order of ids.

    `found`, int64[n], are rows of the earlier features by the order of ids, ascending but for -1 where the text is new.
    """

    rows: pa.Table
    id_type: pa.DataType
    order: np.ndarray
    earlier_rows: np.ndarray

    @classmethod
    def read(cls, knowledge: Path, earlier: Path | None, id_column: str) -> "_Texts":
        rows = read_parquet(knowledge, ["entity_id", "run_id", "fingerprint"])
        id_type, rows = rows.schema.field("entity_id").type, as_large(rows)
        order = pc.sort_indices(rows["entity_id"]).to_numpy()
        earlier_rows = np.full(len(order), -1) if earlier is None else _known_rows(rows, order, earlier, id_column)
        return cls(rows, id_type, order, earlier_rows)

    @property
    def num_new(self) -> int:
        return int((self.earlier_rows < 0).sum())


def _feature_rows(
    texts: _Texts, vectors: "_MergedVectors", codebook: Codebook, previous_codes: np.ndarray | None, clusters: set[int]
) -> Iterator[list[pa.Array | pa.ChunkedArray]]:
    """The columns of each row group; clusters that a text is in are added to `clusters`.

    `previous_codes`, int32 (num_new, num_levels): codes that new vectors had before, -1 without; None: code all anew.
    """
    for places, new_places, matrix, codes in vectors.groups():
        if previous_codes is None:
            is_uncoded = np.ones(len(codes), bool)
        else:
            codes[texts.earlier_rows[places] < 0] = previous_codes[new_places]
            is_uncoded = codes[:, 0] < 0
        codes[is_uncoded] = codebook.codes(matrix[is_uncoded])
        clusters.update(np.unique(codes[:, 0]).tolist())
        ids, run_ids, fingerprints = texts.rows.take(pa.array(texts.order[places])).columns
        since = moments(days_valid(run_ids.combine_chunks()))
        yield [ids, vector_column(matrix), *map(pa.array, codes.T), run_ids, fingerprints, since]


class _NewVectors:
    """Vectors of texts that were not known, in the order of their ids; in memory are their digests."""

    def __init__(self, scratch: BinaryIO, dim: int, num_rows: int) -> None:
        self._scratch, self.dim = scratch, dim
        self.digests, self.heads = np.zeros(num_rows, np.uint64), np.zeros(num_rows, np.uint32)

    def write(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """Vectors of some rows, in any order, float32 (n, dim)."""
        self.digests[rows], self.heads[rows] = digests(vectors), _heads(vectors)
        size = 4 * self.dim
        for row, vector in zip(rows.tolist(), np.ascontiguousarray(vectors, np.float32), strict=True):
            os.pwrite(self._scratch.fileno(), vector.data, row * size)

    def read(self, start: int, stop: int) -> np.ndarray:
        """float32 (stop - start, dim)."""
        vectors = np.empty((stop - start, self.dim), np.float32)
        if len(vectors):
            os.preadv(self._scratch.fileno(), [vectors.data], 4 * self.dim * start)
        return vectors

    def sample(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows in even steps, at most so many, and their vectors."""
        rows = np.arange(0, len(self.digests), max(1, -(-len(self.digests) // most)))
        parts = (self.read(row, row + 1) for row in rows.tolist())
        return rows, np.concatenate([np.zeros((0, self.dim), np.float32), *parts])


def _followed_by(before: Codebook, new: _NewVectors, is_unknown: np.ndarray, settings: EncodingSettings) -> Codebook:
    """The codebook after a night's new vectors, of which those that had codes before say nothing."""
    rows, sample = new.sample(MAX_FITTED_ROWS)
    sample = sample[is_unknown[rows]]
    return followed(before, sample, settings.num_clusters, CLUSTER_SEED) if len(sample) else before


def _codes_before(new: _NewVectors, path: Path | None) -> np.ndarray:
    """Codes that vectors with the bits of new ones have in a feature table, int32 (num_new, num_levels); -1 without.

    A vector that did not change keeps its codes, even if centroids moved.
    """
    heads = np.unique(new.heads)
    digest_parts, codes = [np.zeros(0, np.uint64)], [np.zeros((0, len(LEVELS)), np.int32)]
    for batch in iter_parquet(path, ["vector", *LEVELS]) if path is not None and len(heads) else ():
        vectors = vectors_of(batch)
        near = _heads(vectors)
        near = np.flatnonzero(heads[np.minimum(np.searchsorted(heads, near), len(heads) - 1)] == near)
        digest_parts.append(digests(vectors[near]))
        codes.append(np.column_stack([batch[name].to_numpy()[near] for name in LEVELS]))
    known_digests, first = np.unique(np.concatenate(digest_parts), return_index=True)
    if not len(known_digests):
        return np.full((len(new.digests), len(LEVELS)), -1, np.int32)
    places = np.minimum(np.searchsorted(known_digests, new.digests), len(known_digests) - 1)
    is_known = known_digests[places] == new.digests
    return np.where(is_known[:, None], np.concatenate(codes)[first[places]], -1)


def _heads(vectors: np.ndarray) -> np.ndarray:
    """The bits of the first number of each: uint32 (n,). Where they differ, so do the vectors."""
    return np.ascontiguousarray(vectors[:, 0], np.float32).view(np.uint32)


def _read_codebook(path: Path) -> Codebook:
    """Raises WorkspaceError where the file is damaged or of an earlier version."""
    table = read_parquet(path, ["level", "num_vectors", "vector"])
    metadata = {key.decode(): value.decode() for key, value in (pq.read_schema(path).metadata or {}).items()}
    levels = []
    for name in LEVELS:
        rows = table.filter(pc.equal(table["level"], name))
        radius = float(metadata[f"laserbatch.radius.{name}"])
        levels.append(Level(vectors_of(rows), rows["num_vectors"].to_numpy(), radius))
    return Codebook(tuple(levels), metadata["laserbatch.codebook"])


def _write_codebook(codebook: Codebook, path: Path, side: str, dim: int) -> None:
    levels = dict(zip(LEVELS, codebook.levels, strict=True))
    radii = {f"laserbatch.radius.{name}": repr(level.radius) for name, level in levels.items()}
    schema = centroid_schema(side, dim, {"laserbatch.codebook": codebook.key, **radii})
    parts = [
        pa.table(
            [
                pa.array([name] * len(level.centroids), pa.string()),
                pa.array(np.arange(len(level.centroids), dtype=np.int32)),
                pa.array(level.weights.astype(np.int64)),
                vector_column(level.centroids.reshape(-1, dim)),
            ],
            schema=schema,
        )
        for name, level in levels.items()
    ]
    write_parquet(pa.concat_tables(parts), path)


def changed_rows(table: Path, earlier: Path, id_column: str) -> tuple[np.ndarray, pa.Array]:
    """What of a feature table is not in an earlier one: bool[n], rows of a new text; and the ids that went."""
    rows = as_large(read_parquet(table, [id_column, "run_id", "fingerprint"])).rename_columns({id_column: "entity_id"})
    before = as_large(read_parquet(earlier, [id_column]))[id_column].combine_chunks()
    gone = before.filter(pc.invert(pc.is_in(before, value_set=rows["entity_id"].combine_chunks())))
    return _known_rows(rows, np.arange(rows.num_rows), earlier, id_column) < 0, gone


def _known_rows(rows: pa.Table, order: np.ndarray, earlier: Path, id_column: str) -> np.ndarray:
    """The row of earlier features of each entity's text, in the order of ids: int64[n]; -1 without one.

    The entity, the run that generated it and the prompt that it answers say which text it is.
    """
    ids = as_large(read_parquet(earlier, [id_column]))[id_column].combine_chunks()
    earlier_rows, start = rows_among(rows["entity_id"].combine_chunks().take(pa.array(order)), ids), 0
    places = np.flatnonzero(earlier_rows >= 0)
    ascending = earlier_rows[places]  # both are in the order of ids
    for batch in iter_parquet(earlier, ["run_id", "fingerprint"]):
        first, last = np.searchsorted(ascending, [start, start + batch.num_rows])
        matched = places[first:last]
        ours, theirs = rows.take(pa.array(order[matched])), pa.array(ascending[first:last] - start)
        for name in batch.schema.names:
            is_same = pc.equal(ours[name].combine_chunks(), batch[name].take(theirs).cast(pa.large_string()))
            earlier_rows[matched[~is_same.to_numpy(zero_copy_only=False)]] = -1
        start += batch.num_rows
    return earlier_rows


def _holds_all(earlier: EarlierFeatures, rows: np.ndarray, schema: pa.Schema) -> bool:
    """Whether earlier features are those of tonight, row for row and as they were written."""
    is_whole = earlier.figures.num_rows == len(rows) and np.array_equal(rows, np.arange(len(rows)))
    earlier_schema = pq.read_schema(earlier.path)
    is_whole = is_whole and (earlier_schema.names, earlier_schema.metadata) == (schema.names, schema.metadata)
    return is_whole and sha256_file(earlier.path) == earlier.figures.sha256


@dataclass(frozen=True)
class _MergedVectors:
    """Vectors in the order of ids, from a file of earlier ones and from new ones.

    `found`, int64[n], are rows of the file, ascending but for -1 where the vector is new.
    """

    earlier_rows: np.ndarray
    new: _NewVectors
    earlier: Path | None

    def groups(self) -> Iterator[tuple[slice, slice, np.ndarray, np.ndarray]]:
        """Iterate over row groups: places; places in `new` of the new ones; vectors, float32 (n, dim); codes.

        Codes are those of the file, int32 (n, num_levels); -1 of the new.
        """
        batches = iter(()) if self.earlier is None else iter_parquet(self.earlier, ["vector", *LEVELS])
        start, stop, num_new, batch = 0, 0, 0, None
        for first in range(0, len(self.earlier_rows), ROW_GROUP_ROWS):
            places = slice(first, min(first + ROW_GROUP_ROWS, len(self.earlier_rows)))
            earlier_rows = self.earlier_rows[places]
            new_places = slice(num_new, num_new := num_new + int((earlier_rows < 0).sum()))
            vectors = np.empty((len(earlier_rows), self.new.dim), np.float32)
            vectors[earlier_rows < 0] = self.new.read(new_places.start, new_places.stop)
            codes = np.full((len(earlier_rows), len(LEVELS)), -1, np.int32)
            pending = np.flatnonzero(earlier_rows >= 0)
            while len(pending):
                while earlier_rows[pending[0]] >= stop:
                    batch = next(batches)
                    start, stop = stop, stop + batch.num_rows
                assert batch is not None
                here = pending[earlier_rows[pending] < stop]
                vectors[here] = vectors_of(batch)[earlier_rows[here] - start]
                codes[here] = np.column_stack([batch[name].to_numpy()[earlier_rows[here] - start] for name in LEVELS])
                pending = pending[len(here) :]
            yield places, new_places, vectors, codes

    def sample(self) -> np.ndarray:
        """At most `MAX_FITTED_ROWS` of them, in even steps: float32 (n, dim)."""
        step = max(1, -(-len(self.earlier_rows) // MAX_FITTED_ROWS))
        parts = [vectors[-places.start % step :: step] for places, _, vectors, _ in self.groups()]
        return np.concatenate([np.zeros((0, self.new.dim), np.float32), *parts])
