"""Collaborative groups: entities with enough interactions, put together by k-means over embeddings.

Knows interactions and ids, no attributes; which entities use these groups the router decides.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.retrieval_pools.routing.embeddings import read_embeddings
from laserbatch.retrieval_pools.routing.ids import SIDES, check_same_kind, id_column, normalised_ids
from laserbatch.retrieval_pools.routing.kmeans import EntityEmbeddings, cluster_embeddings, default_num_groups
from laserbatch.retrieval_pools.routing.settings import RoutingSettings


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
    ) -> "CollaborativeGroups":
        """Cluster those of `ids` that have `settings.min_interactions` rows in `interactions`, and an embedding.

        Parameters
        ----------
        side : str
            "user" or "item".
        ids : pa.Array
            large_string or int64, the entities of this side.
        interactions : pa.Table
            `user_id` and `item_id`; every row counts, repeated pairs too.
        settings : RoutingSettings
        seed : int
        embeddings : EntityEmbeddings, optional
            Without them those of the settings' file are read, or LightGCN is trained.

        Raises
        ------
        PoolError
            Missing id columns, ids of different kinds, or a file of embeddings that is not what it should be.
        """
        interaction_ids = id_column(interactions, f"{side}_id", "interactions")
        check_same_kind(interaction_ids, ids, "interactions", "entities")
        counted = interaction_ids.value_counts()
        frequent = counted.field("values").filter(pc.greater_equal(counted.field("counts"), settings.min_interactions))
        warm_ids = pc.unique(ids.filter(pc.is_in(ids, value_set=frequent)))
        if len(warm_ids) == 0:
            return cls.none_of(ids)
        if embeddings is None:
            path = settings.embeddings_of(side)
            if path is not None:
                embeddings = read_embeddings(path, side, ids)
            else:
                embeddings = train_embeddings(interactions, settings, seed)[side]
        embedded_ids = normalised_ids(embeddings.ids, f"{side}_id", "embeddings")
        check_same_kind(embedded_ids, ids, "embeddings", "entities")
        warm_ids = warm_ids.filter(pc.is_in(warm_ids, value_set=embedded_ids))
        warm_ids = warm_ids.take(pc.sort_indices(warm_ids))
        vectors = embeddings.vectors[pc.index_in(warm_ids, value_set=embedded_ids).to_numpy()]
        num_groups = settings.num_groups or default_num_groups(len(warm_ids))
        return cls(warm_ids, cluster_embeddings(vectors, num_groups, seed))

    def group_of(self, entity_id: str | int) -> int | None:
        """Group number of one entity, None when it has none."""
        return self._group_by_id.get(entity_id)

    def groups_of(self, ids: pa.Array) -> np.ndarray:
        """Group numbers int64 (n,) of many entities, -1 for none."""
        if len(self.ids) == 0:
            return np.full(len(ids), -1, np.int64)
        positions = pc.fill_null(pc.index_in(ids, value_set=self.ids), -1).to_numpy()
        return np.where(positions >= 0, self.groups[positions], -1).astype(np.int64)

    @cached_property
    def _group_by_id(self) -> dict[str | int, int]:
        return dict(zip(self.ids.to_pylist(), self.groups.tolist(), strict=True))


def train_embeddings(interactions: pa.Table, settings: RoutingSettings, seed: int) -> dict[str, EntityEmbeddings]:
    """LightGCN vectors of both sides ("user", "item"), for every id in `interactions`."""
    from laserbatch.retrieval_pools.routing.lightgcn import (
        train_lightgcn,  # here: a loaded router must route without torch
    )

    ids = {side: id_column(interactions, f"{side}_id", "interactions") for side in SIDES}
    trained = train_lightgcn(ids["user"], ids["item"], settings.lightgcn, seed)
    return {"user": trained.users, "item": trained.items}
