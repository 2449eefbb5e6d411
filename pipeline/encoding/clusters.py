"""Cluster ids of vectors, the "ID features" of industry. Knows no texts and no entities."""

import warnings

import numpy as np
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import pairwise_distances_argmin
from threadpoolctl import threadpool_limits

MAX_FULL_KMEANS_ROWS = 20_000  # above it, mini-batches: full k-means would take minutes


def fit_centroids(
    vectors: np.ndarray, num_clusters: int = 32, seed: int = 0, earlier: np.ndarray | None = None
) -> np.ndarray:
    """Centroids by k-means, the one of most vectors first; or the earlier ones, where these do.

    Earlier centroids stay as they are, so that a vector keeps its cluster id from night to night. They do unless there
    are more of them than wanted, or fewer than a new fit would give.

    Parameters
    ----------
    vectors : float32 (n, d).
    num_clusters : how many clusters; fewer when there are fewer distinct vectors.
    seed : of the initial centres; the same arguments give the same centroids.
    earlier : float32 (k, d), of the night before.

    Returns
    -------
    float32 (k, d).
    """
    is_small = len(vectors) <= MAX_FULL_KMEANS_ROWS
    num_fitted = min(num_clusters, len(np.unique(vectors, axis=0))) if is_small else num_clusters
    if earlier is not None and num_fitted <= len(earlier) <= num_clusters:
        return earlier
    if num_fitted == 0:
        return vectors
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
    return pairwise_distances_argmin(vectors, centroids).astype(np.int32)
