"""Embeddings to groups by k-means. Knows no interactions and not how the embeddings were trained."""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from threadpoolctl import threadpool_limits

NUM_INITS = 4
MAX_ITERATIONS = 50
MAX_FIT_ROWS = 50_000  # centres of larger sides come from a seeded sample of this many entities


@dataclass(frozen=True)
class EntityEmbeddings:
    """One vector per entity of a side: `ids` (n, string or int64) and `vectors` float32 (n, dim), row by row."""

    ids: pa.Array
    vectors: np.ndarray


def default_num_groups(num_entities: int) -> int:
    """Half the square root: 15 groups for 943 users, 500 for a million, so group sizes grow as pools do."""
    return max(1, round(math.sqrt(num_entities) / 2))


def cluster_embeddings(vectors: np.ndarray, num_groups: int, seed: int) -> np.ndarray:
    """Cluster L2-normalised vectors by k-means (LASER, section 3.2).

    It runs on one thread: scikit-learn adds up its threads' partial sums in the order they finish, and equal inputs
    must give equal groups.

    Parameters
    ----------
    vectors : float array (n, dim)
        Need not be normalised. A zero vector stays zero.
    num_groups : int
        Wanted number of groups; fewer come out when there are fewer distinct vectors.
    seed : int

    Returns
    -------
    int32 array (n,)
        Group numbers from 0, the largest group first (of equal ones, the one with the earlier first member).
    """
    from sklearn.cluster import KMeans  # takes a second to load, and who asks for a group does not cluster
    from sklearn.exceptions import ConvergenceWarning

    if len(vectors) == 0:
        return np.empty(0, np.int32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)  # (n, dim)
    rows = unit
    if len(unit) > MAX_FIT_ROWS:
        rows = unit[np.sort(np.random.default_rng(seed).choice(len(unit), MAX_FIT_ROWS, replace=False))]
    kmeans = KMeans(min(num_groups, len(rows)), n_init=NUM_INITS, max_iter=MAX_ITERATIONS, random_state=seed % 2**32)
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct vectors than groups: allowed, see above
        labels = kmeans.fit(rows).predict(unit)
    return _largest_first(labels)


def _largest_first(labels: np.ndarray) -> np.ndarray:
    found, first_rows, inverse, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    new_labels = np.empty(len(found), np.int32)
    new_labels[np.lexsort((first_rows, -sizes))] = np.arange(len(found), dtype=np.int32)
    return new_labels[inverse]
