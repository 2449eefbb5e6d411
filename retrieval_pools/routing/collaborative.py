"""Collaborative groups: entities with enough interactions, clustered by k-means over their embeddings."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.retrieval_pools.ids import rows_among
from laserbatch.retrieval_pools.routing.embeddings import (
    EntityEmbeddings,
    check_same_kind,
    count_codes,
    distinct_ids,
    normalised_ids,
    read_embeddings,
)
from laserbatch.retrieval_pools.settings import RoutingSettings

SIDES = ("user", "item")
NUM_INITS = 4
MAX_ITERATIONS = 50
MAX_FIT_ROWS = 50_000  # the centres of larger sides are fitted to a seeded sample of this size


@dataclass(frozen=True)
class CollaborativeGroups:
    """The entities that had enough interactions at the fit: `ids` ascending (n,), `groups` int32 (n,)."""

    ids: pa.Array
    groups: np.ndarray

    @classmethod
    def none_of(cls, ids: pa.Array) -> "CollaborativeGroups":
        """No groups, for entities with ids like `ids`."""
        return cls(ids.slice(0, 0), np.empty(0, np.int32))

    @classmethod
    def fit(
        cls,
        side: str,
        ids: pa.Array,
        interactions: pa.Table,
        settings: RoutingSettings,
        seed: int,
        embeddings: EntityEmbeddings | None = None,
        scratch: Path | None = None,
    ) -> "CollaborativeGroups":
        """Cluster the entities that have `settings.min_interactions` rows in `interactions` or more, and an embedding.

        `ids` are large_string or int64, the entities of this side, all different. Every row of `interactions` counts,
        also repeated pairs. Without `embeddings` the file that the settings name is read, or LightGCN is trained.
        Raises PoolError if an id column is missing, ids are of different kinds, or a file of embeddings is invalid.
        """
        interaction_ids, codes = distinct_ids(interactions, f"{side}_id", scratch)
        check_same_kind(interaction_ids, ids, "interactions", "entities")
        is_frequent = count_codes(codes, len(interaction_ids)) >= settings.min_interactions
        warm_ids = ids.filter(pa.array(rows_among(ids, interaction_ids.filter(pa.array(is_frequent))) >= 0))
        warm_ids = warm_ids.take(pc.sort_indices(warm_ids))
        if len(warm_ids) == 0:
            return cls.none_of(ids)
        if embeddings is None:
            path, train = settings.embeddings_of(side), train_embeddings
            embeddings = train(interactions, seed, scratch)[side] if path is None else read_embeddings(path, side, ids)
        embedded_ids = normalised_ids(embeddings.ids, f"{side}_id", "embeddings")
        check_same_kind(embedded_ids, ids, "embeddings", "entities")
        rows = rows_among(warm_ids, embedded_ids)
        warm_ids, rows = warm_ids.filter(pa.array(rows >= 0)), rows[rows >= 0]
        num_groups = settings.num_groups or default_num_groups(len(warm_ids))
        return cls(warm_ids, cluster_embeddings(embeddings.vectors, num_groups, seed, rows))


def train_embeddings(interactions: pa.Table, seed: int, scratch: Path | None = None) -> dict[str, EntityEmbeddings]:
    """LightGCN vectors of both sides ("user", "item"), for every id in `interactions`; `scratch` as in `Router.fit`."""
    from laserbatch.retrieval_pools.routing.lightgcn import train_lightgcn  # a loaded router must route without torch

    return train_lightgcn(interactions, seed, scratch)


def default_num_groups(num_entities: int) -> int:
    """Half the square root: 15 groups for 943 users, 500 for a million, so groups of larger pools are larger."""
    return max(1, round(math.sqrt(num_entities) / 2))


def cluster_embeddings(vectors: np.ndarray, num_groups: int, seed: int, chosen: np.ndarray | None = None) -> np.ndarray:
    """Cluster vectors (any, dim), L2-normalised, by k-means (LASER, section 3.2): group numbers from 0, int32 (n,).

    Only the rows `chosen` (n,) are clustered, without copying all of them, which may be gigabytes; None: all rows.
    There are fewer groups than `num_groups` if there are fewer distinct vectors. It runs on one thread: scikit-learn
    adds the partial sums of threads in the order in which they finish, and equal inputs must give equal groups.
    """
    from sklearn.cluster import KMeans  # takes a second to load, and routing does not cluster
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    chosen = np.arange(len(vectors)) if chosen is None else chosen
    if len(chosen) == 0:
        return np.empty(0, np.int32)
    rows = chosen
    if len(rows) > MAX_FIT_ROWS:
        rows = rows[np.sort(np.random.default_rng(seed).choice(len(rows), MAX_FIT_ROWS, replace=False))]
    n_init: Any = NUM_INITS  # scikit-learn has no types; its default is a string
    kmeans = KMeans(min(num_groups, len(rows)), n_init=n_init, max_iter=MAX_ITERATIONS, random_state=seed % 2**32)
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct vectors than groups: allowed, see above
        kmeans.fit(_unit(vectors[rows]))
        parts = (vectors[chosen[start : start + MAX_FIT_ROWS]] for start in range(0, len(chosen), MAX_FIT_ROWS))
        labels = np.concatenate([kmeans.predict(_unit(part)) for part in parts])
    return np.unique(labels, return_inverse=True)[1].astype(np.int32)  # without centres that are nearest to no vector


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors (n, dim) scaled to length 1, in float32; zero vectors stay."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)
