"""Collaborative groups: entities with enough interactions, put together by k-means over embeddings.

Ids are one of two Arrow types, large_string or int64, so that tables of different origin compare equal. A team's own
recommender may bring the vectors, in place of LightGCN's, in one Parquet file a side: a column `<side>_id` and a column
`vector`, lists of one width of finite floats. Rows are named counting from 0.
"""

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from threadpoolctl import threadpool_limits

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.settings import RoutingSettings

SIDES = ("user", "item")
VECTOR_COLUMN = "vector"
NUM_INITS = 4
MAX_ITERATIONS = 50
MAX_FIT_ROWS = 50_000  # centres of larger sides come from a seeded sample of this many entities


@dataclass(frozen=True)
class EntityEmbeddings:
    """One vector per entity of a side: `ids` (n, string or int64) and `vectors` float32 (n, dim), row by row."""

    ids: pa.Array
    vectors: np.ndarray


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
        ids : large_string or int64, the entities of this side, "user" or "item".
        interactions : `user_id` and `item_id`; every row counts, repeated pairs too.
        embeddings : without them those of the settings' file are read, or LightGCN is trained.

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
                embeddings = train_embeddings(interactions, seed)[side]
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

    @cached_property
    def _group_by_id(self) -> dict[str | int, int]:
        return dict(zip(self.ids.to_pylist(), self.groups.tolist(), strict=True))


def train_embeddings(interactions: pa.Table, seed: int) -> dict[str, EntityEmbeddings]:
    """LightGCN vectors of both sides ("user", "item"), for every id in `interactions`."""
    from laserbatch.retrieval_pools.routing.lightgcn import train_lightgcn  # a loaded router must route without torch

    ids = {side: id_column(interactions, f"{side}_id", "interactions") for side in SIDES}
    trained = train_lightgcn(ids["user"], ids["item"], seed)
    return {"user": trained.users, "item": trained.items}


def default_num_groups(num_entities: int) -> int:
    """Half the square root: 15 groups for 943 users, 500 for a million, so group sizes grow as pools do."""
    return max(1, round(math.sqrt(num_entities) / 2))


def cluster_embeddings(vectors: np.ndarray, num_groups: int, seed: int) -> np.ndarray:
    """Cluster vectors (n, dim), L2-normalised, by k-means (LASER, section 3.2): group numbers from 0, int32 (n,).

    Fewer groups than `num_groups` come out when there are fewer distinct vectors. It runs on one thread: scikit-learn
    adds up its threads' partial sums in the order they finish, and equal inputs must give equal groups.
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
    return np.unique(labels, return_inverse=True)[1].astype(np.int32)  # centres that nobody is nearest to left out


def id_column(table: pa.Table, name: str, table_name: str) -> pa.Array:
    """Normalised ids of one column; PoolError when it is missing, of another type, or has nulls."""
    if name not in table.column_names:
        raise PoolError(f"{table_name} has no column {name!r}; its columns are {', '.join(table.column_names)}")
    return normalised_ids(table[name], name, table_name)


def normalised_ids(ids: pa.Array | pa.ChunkedArray, name: str, table_name: str) -> pa.Array:
    """Ids as large_string or int64."""
    arrow_type = ids.type.value_type if pa.types.is_dictionary(ids.type) else ids.type
    if pa.types.is_integer(arrow_type):
        target = pa.int64()
    elif pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        target = pa.large_string()
    else:
        raise PoolError(f"{table_name}.{name} is of type {ids.type}; ids are strings or integers")
    if ids.null_count:
        raise PoolError(f"{table_name}.{name} has {ids.null_count} nulls; every row needs an id")
    ids = ids.cast(target)
    return ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids


def check_same_kind(ids: pa.Array, others: pa.Array, table_name: str, other_name: str) -> None:
    """PoolError when one of two normalised id arrays holds strings and the other integers."""
    if ids.type != others.type:
        raise PoolError(
            f"ids of {table_name} are {ids.type}, those of {other_name} are {others.type}; give both the same type"
        )


def read_embeddings(path: Path, side: str, ids: pa.Array) -> EntityEmbeddings:
    """Vectors of those of `ids`, normalised, that the file of a side ("user" or "item") has, in its order.

    Raises
    ------
    PoolError
        The file, a column of it or a row of it is not what it should be; all three are named.
    """
    source, id_name = f"routing.{side}_embeddings: {path}", f"{side}_id"
    try:
        names = pq.read_schema(path).names
        for name in (id_name, VECTOR_COLUMN):
            if name not in names:
                raise PoolError(f"{source} has no column {name!r}; its columns are {', '.join(names)}")
        table = pq.read_table(path, columns=[id_name, VECTOR_COLUMN], partitioning=None)
        lists = table[VECTOR_COLUMN].combine_chunks().cast(pa.large_list(pa.float32()), safe=False)
    except (OSError, pa.ArrowException) as error:
        raise PoolError(f"{source} cannot be read ({error}); correct the path, or write the file again") from error
    found_ids = id_column(table, id_name, source)
    check_same_kind(found_ids, ids, source, f"the {side}s")
    codes = found_ids.dictionary_encode().indices.to_numpy()
    is_first = np.zeros(len(codes), bool)
    is_first[np.unique(codes, return_index=True)[1]] = True
    _require(is_first, found_ids, f"{source}, column {id_name}", "the id was in an earlier row")
    lengths = pc.fill_null(pc.list_value_length(lists), -1).to_numpy()
    width = max(int(lengths[0]), 1) if len(lengths) else 1
    where, expected = f"{source}, column {VECTOR_COLUMN}", f"expected a vector of {width} finite numbers"
    _require(lengths == width, lists, where, expected)
    vectors = pc.list_flatten(lists).to_numpy(zero_copy_only=False).reshape(len(lists), width)
    _require(np.isfinite(vectors).all(axis=1), lists, where, expected)
    known = pc.is_in(found_ids, value_set=ids)
    return EntityEmbeddings(found_ids.filter(known), vectors[known.to_numpy(zero_copy_only=False)])


def _require(is_sound: np.ndarray, values: pa.Array, where: str, problem: str) -> None:
    """PoolError naming the first row that is not sound."""
    if not is_sound.all():
        row = int(np.argmin(is_sound))
        shown = str(values[row].as_py())
        raise PoolError(
            f"{where}, row {row}: {problem} (found {shown[:60]}{'...' if len(shown) > 60 else ''}); "
            "correct the row, or leave it out"
        )
