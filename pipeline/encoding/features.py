"""Knowledge records to feature rows: vectors and cluster ids ("ID features") beside the ids they belong to.

Only the generated text is encoded. A history in front of it would push the knowledge out of the encoder's limit, and
would bring the history into the features by another door.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.encoding.schema import centroid_schema, feature_schema
from laserbatch.pipeline.encoding.settings import EncodingSettings

if TYPE_CHECKING:
    from laserbatch.pipeline.encoding.encoder import TextEncoder

MAX_FULL_KMEANS_ROWS = 20_000  # above it, mini-batches: full k-means would take minutes
KNOWLEDGE_COLUMNS = ["entity_id", "text", "run_id", "fingerprint"]  # all that is read of a knowledge record


@dataclass(frozen=True)
class SideFeatures:
    """The features of one side."""

    table: pa.Table  # of `schema.feature_schema`, in the order of the ids, so that shard order does not show
    centroids: pa.Table  # of `schema.centroid_schema`; a row's cluster is the nearest
    num_encoded: int = 0  # texts whose vectors were not known
    num_truncated: int = 0  # of those, texts that lost their end


def build_features(
    knowledge: pa.Table,
    side: str,
    load_encoder: "Callable[[], TextEncoder]",
    settings: EncodingSettings | None = None,
    earlier: SideFeatures | None = None,
    on_batch: Callable[[int], None] = lambda num_texts: None,
) -> SideFeatures:
    """The features of one side.

    Parameters
    ----------
    knowledge : knowledge records of the side; `KNOWLEDGE_COLUMNS` are read.
    load_encoder : called where a vector is not known.
    earlier : features of the same encoder. The vectors of texts that are among them are taken over, which are bit for
        bit what encoding again would give; and their centroids, as `fit_centroids` says.
    on_batch : called with the number of texts that a batch encoded.
    """
    settings = settings or EncodingSettings()
    order = pc.sort_indices(knowledge["entity_id"])
    rows = knowledge.select(["entity_id", "run_id", "fingerprint"]).take(order)
    found = np.full(rows.num_rows, -1) if earlier is None else _known_rows(rows, earlier.table, f"{side}_id")
    new = np.flatnonzero(found < 0)
    known = None if earlier is None else _matrix(earlier.table)
    encoded, num_truncated = (None if known is None else known[:0]), 0
    if known is None or len(new):
        texts = [knowledge["text"][row].as_py() for row in order.to_numpy()[new].tolist()]
        encoding = load_encoder().encode(texts, on_batch)
        encoded, num_truncated = encoding.vectors, encoding.num_truncated
    vectors = np.zeros((rows.num_rows, encoded.shape[1]), np.float32)
    vectors[new] = encoded
    if known is not None:
        vectors[found >= 0] = known[found[found >= 0]]
    before = None if earlier is None else _matrix(earlier.centroids)
    centroids = fit_centroids(vectors, settings.num_clusters, settings.seed, before)
    if before is not None and centroids is before:  # whoever has the vector of before has its cluster
        cluster_ids = np.zeros(rows.num_rows, np.int32)
        cluster_ids[found >= 0] = earlier.table["cluster_id"].to_numpy()[found[found >= 0]]
        cluster_ids[new] = nearest_centroids(encoded, centroids)
    else:
        cluster_ids = nearest_centroids(vectors, centroids)
    columns = [
        rows["entity_id"].combine_chunks(),
        _vector_column(vectors),
        pa.array(cluster_ids, pa.int32()),
        rows["run_id"].combine_chunks(),
        rows["fingerprint"].combine_chunks(),
    ]
    schema = feature_schema(side, knowledge.schema.field("entity_id").type, vectors.shape[1])
    ids = pa.array(np.arange(len(centroids), dtype=np.int32))
    return SideFeatures(
        pa.Table.from_arrays(columns, schema=schema),
        pa.Table.from_arrays([ids, _vector_column(centroids)], schema=centroid_schema(side, vectors.shape[1])),
        len(new),
        num_truncated,
    )


def _known_rows(rows: pa.Table, earlier: pa.Table, id_column: str) -> np.ndarray:
    """Rows of earlier features that are of the same texts, int64[n]; -1 where there is none.

    The entity, the run that generated it and the prompt that it answers say which text it is.
    """
    if rows["entity_id"].type != earlier[id_column].type:
        return np.full(rows.num_rows, -1)
    found = pc.index_in(rows["entity_id"], value_set=earlier[id_column].combine_chunks()).combine_chunks()
    is_same = pc.is_valid(found)
    for name in ("run_id", "fingerprint"):
        is_same = pc.and_(is_same, pc.equal(rows[name], earlier[name].combine_chunks().take(found)))
    return np.where(pc.fill_null(is_same, False).to_numpy(), pc.fill_null(found, -1).to_numpy(), -1)


def _matrix(table: pa.Table) -> np.ndarray:
    """The vectors of a table: float32 (num_rows, dim)."""
    column = table["vector"].combine_chunks()
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
