"""Cluster ids of vectors, the "ID features" of industry. Knows no texts and no entities."""

import warnings

import numpy as np
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.exceptions import ConvergenceWarning

MAX_FULL_KMEANS_ROWS = 20_000  # above it, mini-batches: full k-means would take minutes


def cluster_vectors(vectors: np.ndarray, num_clusters: int = 32, seed: int = 0) -> np.ndarray:
    """k-means cluster of each vector.

    Parameters
    ----------
    vectors : float32 (n, d).
    num_clusters : how many clusters; fewer when there are fewer distinct vectors.
    seed : of the initial centres; the same vectors and seed give the same ids.

    Returns
    -------
    int32 (n,) ids from 0, the largest cluster first.
    """
    if len(vectors) == 0:
        return np.zeros(0, np.int32)
    if len(vectors) <= MAX_FULL_KMEANS_ROWS:
        num_clusters = min(num_clusters, len(np.unique(vectors, axis=0)))
        model = KMeans(num_clusters, n_init=2, random_state=seed)
    else:
        model = MiniBatchKMeans(num_clusters, n_init=3, batch_size=4096, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # clusters may collapse where texts are near-equal
        labels = model.fit_predict(vectors)
    counts = np.bincount(labels, minlength=num_clusters)
    rank_of_label = np.empty(num_clusters, np.int32)
    rank_of_label[np.argsort(-counts, kind="stable")] = np.arange(num_clusters, dtype=np.int32)
    return rank_of_label[labels]
