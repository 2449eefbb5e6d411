"""Knowledge records to feature rows: vectors and cluster ids ("ID features") beside the ids they belong to.

Only the generated text is encoded. A history in front of it would push the knowledge out of the encoder's limit, and
would bring the history into the features by another door.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.encoding.codebook import Codebook, Level, digests, fit_codebook, followed
from laserbatch.pipeline.encoding.schema import LEVELS, centroid_schema, days_valid, feature_schema, moments
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.vectors import VectorForm, vectors_of
from laserbatch.pipeline.storage.atomic import link_file, sha256_file
from laserbatch.pipeline.storage.parquet import (
    ROW_GROUP_ROWS,
    WrittenFile,
    as_large,
    iter_parquet,
    read_parquet,
    write_parquet,
)

if TYPE_CHECKING:
    from laserbatch.pipeline.encoding.encoder import TextEncoder

MAX_FITTED_ROWS = 50_000  # of more vectors every n-th is taken


@dataclass(frozen=True)
class FeatureFiles:
    """The features of one side on disk."""

    table: WrittenFile  # of `schema.feature_schema`, in the order of the ids, so that shard order does not show
    centroids: Path  # the codebook, of `schema.centroid_schema`


@dataclass(frozen=True)
class SideFeatures:
    """What was written, and what there was to do."""

    files: FeatureFiles
    dim: int  # of the vectors
    num_clusters: int  # that somebody is in
    num_encoded: int = 0  # texts whose vectors were not known
    num_truncated: int = 0  # of those, texts that lost their end
    codebook: str = ""  # codes of one codebook may be compared


def write_features(
    knowledge: Path,
    side: str,
    load_encoder: "Callable[[], TextEncoder]",
    table: Path,
    centroids: Path,
    settings: EncodingSettings | None = None,
    earlier: FeatureFiles | None = None,
    codes_of: FeatureFiles | None = None,
    on_batch: Callable[[int], None] = lambda num_texts: None,
) -> SideFeatures:
    """Write the features of one side. In memory are ids and provenance; texts and vectors a row group at a time.

    Parameters
    ----------
    knowledge : folder of the side's knowledge files.
    load_encoder : called where a vector is not known.
    table, centroids : where to write.
    earlier : features of the same encoder. The vectors of texts that are among them are taken over, which are bit for
        bit what encoding again would give; so are their codes, and the codebook goes on from theirs. Where all texts
        are among them, so are the files.
    codes_of : features whose codes and codebook are taken as they are: of the run whose plain texts these are.
    on_batch : called with the number of texts that a batch encoded.
    """
    settings = settings or EncodingSettings()
    rows = read_parquet(knowledge, ["entity_id", "run_id", "fingerprint"])
    id_type, rows = rows.schema.field("entity_id").type, as_large(rows)
    order = pc.sort_indices(rows["entity_id"]).to_numpy()
    found = np.full(len(order), -1) if earlier is None else _known_rows(rows, order, earlier.table.path, f"{side}_id")
    is_new = np.ones(len(order), bool)
    is_new[order] = found < 0
    before = None if (codes_of or earlier) is None else _read_codebook((codes_of or earlier).centroids)
    if codes_of is None and before is not None and not before.is_for(settings.num_clusters, settings.seed):
        before = None
    encoder = load_encoder() if earlier is None or is_new.any() else None
    dim = _dim(earlier.table.path) if encoder is None else encoder.dim
    schema = feature_schema(side, id_type, dim)
    if None not in (before, earlier) and not is_new.any() and _holds_all(earlier.table, found, schema):
        link_file(earlier.table.path, table)
        link_file(earlier.centroids, centroids)
        written = FeatureFiles(replace(earlier.table, path=table), centroids)
        num_clusters = len(read_parquet(table, ["cluster_id"])["cluster_id"].unique())
        return SideFeatures(written, dim, num_clusters, codebook=before.key)
    table.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=table.parent) as scratch:
        new = np.memmap(scratch, np.float32, "w+", shape=(max(is_new.sum(), 1), dim))
        num_truncated = _encode(knowledge, is_new, encoder, new, on_batch) if is_new.any() else 0
        vectors = _Vectors(found, (np.cumsum(is_new) - 1)[order], new, None if earlier is None else earlier.table.path)
        known = _KnownCodes.of(None if before is None else (codes_of or earlier).table.path)
        codebook = before
        if before is None:
            codebook = fit_codebook(vectors.sample(), settings.num_clusters, settings.seed)
        elif codes_of is None:
            codebook = _followed_by(before, new[: is_new.sum()], known, settings)
        clusters_in_use: set[int] = set()

        def groups() -> Iterator[pa.Table]:
            for places, matrix in vectors.groups():
                codes, is_known = known.codes_of(matrix)
                codes[~is_known] = codebook.codes(matrix[~is_known])
                clusters_in_use.update(np.unique(codes[:, 0]).tolist())
                ids, run_ids, fingerprints = rows.take(pa.array(order[places])).columns
                columns = [ids, VectorForm(dim).column(matrix), *map(pa.array, codes.T), run_ids, fingerprints]
                since = moments(days_valid(run_ids.combine_chunks()))
                yield pa.table([*columns, since], schema.names)

        written = FeatureFiles(write_parquet(groups(), table, schema), centroids)
    _write_codebook(codebook, centroids, side, dim)
    num_new = int(is_new.sum())
    return SideFeatures(written, dim, len(clusters_in_use), num_new, num_truncated, codebook.key)


def _followed_by(before: Codebook, new: np.ndarray, known: "_KnownCodes", settings: EncodingSettings) -> Codebook:
    """The codebook after a night's new vectors, float32 (n, dim), of which those that had codes before say nothing."""
    sample = np.array(new[:: max(1, -(-len(new) // MAX_FITTED_ROWS))])
    sample = sample[~known.codes_of(sample)[1]]
    return followed(before, sample, settings.num_clusters, settings.seed) if len(sample) else before


@dataclass(frozen=True)
class _KnownCodes:
    """Codes of earlier vectors by their bits: who has the vector of before has its codes, wherever centroids went."""

    digests: np.ndarray  # uint64 (n,), ascending
    codes: np.ndarray  # int32 (n, num_levels)

    @classmethod
    def of(cls, path: Path | None) -> "_KnownCodes":
        found, codes = [np.zeros(0, np.uint64)], [np.zeros((0, len(LEVELS)), np.int32)]
        for batch in () if path is None else iter_parquet(path, ["vector", *LEVELS]):
            found.append(digests(vectors_of(batch)))
            codes.append(np.column_stack([batch[name].to_numpy() for name in LEVELS]))
        order = np.argsort(np.concatenate(found), kind="stable")
        return cls(np.concatenate(found)[order], np.concatenate(codes)[order])

    def codes_of(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes, int32 (n, num_levels), and whether they are known, bool (n,)."""
        if not len(self.digests):
            return np.zeros((len(vectors), len(LEVELS)), np.int32), np.zeros(len(vectors), bool)
        wanted = digests(vectors)
        places = np.minimum(np.searchsorted(self.digests, wanted), len(self.digests) - 1)
        return self.codes[places], self.digests[places] == wanted


def _read_codebook(path: Path) -> Codebook:
    """Raises WorkspaceError where the file is damaged or of an earlier version."""
    table = read_parquet(path, ["level", "num_vectors", "vector"])
    told = {key.decode(): value.decode() for key, value in (pq.read_schema(path).metadata or {}).items()}
    levels = []
    for name in LEVELS:
        of_level = table.filter(pc.equal(table["level"], name))
        radius = float(told[f"laserbatch.radius.{name}"])
        levels.append(Level(vectors_of(of_level), of_level["num_vectors"].to_numpy(), radius))
    return Codebook(tuple(levels), told["laserbatch.codebook"])


def _write_codebook(codebook: Codebook, path: Path, side: str, dim: int) -> None:
    levels = dict(zip(LEVELS, codebook.levels, strict=True))
    told = {f"laserbatch.radius.{name}": repr(level.radius) for name, level in levels.items()}
    schema = centroid_schema(side, dim, {"laserbatch.codebook": codebook.key, **told})
    parts = [
        pa.table(
            [
                pa.array([name] * len(level.centroids), pa.string()),
                pa.array(np.arange(len(level.centroids), dtype=np.int32)),
                pa.array(level.weights.astype(np.int64)),
                VectorForm(dim).column(level.centroids.reshape(-1, dim)),
            ],
            schema=schema,
        )
        for name, level in levels.items()
    ]
    write_parquet(pa.concat_tables(parts), path)


def _dim(path: Path) -> int:
    return pq.read_schema(path).field("vector").type.list_size


def changed_rows(table: Path, earlier: Path, id_column: str) -> tuple[np.ndarray, pa.Array]:
    """What of a feature table is not in an earlier one: bool[n], rows of a new text; and the ids that went."""
    rows = as_large(read_parquet(table, [id_column, "run_id", "fingerprint"])).rename_columns({id_column: "entity_id"})
    before = as_large(read_parquet(earlier, [id_column]))[id_column].combine_chunks()
    gone = before.filter(pc.invert(pc.is_in(before, value_set=rows["entity_id"].combine_chunks())))
    return _known_rows(rows, np.arange(rows.num_rows), earlier, id_column) < 0, gone


def _known_rows(rows: pa.Table, order: np.ndarray, earlier: Path, id_column: str) -> np.ndarray:
    """Of each entity, in the order of ids, the row of earlier features of the same text: int64[n]; -1 without one.

    The entity, the run that generated it and the prompt that it answers say which text it is.
    """
    ids = as_large(read_parquet(earlier, [id_column]))[id_column].combine_chunks()
    if ids.type != rows["entity_id"].type:
        return np.full(len(order), -1)
    found = pc.index_in(rows["entity_id"].combine_chunks().take(pa.array(order)), value_set=ids)
    found, start = pc.fill_null(found, -1).to_numpy().astype(np.int64), 0
    places = np.flatnonzero(found >= 0)
    ascending = found[places]  # both are in the order of ids
    for batch in iter_parquet(earlier, ["run_id", "fingerprint"]):
        first, last = np.searchsorted(ascending, [start, start + batch.num_rows])
        its_own = places[first:last]
        ours, theirs = rows.take(pa.array(order[its_own])), pa.array(ascending[first:last] - start)
        for name in batch.schema.names:
            same = pc.equal(ours[name].combine_chunks(), batch[name].take(theirs).cast(pa.large_string()))
            found[its_own[~same.to_numpy(zero_copy_only=False)]] = -1
        start += batch.num_rows
    return found


def _holds_all(earlier: WrittenFile, found: np.ndarray, schema: pa.Schema) -> bool:
    """Whether earlier features are those of tonight, row for row and as they were written."""
    is_whole = earlier.num_rows == len(found) and np.array_equal(found, np.arange(len(found)))
    found_schema = pq.read_schema(earlier.path)
    is_whole = is_whole and (found_schema.names, found_schema.metadata) == (schema.names, schema.metadata)
    return is_whole and sha256_file(earlier.path) == earlier.sha256


def _encode(
    knowledge: Path, is_new: np.ndarray, encoder: "TextEncoder", vectors: np.ndarray, on_batch: Callable[[int], None]
) -> int:
    """Fill in the vectors of new texts, in the order of their files; returns how many texts lost their end."""
    texts, num_rows, num_done, num_truncated = [], 0, 0, 0
    for batch in iter_parquet(knowledge, ["text"]):
        texts += batch["text"].filter(pa.array(is_new[num_rows : num_rows + batch.num_rows])).to_pylist()
        num_rows += batch.num_rows
        if len(texts) >= ROW_GROUP_ROWS or num_rows == len(is_new):
            encoding = encoder.encode(texts, on_batch)
            vectors[num_done : num_done + len(texts)] = encoding.vectors
            num_done, num_truncated, texts = num_done + len(texts), num_truncated + encoding.num_truncated, []
    return num_truncated


@dataclass(frozen=True)
class _Vectors:
    """Vectors in the order of ids, from a file of earlier ones and an array of new ones.

    Attributes
    ----------
    found, new_rows : int64[n], rows of the file, ascending but for -1 where there is none; then rows of `new`.
    """

    found: np.ndarray
    new_rows: np.ndarray
    new: np.ndarray
    earlier: Path | None

    def groups(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Places of a row group's rows, and their vectors, float32 (n, dim)."""
        batches = iter(()) if self.earlier is None else iter_parquet(self.earlier, ["vector"])
        start, stop, batch = 0, 0, None
        for first in range(0, len(self.found), ROW_GROUP_ROWS):
            places = slice(first, min(first + ROW_GROUP_ROWS, len(self.found)))
            found = self.found[places]
            vectors = self.new[self.new_rows[places]]
            wanted = np.flatnonzero(found >= 0)
            while len(wanted):
                while found[wanted[0]] >= stop:
                    batch = next(batches)
                    start, stop = stop, stop + batch.num_rows
                here = wanted[found[wanted] < stop]
                vectors[here] = vectors_of(batch)[found[here] - start]
                wanted = wanted[len(here) :]
            yield places, vectors

    def sample(self) -> np.ndarray:
        """At most `MAX_FITTED_ROWS` of them, in even steps: float32 (n, dim)."""
        step = max(1, -(-len(self.found) // MAX_FITTED_ROWS))
        parts = [vectors[-places.start % step :: step] for places, vectors in self.groups()]
        return np.concatenate([self.new[:0], *parts])
