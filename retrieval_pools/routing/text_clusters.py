"""Clusters of texts that use the same words, from their token ids alone. Knows no entities' attributes and no model."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_array
from threadpoolctl import threadpool_limits

from laserbatch.retrieval_pools.routing.kmeans import cluster_embeddings

NUM_COMPONENTS = 32


@dataclass(frozen=True)
class EntityTexts:
    """The newest text of each entity that has one: `ids` (n, string or int64) and `token_ids` (n, lists of int32)."""

    ids: pa.Array
    token_ids: pa.Array


def cluster_positions(token_ids: pa.Array, num_clusters: int, seed: int) -> np.ndarray:
    """Cluster texts, and number the clusters so that near numbers have like texts.

    Bags of token ids, weighted by tf-idf, are reduced by a truncated SVD and clustered by k-means. The number of a
    cluster is the rank of its centre on the centres' first principal axis: a target that one regression tree can split.

    Parameters
    ----------
    token_ids : Arrow lists of int32 (n,)
    num_clusters : int
        Wanted number; fewer come out when there are fewer distinct texts.
    seed : int

    Returns
    -------
    float64 array (n,)
        0 to the number of clusters less 1.
    """
    from sklearn.decomposition import TruncatedSVD  # as k-means: not loaded by who asks for a group

    bags = _bags(token_ids)  # (n, vocab_size)
    num_components = min(NUM_COMPONENTS, *(size - 1 for size in bags.shape))
    if num_components < 1 or bags.nnz == 0:
        return np.zeros(len(token_ids))
    # Equal texts must give equal clusters, and several threads sum in no fixed order. All texts may be equal (0 / 0).
    with threadpool_limits(1), np.errstate(invalid="ignore"):
        vectors = TruncatedSVD(num_components, random_state=seed % 2**32).fit_transform(bags)  # (n, num_components)
    clusters = cluster_embeddings(vectors, num_clusters, seed)
    centres = np.stack([vectors[clusters == cluster].mean(axis=0) for cluster in range(int(clusters.max()) + 1)])
    axis = np.linalg.svd(centres - centres.mean(axis=0), full_matrices=False)[2][0]
    axis *= np.sign(axis[np.abs(axis).argmax()]) or 1
    ranks = np.argsort(np.argsort(centres @ axis, kind="stable"))
    return ranks[clusters].astype(np.float64)


def _bags(token_ids: pa.Array) -> csr_array:
    lengths = pc.fill_null(pc.list_value_length(token_ids), 0).to_numpy(zero_copy_only=False)
    tokens = pc.list_flatten(token_ids).to_numpy(zero_copy_only=False)
    if len(tokens) == 0:
        return csr_array((len(lengths), 1))
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    shape = (len(lengths), int(tokens.max()) + 1)
    bags = csr_array((np.ones(len(tokens)), tokens.astype(np.int64), starts), shape)
    bags.sum_duplicates()
    from sklearn.feature_extraction.text import TfidfTransformer

    return TfidfTransformer(sublinear_tf=True).fit_transform(bags)
