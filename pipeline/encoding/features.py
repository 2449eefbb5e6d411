"""Knowledge records to feature rows: vectors and cluster ids ("ID features") beside the ids they belong to.

Only the generated text is encoded. A history in front of it would push the knowledge out of the encoder's limit, and
would bring the history into the features by another door.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.encoding.schema import centroid_schema, feature_schema
from laserbatch.pipeline.encoding.settings import EncodingSettings
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

MAX_FULL_KMEANS_ROWS = 20_000  # above it, mini-batches: full k-means would take minutes
MAX_FITTED_ROWS = 50_000  # of more vectors every n-th is taken


@dataclass(frozen=True)
class FeatureFiles:
    """The features of one side on disk."""

    table: WrittenFile  # of `schema.feature_schema`, in the order of the ids, so that shard order does not show
    centroids: Path  # of `schema.centroid_schema`; a row's cluster is the nearest


@dataclass(frozen=True)
class SideFeatures:
    """What was written, and what there was to do."""

    files: FeatureFiles
    dim: int  # of the vectors
    num_clusters: int  # that somebody is in
    num_encoded: int = 0  # texts whose vectors were not known
    num_truncated: int = 0  # of those, texts that lost their end


def write_features(
    knowledge: Path,
    side: str,
    load_encoder: "Callable[[], TextEncoder]",
    table: Path,
    centroids: Path,
    settings: EncodingSettings | None = None,
    earlier: FeatureFiles | None = None,
    on_batch: Callable[[int], None] = lambda num_texts: None,
) -> SideFeatures:
    """Write the features of one side. In memory are ids and provenance; texts and vectors a row group at a time.

    Parameters
    ----------
    knowledge : folder of the side's knowledge files.
    load_encoder : called where a vector is not known.
    table, centroids : where to write.
    earlier : features of the same encoder. The vectors of texts that are among them are taken over, which are bit for
        bit what encoding again would give; and their centroids, as `fit_centroids` says. Where all are, so are the
        files.
    on_batch : called with the number of texts that a batch encoded.
    """
    settings = settings or EncodingSettings()
    rows = read_parquet(knowledge, ["entity_id", "run_id", "fingerprint"])
    id_type, rows = rows.schema.field("entity_id").type, as_large(rows)
    order = pc.sort_indices(rows["entity_id"]).to_numpy()
    found = np.full(len(order), -1) if earlier is None else _known_rows(rows, order, earlier.table.path, f"{side}_id")
    is_new = np.ones(len(order), bool)
    is_new[order] = found < 0
    before = None if earlier is None else _matrix(read_parquet(earlier.centroids))
    encoder = load_encoder() if before is None or is_new.any() else None
    dim = before.shape[1] if encoder is None else encoder.dim
    schema = feature_schema(side, id_type, dim)
    is_settled = before is not None and len(order) > MAX_FULL_KMEANS_ROWS and len(before) == settings.num_clusters
    if is_settled and not is_new.any() and _holds_all(earlier.table, found, schema):
        link_file(earlier.table.path, table)
        link_file(earlier.centroids, centroids)
        written = FeatureFiles(replace(earlier.table, path=table), centroids)
        return SideFeatures(written, dim, len(read_parquet(table, ["cluster_id"])["cluster_id"].unique()))
    table.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=table.parent) as scratch:
        new = np.memmap(scratch, np.float32, "w+", shape=(max(is_new.sum(), 1), dim))
        num_truncated = _encode(knowledge, is_new, encoder, new, on_batch) if is_new.any() else 0
        vectors = _Vectors(found, (np.cumsum(is_new) - 1)[order], new, None if earlier is None else earlier.table.path)
        fitted = before
        if not is_settled:
            fitted = fit_centroids(vectors.sample(), settings.num_clusters, settings.seed, before)
        num_in_cluster = np.zeros(len(fitted), np.int64)

        def groups() -> Iterator[pa.Table]:
            for places, matrix, cluster_ids in vectors.groups():
                # Where centroids stay, whoever has the vector of before has its cluster.
                is_asked = cluster_ids < 0 if fitted is before else np.ones(len(cluster_ids), bool)
                cluster_ids[is_asked] = nearest_centroids(matrix[is_asked], fitted)
                num_in_cluster[:] += np.bincount(cluster_ids, minlength=len(fitted))
                ids, run_ids, fingerprints = rows.take(pa.array(order[places])).columns
                columns = [ids, _vector_column(matrix), pa.array(cluster_ids), run_ids, fingerprints]
                yield pa.table(columns, schema.names)

        written = FeatureFiles(write_parquet(groups(), table, schema), centroids)
    numbers = pa.array(np.arange(len(fitted), dtype=np.int32))
    write_parquet(pa.table([numbers, _vector_column(fitted)], schema=centroid_schema(side, dim)), centroids)
    return SideFeatures(written, dim, int((num_in_cluster > 0).sum()), int(is_new.sum()), num_truncated)


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
    is_whole = is_whole and pq.read_schema(earlier.path).metadata == schema.metadata
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

    def groups(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Places of a row group's rows, their vectors, float32 (n, dim), and earlier clusters, int32[n] or -1."""
        batches = iter(()) if self.earlier is None else iter_parquet(self.earlier, ["vector", "cluster_id"])
        start, stop, batch = 0, 0, None
        for first in range(0, len(self.found), ROW_GROUP_ROWS):
            places = slice(first, min(first + ROW_GROUP_ROWS, len(self.found)))
            found = self.found[places]
            vectors, cluster_ids = self.new[self.new_rows[places]], np.full(len(found), -1, np.int32)
            wanted = np.flatnonzero(found >= 0)
            while len(wanted):
                while found[wanted[0]] >= stop:
                    batch = next(batches)
                    start, stop = stop, stop + batch.num_rows
                here = wanted[found[wanted] < stop]
                vectors[here] = _matrix(batch)[found[here] - start]
                cluster_ids[here] = batch["cluster_id"].to_numpy()[found[here] - start]
                wanted = wanted[len(here) :]
            yield places, vectors, cluster_ids

    def sample(self) -> np.ndarray:
        """At most `MAX_FITTED_ROWS` of them, in even steps: float32 (n, dim)."""
        step = max(1, -(-len(self.found) // MAX_FITTED_ROWS))
        parts = [vectors[-places.start % step :: step] for places, vectors, _ in self.groups()]
        return np.concatenate([self.new[:0], *parts])


def _matrix(table: pa.Table | pa.RecordBatch) -> np.ndarray:
    """The vectors of a table: float32 (num_rows, dim)."""
    column = table["vector"].combine_chunks() if isinstance(table, pa.Table) else table["vector"]
    return column.flatten().to_numpy().reshape(len(column), column.type.list_size)


def _vector_column(vectors: np.ndarray) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])


def fit_centroids(
    vectors: np.ndarray, num_clusters: int = 32, seed: int = 0, earlier: np.ndarray | None = None
) -> np.ndarray:
    """Centroids by k-means, the one of most vectors first: float32 (k, d), fewer than `num_clusters` of few vectors.

    Earlier ones, float32 (k, d), stay as they are, so that a vector keeps its cluster id from night to night, unless
    there are more of them than wanted, or fewer than a new fit would give. The same arguments give the same centroids.
    """
    is_small = len(vectors) <= MAX_FULL_KMEANS_ROWS
    num_fitted = min(num_clusters, len(np.unique(vectors, axis=0))) if is_small else num_clusters
    if earlier is not None and num_fitted <= len(earlier) <= num_clusters:
        return earlier
    if num_fitted == 0:
        return vectors
    from sklearn.cluster import KMeans, MiniBatchKMeans  # here: a night without a new text loads no scikit-learn
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    if is_small:
        model = KMeans(num_fitted, n_init=2, random_state=seed)
    else:
        model = MiniBatchKMeans(num_fitted, n_init=3, batch_size=4096, random_state=seed)
    # On one thread: several add up their partial sums in the order in which they finish.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # clusters may collapse where texts are near-equal
        centroids = model.fit(vectors).cluster_centers_.astype(np.float32)
    counts = np.bincount(nearest_centroids(vectors, centroids), minlength=num_fitted)
    return centroids[np.argsort(-counts, kind="stable")]


def nearest_centroids(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Cluster id of each vector: int32 (n,), the row of its nearest centroid."""
    if len(vectors) == 0:
        return np.zeros(0, np.int32)
    from sklearn.metrics import pairwise_distances_argmin

    return pairwise_distances_argmin(vectors, centroids).astype(np.int32)
