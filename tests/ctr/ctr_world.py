"""A small world in which knowledge vectors explain ratings better than columns do.

Items have a category (a column) and a mood (no column), and users like categories and moods. A user's vector encodes
the user's taste, an item's vector its category and mood; both are rotated by one random rotation, with noise.
"""

import datetime
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from laserbatch.ctr.feature_set import FeatureSet
from laserbatch.pipeline.encoding.schema import MOMENT, feature_schema

AS_OF = datetime.date(2025, 3, 1)
RUN_ID = "2025-03-01-0123abcd"
NUM_CATEGORIES, NUM_MOODS, DIM = 8, 6, 32
DAY_US = 86_400_000_000


@dataclass(frozen=True)
class World:
    """Input tables for training, and the knowledge vectors that an oracle would write."""

    users: pa.Table
    items: pa.Table
    interactions: pa.Table
    user_vectors: np.ndarray
    item_vectors: np.ndarray


def make_world(
    num_users=250, num_items=150, num_interactions=5000, num_cold=80, days_after=5, seed=0, string_ids=True
) -> World:
    rng = np.random.default_rng(seed)
    category = rng.integers(NUM_CATEGORIES, size=num_items)
    mood = rng.integers(NUM_MOODS, size=num_items)
    taste = rng.normal(size=(num_users, NUM_CATEGORIES + NUM_MOODS)) * 1.3
    kinds = np.hstack([np.eye(NUM_CATEGORIES)[category], np.eye(NUM_MOODS)[mood]])
    quality = rng.normal(size=num_items) * 0.3

    activity = rng.gamma(1.0, size=num_users)
    activity[:num_cold] = 0.0
    num_late = num_interactions // 5
    early_users = rng.choice(num_users, size=num_interactions - num_late, p=activity / activity.sum())
    activity[:num_cold] = np.median(activity[num_cold:])  # cold users become active after the date
    late_users = rng.choice(num_users, size=num_late, p=activity / activity.sum())
    users = np.concatenate([early_users, late_users])
    items = rng.integers(num_items, size=len(users))
    end_us = int(datetime.datetime(2025, 3, 2, tzinfo=datetime.UTC).timestamp()) * 1_000_000
    times = np.concatenate(
        [
            end_us - 1 - rng.integers(30 * DAY_US, size=len(early_users)),
            end_us + rng.integers(days_after * DAY_US, size=num_late),
        ]
    )
    logits = (taste[users] * kinds[items]).sum(axis=1) + quality[items]
    ratings = 4.0 + (rng.uniform(size=len(users)) < 1 / (1 + np.exp(-1.2 * logits))) - 0.5

    def ids(prefix, numbers):
        return pa.array([f"{prefix}{number}" for number in numbers]) if string_ids else pa.array(numbers)

    user_table = pa.table(
        {
            "user_id": ids("u", np.arange(num_users)),
            "age": pa.array(rng.integers(15, 80, size=num_users)),
            "region": pa.array(rng.choice(["north", "south", None], size=num_users).tolist()),
            "about": pa.array([f"about user {number}" for number in range(num_users)]),
        }
    )
    item_table = pa.table(
        {
            "item_id": ids("i", np.arange(num_items)),
            "title": pa.array([f"Item {number}" for number in range(num_items)]),
            "path": pa.array([["all", f"category {number}"] for number in category]),
            "is_new": pa.array((rng.uniform(size=num_items) < 0.5).tolist()),
        }
    )
    interactions = pa.table(
        {
            "user_id": ids("u", users),
            "item_id": ids("i", items),
            "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
            "rating": pa.array(ratings),
        }
    )
    rotation = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0][: taste.shape[1]]
    interactions = interactions.sort_by(
        [("timestamp", "ascending"), ("user_id", "ascending"), ("item_id", "ascending")]
    )
    return World(
        user_table,
        item_table,
        interactions,
        _unit(taste @ rotation + 0.3 * rng.normal(size=(num_users, DIM))),
        _unit(kinds @ rotation + 0.03 * rng.normal(size=(num_items, DIM))),
    )


def make_features(world: World, run_id=RUN_ID, noise=0.0, seed=0) -> FeatureSet:
    rng = np.random.default_rng(seed)
    sides = {}
    for side, table, vectors in (("user", world.users, world.user_vectors), ("item", world.items, world.item_vectors)):
        blurred = _unit(vectors + noise * rng.normal(size=vectors.shape)).astype(np.float32)
        columns = [
            table[f"{side}_id"].combine_chunks(),
            pa.FixedSizeListArray.from_arrays(pa.array(blurred.reshape(-1)), DIM),
            pa.array(np.abs(blurred[:, :8]).argmax(axis=1).astype(np.int32)),
            pa.array(np.abs(blurred[:, 8:16]).argmax(axis=1).astype(np.int32)),
            pa.array([run_id] * table.num_rows),
            pa.array(["f"] * table.num_rows),
            pa.array([0] * table.num_rows, MOMENT),
        ]
        sides[side] = pa.Table.from_arrays(columns, schema=feature_schema(side, columns[0].type, DIM))
    return sides


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
