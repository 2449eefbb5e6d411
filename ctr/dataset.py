"""Tables and features to arrays that models index: everything is computed once, nothing while training.

The split goes by time, never at random: the knowledge of a date was made from what was known at the end of that day, so
everything up to then is training and only what comes later may judge. Vocabularies, bins, known ids and reductions come
from training rows alone.

A row is three things: the number of its user, the number of its item, and the numbers of the items in its history.
What is known of an entity lies in tables by that number, and models gather from them.
"""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.ctr.feature_set import FeatureSet, SideVectors, align, check_provenance, reduce_vectors
from laserbatch.ctr.fields import Field, attribute_fields, id_field
from laserbatch.ctr.settings import CtrError, CtrSettings


class EntityTables(Protocol):
    """What is needed of the input tables."""

    users: pa.Table
    items: pa.Table
    interactions: pa.Table


@dataclass(frozen=True)
class Rows:
    """Interactions in chronological order."""

    user_ids: pa.Array  # (n,)
    item_ids: pa.Array
    times_us: np.ndarray  # int64 (n,), since 1970 UTC, non-decreasing
    labels: np.ndarray  # float32 (n,), 1 for a positive
    train: np.ndarray  # int64 row indices
    validation: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class CtrData:
    """Everything but knowledge, the same for every variant, model and seed; rows are in chronological order."""

    users: np.ndarray  # int64 (n,) entity numbers, rows of the entity tables
    items: np.ndarray
    history: np.ndarray  # int64 (n, max_history) item numbers, newest first; `num_items` where there are no more
    times_us: np.ndarray  # int64 (n,)
    labels: np.ndarray  # float32 (n,)
    is_cold: np.ndarray  # bool (n,), rows of users with little behaviour up to the date
    train: np.ndarray  # int64 row indices
    validation: np.ndarray
    test: np.ndarray
    user_fields: tuple[Field, ...]  # codes by entity number
    item_fields: tuple[Field, ...]
    num_items: int


@dataclass(frozen=True)
class Knowledge:
    """One variant's features, in the order of the entity tables."""

    user: SideVectors
    item: SideVectors


def build_dataset(tables: EntityTables, as_of: datetime.date, settings: CtrSettings) -> CtrData:
    """Split the interactions at the run's date and turn ids, attributes and histories into numbers.

    Raises CtrError as `split_by_time` does, and on an interaction of an unknown entity.
    """
    rows = split_by_time(tables.interactions, as_of, settings.positive_rating, settings.validation_share)
    users = _numbers(rows.user_ids, tables.users["user_id"], "user")
    items = _numbers(rows.item_ids, tables.items["item_id"], "item")
    num_items = tables.items.num_rows
    seen_of_user = np.bincount(users[rows.train], minlength=tables.users.num_rows)
    seen_of_item = np.bincount(items[rows.train], minlength=num_items)
    return CtrData(
        users=users,
        items=items,
        history=histories(users, items, rows.times_us, rows.labels, settings.max_history, padding=num_items),
        times_us=rows.times_us,
        labels=rows.labels,
        is_cold=seen_of_user[users] < settings.cold_max_interactions,
        train=rows.train,
        validation=rows.validation,
        test=rows.test,
        user_fields=_fields(tables.users, "user_id", seen_of_user, settings),
        item_fields=_fields(tables.items, "item_id", seen_of_item, settings),
        num_items=num_items,
    )


def split_by_time(
    interactions: pa.Table, as_of: datetime.date, positive_rating: float = 4.0, validation_share: float = 0.3
) -> Rows:
    """Label and split interactions; rows of one moment stay in one part.

    Training ends with the day `as_of` (UTC); `validation_share` is the first part of what comes after it. Raises
    CtrError where nothing precedes or follows the date, or a part has rows of one label only, so that no AUC exists.
    """
    if "rating" not in interactions.schema.names:
        raise CtrError(
            "interactions have no `rating` column, so that every row is a positive; CTR training needs both labels: "
            "add ratings (or a 0/1 column named rating with ctr.positive_rating: 1)"
        )
    keys = [("timestamp", "ascending"), ("user_id", "ascending"), ("item_id", "ascending")]
    rows = interactions.select(["user_id", "item_id", "timestamp", "rating"]).sort_by(keys)
    times_us = rows["timestamp"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
    ratings = rows["rating"].cast(pa.float64()).to_numpy()
    labels = (ratings >= positive_rating).astype(np.float32)
    parts = _parts(times_us, _end_of_day_us(as_of), validation_share)
    _check(parts, labels, as_of, positive_rating)
    return Rows(rows["user_id"].combine_chunks(), rows["item_id"].combine_chunks(), times_us, labels, **parts)


def _end_of_day_us(day: datetime.date) -> int:
    next_day = datetime.datetime.combine(day, datetime.time(), datetime.UTC) + datetime.timedelta(days=1)
    return int(next_day.timestamp()) * 1_000_000


def _parts(times_us: np.ndarray, end_us: int, validation_share: float) -> dict[str, np.ndarray]:
    num_train = first_test = int(np.searchsorted(times_us, end_us, side="left"))
    num_after = len(times_us) - num_train
    if num_after:
        first_test_us = times_us[num_train + min(round(num_after * validation_share), num_after - 1)]
        first_test = int(np.searchsorted(times_us, first_test_us, side="left"))
    train, validation, test = np.split(np.arange(len(times_us)), [num_train, first_test])
    return {"train": train, "validation": validation, "test": test}


def _check(parts: dict[str, np.ndarray], labels: np.ndarray, as_of: datetime.date, positive_rating: float) -> None:
    if not len(parts["train"]):
        raise CtrError(f"no interactions up to {as_of}: nothing to train on; give a later date")
    if len(parts["train"]) == len(labels):
        raise CtrError(
            f"no interactions after {as_of}: nothing can judge the models; give an earlier date, or wait until "
            "the tables hold the days after it"
        )
    for name, rows in parts.items():
        of_part = labels[rows]
        if len(of_part) == 0 or of_part.min() == of_part.max():
            raise CtrError(
                f"the {name} part around {as_of} has {int(of_part.sum())} positives among {len(of_part)} rows "
                f"(rating >= {positive_rating}); both labels are needed: set ctr.positive_rating, or choose another "
                "date"
            )


def histories(
    users: np.ndarray, items: np.ndarray, times_us: np.ndarray, labels: np.ndarray, max_history: int, padding: int
) -> np.ndarray:
    """The user's newest positives strictly before each row's moment: the sequence that DIN attends over.

    A row sees neither itself nor anything of its own moment or later, whatever part of the split those rows are in.
    Arguments and result are as `CtrData` has them; `padding` stands where there are no more.
    """
    keys, _ = keys_by_moment(users, times_us)
    positives = np.flatnonzero(labels == 1)
    positives = positives[np.argsort(keys[positives], kind="stable")]
    positive_users, positive_items = users[positives], items[positives]
    ends = np.searchsorted(keys[positives], keys, side="left")  # positives of earlier users, or earlier moments
    result = np.full((len(users), max_history), padding, np.int64)
    for back in range(max_history):
        candidates = ends - 1 - back
        is_own = candidates >= 0
        is_own[is_own] = positive_users[candidates[is_own]] == users[is_own]
        result[is_own, back] = positive_items[candidates[is_own]]
    return result


def keys_by_moment(numbers: np.ndarray, times_us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys that sort rows by entity, then by time, and each row's moment: times as dense numbers, so that keys fit."""
    moments = np.unique(times_us, return_inverse=True)[1]
    return numbers.astype(np.int64) * (int(moments.max(initial=0)) + 1) + moments, moments


def build_knowledge(
    tables: EntityTables,
    data: CtrData,
    variants: Mapping[str, FeatureSet],
    as_of: datetime.date,
    settings: CtrSettings,
) -> dict[str, Knowledge]:
    """Features of each variant, aligned with the entities and reduced by one basis.

    Raises CtrError when they are of a later date, of another id type, or of encoders of different lengths.
    """
    aligned, is_trained = {name: {} for name in variants}, {}
    for features in variants.values():
        check_provenance(features, as_of)
    for side, table, numbers in (("user", tables.users, data.users), ("item", tables.items, data.items)):
        ids = table[f"{side}_id"].combine_chunks()
        for name, features in variants.items():
            aligned[name][side] = align(features[side], side, ids)
        is_trained[side] = np.bincount(numbers[data.train], minlength=table.num_rows) > 0
    reduced = reduce_vectors(aligned, is_trained, settings.vector_dim) if aligned else {}
    return {name: Knowledge(**sides) for name, sides in reduced.items()}


def _numbers(ids: pa.Array, known: pa.ChunkedArray, side: str) -> np.ndarray:
    positions = pc.index_in(ids, known.combine_chunks())
    if positions.null_count:
        unknown = ids.filter(pc.is_null(positions))[0].as_py()
        raise CtrError(
            f"{positions.null_count} interactions of unknown {side}s (the first: {unknown!r}); check the tables"
        )
    return np.array(positions.cast(pa.int64()))


def _fields(table: pa.Table, id_column: str, num_seen: np.ndarray, settings: CtrSettings) -> tuple[Field, ...]:
    own = id_field(id_column, num_seen, settings.min_id_interactions)
    return (own, *attribute_fields(table, id_column, num_seen > 0))
