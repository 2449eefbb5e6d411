"""How far users' histories have moved since their texts, by the clusters of the items in them; no model runs.

A night knows the cluster of every item that the run before has encoded: one number an item, and a few centroids. The
place of a history is the mean of its items' centroids. Items that came since have none, and are left out.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.knowledge.histories import Histories
from laserbatch.pipeline.storage.parquet import read_parquet, rows_among
from laserbatch.pipeline.storage.run_folder import RunFolder

USERS_AT_ONCE = 16 * 1024


@dataclass(frozen=True)
class ItemClusters:
    """Clusters of items: `of_items` int32[num_items], -1 without one; `centroids` float32 (num_clusters, dim)."""

    of_items: np.ndarray
    centroids: np.ndarray

    @classmethod
    def of_run(cls, run: RunFolder | None, items: pa.Table) -> "ItemClusters | None":
        """Those that a finished run gave to the items of a table; None where it has none."""
        if run is None or not run.features_path("item").exists() or not run.centroids_path("item").exists():
            return None
        known = read_parquet(run.features_path("item"), ["item_id", "cluster_id"])
        centroids = read_parquet(run.centroids_path("item"))
        centroids = centroids.filter(pc.equal(centroids["level"], "cluster_id"))
        if not len(known) or not len(centroids) or known["item_id"].type != items["item_id"].type:
            return None
        ids = centroids["code"].to_numpy()
        matrix = np.zeros((ids.max() + 1, centroids["vector"].type.list_size), np.float32)
        matrix[ids] = centroids["vector"].combine_chunks().flatten().to_numpy().reshape(len(ids), -1)
        rows = rows_among(items["item_id"], known["item_id"])
        return cls(np.where(rows < 0, -1, known["cluster_id"].to_numpy()[rows]), matrix)


def history_drift(histories: Histories, users: np.ndarray, num_seen: np.ndarray, clusters: ItemClusters) -> np.ndarray:
    """1 - cosine between the places of histories and of what texts have seen of them: float64[n].

    NaN where none of the items, then or now, has a cluster.

    Parameters
    ----------
    users : rows of the users' table, int64[n].
    num_seen : int64[n], events that the text has seen, the oldest ones.
    """
    parts = [np.zeros(0)]
    for start in range(0, len(users), USERS_AT_ONCE):
        some, seen = users[start : start + USERS_AT_ONCE], num_seen[start : start + USERS_AT_ONCE]
        begin, length = histories.starts[some], histories.starts[some + 1] - histories.starts[some]
        user = np.repeat(np.arange(len(some)), length)
        turn = np.arange(len(user)) - np.repeat(np.cumsum(length) - length, length)
        cluster = clusters.of_items[histories.items(np.repeat(begin, length) + turn)]
        now = cluster >= 0
        then = now & (turn < seen[user])
        places = [_places(user[part], cluster[part], len(some), clusters.centroids) for part in (then, now)]
        lengths = np.linalg.norm(places[0], axis=1) * np.linalg.norm(places[1], axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            parts.append(1 - (places[0] * places[1]).sum(axis=1) / lengths)
    return np.concatenate(parts)


def _places(user: np.ndarray, cluster: np.ndarray, num_users: int, centroids: np.ndarray) -> np.ndarray:
    """Sums of centroids by user, whose direction is that of their mean: float64 (num_users, dim)."""
    counts = np.bincount(user * len(centroids) + cluster, minlength=num_users * len(centroids))
    return counts.reshape(num_users, -1) @ centroids.astype(np.float64)
