"""The codebook of a side: centroids of two levels, kept from night to night so that codes keep their meaning.

The first level clusters the vectors, the second their residuals (residual k-means). A night's new vectors move the
centroids a little towards themselves, and vectors far from all centroids get new ones, appended to the others. All
are fitted anew only for another number of clusters or another seed. The module knows arrays only, no files.
"""

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from laserbatch.pipeline.encoding.schema import LEVELS

MAX_FULL_KMEANS_ROWS = 20_000  # more vectors are clustered in mini-batches: full k-means would take minutes
ROWS_AT_ONCE = 1024
MAX_STEP = 0.1  # largest share of the way to the mean of a night's new vectors that a centroid moves
FAR = 2.0  # times the root mean square distance of the vectors that a level was fitted on
MAX_GROWTH = 2  # times the configured number of clusters


@dataclass(frozen=True)
class Level:
    """The centroids of a level. Vectors that are farther than `radius` from all centroids get new ones."""

    centroids: np.ndarray  # float32 (k, dim)
    weights: np.ndarray  # int64 (k,), the number of vectors that each was made of
    radius: float


@dataclass(frozen=True)
class Codebook:
    """Levels, coarse first, and `key`, of the configuration and a digest; codes with the same key can be compared."""

    levels: tuple[Level, ...]
    key: str

    def is_for(self, num_clusters: int, seed: int) -> bool:
        return self.key.startswith(f"{num_clusters}-{seed}-")

    def codes(self, vectors: np.ndarray) -> np.ndarray:
        """The codes of each vector: int32 (n, num_levels)."""
        codes, residuals = [], vectors
        for level in self.levels:
            nearest = nearest_centroids(residuals, level.centroids)
            codes.append(nearest)
            residuals = residuals - level.centroids[nearest]
        return np.stack(codes, axis=1)


def fit_codebook(vectors: np.ndarray, num_clusters: int, seed: int) -> Codebook:
    """Fit a new codebook to vectors, float32 (n, dim)."""
    levels, residuals = [], vectors
    for _ in LEVELS:
        centroids = fit_centroids(residuals, num_clusters, seed)
        nearest = nearest_centroids(residuals, centroids)
        residuals = _residuals(residuals, centroids, nearest)
        squares = [(residuals[part].astype(np.float64) ** 2).sum(axis=1) for part in _parts(len(residuals))]
        radius = FAR * float(np.sqrt(np.concatenate(squares).mean())) if squares else 0.0
        levels.append(Level(centroids, np.bincount(nearest, minlength=len(centroids)), radius))
    digest = hashlib.sha256(b"".join(level.centroids.tobytes() for level in levels)).hexdigest()[:12]
    return Codebook(tuple(levels), f"{num_clusters}-{seed}-{digest}")


def followed(codebook: Codebook, vectors: np.ndarray, num_clusters: int, seed: int) -> Codebook:
    """The codebook after a night with new vectors, float32 (n, dim); codes keep their meaning."""
    levels, residuals = [], vectors
    for level in codebook.levels:
        if levels:
            centroids = levels[-1].centroids
            residuals = _residuals(residuals, centroids, nearest_centroids(residuals, centroids))
        levels.append(_followed(level, residuals, num_clusters, seed))
    return Codebook(tuple(levels), codebook.key)


def _followed(level: Level, vectors: np.ndarray, num_clusters: int, seed: int) -> Level:
    num = len(level.centroids)
    nearest = nearest_centroids(vectors, level.centroids) if num else np.zeros(len(vectors), np.int32)
    distances = np.full(len(vectors), np.inf, np.float32)
    for part in _parts(len(vectors) if num else 0):
        distances[part] = np.linalg.norm(vectors[part] - level.centroids[nearest[part]], axis=1)
    is_open = num < num_clusters  # fitted on few vectors: there is room for new clusters
    is_far = distances > (1e-6 if is_open else level.radius)
    growth = round(is_far.sum() * num / max(level.weights.sum(), 1))
    room = num_clusters - num if is_open else min(MAX_GROWTH * num_clusters - num, growth)
    added = fit_centroids(vectors[is_far], max(room, 0), seed) if room > 0 and is_far.any() else vectors[:0]
    is_near = ~is_far | (len(added) == 0)
    counts = np.bincount(nearest[is_near], minlength=num)
    sums = np.zeros((num, vectors.shape[1]), np.float64)
    for code in np.flatnonzero(counts):
        sums[code] = vectors[is_near & (nearest == code)].sum(axis=0, dtype=np.float64)
    steps = np.minimum(counts / np.maximum(level.weights + counts, 1), MAX_STEP)[:, None]
    moved = level.centroids + (steps * (sums / np.maximum(counts, 1)[:, None] - level.centroids)).astype(np.float32)
    of_added = nearest_centroids(vectors[is_far] if len(added) else added, added)
    weights = np.concatenate([level.weights + counts, np.bincount(of_added, minlength=len(added))])
    return Level(np.concatenate([moved, added]).astype(np.float32), weights, level.radius)


def fit_centroids(vectors: np.ndarray, num_clusters: int = 32, seed: int = 0) -> np.ndarray:
    """Centroids by k-means, float32 (k, d), the largest cluster first; k is below `num_clusters` for few vectors."""
    is_small = len(vectors) <= MAX_FULL_KMEANS_ROWS
    num_fitted = min(num_clusters, len(np.unique(vectors, axis=0))) if is_small else num_clusters
    if num_fitted == 0:
        return vectors
    from sklearn.cluster import KMeans, MiniBatchKMeans  # here, so that a night without new texts does not load it
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    if is_small:
        model = KMeans(num_fitted, n_init=2, random_state=seed)
    else:
        model = MiniBatchKMeans(num_fitted, n_init=3, batch_size=4096, random_state=seed)
    # On one thread: several threads would add their partial sums in the order in which they finish.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # clusters may collapse if texts are nearly equal
        centroids = model.fit(vectors).cluster_centers_.astype(np.float32)
    counts = np.bincount(nearest_centroids(vectors, centroids), minlength=num_fitted)
    return centroids[np.argsort(-counts, kind="stable")]


def nearest_centroids(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The cluster id of each vector, which is the row of its nearest centroid: int32 (n,)."""
    if len(vectors) == 0:
        return np.zeros(0, np.int32)
    from sklearn.metrics import pairwise_distances_argmin

    return pairwise_distances_argmin(vectors, centroids).astype(np.int32)


def digests(vectors: np.ndarray) -> np.ndarray:
    """A hash of the bits of each vector, float32 (n, dim): uint64 (n,)."""
    padding = np.zeros((ROWS_AT_ONCE, vectors.shape[1] % 2), vectors.dtype)
    size = (vectors.shape[1] + 1) // 2
    multipliers = np.random.default_rng(0).integers(1, 2**63, size, dtype=np.uint64) | np.uint64(1)
    sums = np.zeros(len(vectors), np.uint64)
    for part in _parts(len(vectors)):
        padded = np.hstack((vectors[part], padding[: len(vectors[part])]))
        words = np.ascontiguousarray(padded, np.float32).view(np.uint64)
        sums[part] = (words * multipliers).sum(axis=1, dtype=np.uint64)
    return sums


def _residuals(vectors: np.ndarray, centroids: np.ndarray, nearest: np.ndarray) -> np.ndarray:
    """The vectors minus their nearest centroids: float32 (n, dim)."""
    residuals = np.empty_like(vectors)
    for part in _parts(len(vectors)):
        residuals[part] = vectors[part] - centroids[nearest[part]]
    return residuals


def _parts(num_rows: int) -> Iterator[slice]:
    """Slices of rows, so that temporary arrays stay small."""
    return (slice(start, start + ROWS_AT_ONCE) for start in range(0, num_rows, ROWS_AT_ONCE))
