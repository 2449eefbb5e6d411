"""Turns tables into arrays that models index, about 55 bytes a row. Only training rows decide vocabularies and bins.

A row has the numbers of its user and item, statistics of both before its moment, and the slice of one array of liked
items that is its user's history. Fields of entities are in tables by entity number, from which models gather.
"""

import datetime
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from laserbatch.ctr.fields import Encoder, Field, fit_encoders
from laserbatch.ctr.log import EntityTables, Log, labelled_log, split_by_time
from laserbatch.ctr.settings import CtrSettings

PRIOR_ROWS = 5  # this many rows of the mean rate are added to every entity's rows
MAX_USUAL_FIELDS = 200  # on two cores, a step of 512 rows takes din 2 s with 2,000, and dcnv2 13 s with 500
LOG_SCALE = 4.0  # scales log(1 + count), and rates above the mean, to about one
PAST_COLUMNS = ("user_count", "user_rate", "item_count", "item_rate", "history_length")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelRows:
    """Rows with the fields of their entities: with `Knowledge`, all that a model is built from and scores."""

    users: np.ndarray  # int32 (n,)
    items: np.ndarray  # int32 (n,)
    past: np.ndarray  # float32 (n, len(PAST_COLUMNS)), statistics of rows strictly before the row's moment
    liked: np.ndarray  # int32 (num_positives,) liked items, grouped by user, in order of time
    starts: np.ndarray  # int32 (n,): `liked[starts:ends]` is the row's history, oldest first
    ends: np.ndarray  # int32 (n,)
    user_fields: tuple[Field, ...]  # codes by entity number
    item_fields: tuple[Field, ...]

    @property
    def num_items(self) -> int:
        return len(self.item_fields[0].codes)


@dataclass(frozen=True)
class CtrData(ModelRows):
    """Everything but knowledge, the same for every variant, model and seed; rows are in chronological order."""

    times_us: np.ndarray  # int64 (n,)
    labels: np.ndarray  # float32 (n,)
    is_cold: np.ndarray  # bool (n,), rows of users with few training rows
    train: np.ndarray  # int32 row indices
    validation: np.ndarray
    test: np.ndarray
    prior: float  # share of positives in training
    encoders: dict[str, list[Encoder]]  # by side


def build_dataset(tables: EntityTables, as_of: datetime.date, settings: CtrSettings) -> CtrData:
    """Split the interactions at the run's date and turn ids, attributes and histories into numbers.

    Raises CtrError if nothing precedes or follows the date, a part has rows of only one label, so that it has no AUC,
    or the label rule does not fit the columns.
    """
    log = labelled_log(tables, as_of, settings)
    parts: dict[str, Any] = split_by_time(log, as_of, settings)
    train = slice(parts["train"][0], parts["train"][-1] + 1)
    seen, encoders = {}, {}
    for side, table, numbers in (("user", tables.users, log.users), ("item", tables.items, log.items)):
        seen[side] = np.bincount(numbers[train], minlength=table.num_rows)
        encoders[side] = fit_encoders(table, f"{side}_id", seen[side], settings.min_id_interactions)
        if (num_fields := len(encoders[side])) > MAX_USUAL_FIELDS:
            logger.warning(
                "models read %d columns of %ss: a training of din or dcnv2 may take hours (of dcnv2 with the square of "
                "the columns). Leave out columns that say little, or train gbdt", num_fields, side,
            )  # fmt: skip
    prior = float(log.labels[train].mean(dtype=np.float64))
    rows = rows_before(tables, encoders, log, log.users, log.items, log.times_us, settings.max_history, prior)
    return CtrData(
        **vars(rows) | parts,
        times_us=log.times_us,
        labels=log.labels,
        is_cold=seen["user"][log.users] < settings.cold_max_interactions,
        prior=prior,
        encoders=encoders,
    )


def rows_before(
    tables: EntityTables, encoders: dict[str, list[Encoder]], log: Log, users: np.ndarray, items: np.ndarray,
    times_us: np.ndarray, max_history: int, prior: float,
) -> ModelRows:  # fmt: skip
    """Model inputs of (n,) users, items and times, from the rows of the log strictly before each time.

    A row sees neither itself nor any row of its moment or later, whatever part of the split those rows are in. Rows of
    the log and pairs to predict are treated alike.
    """
    moment_of_row = np.cumsum(np.r_[False, log.times_us[1:] != log.times_us[:-1]], dtype=np.int32)
    moments = moment_of_row
    if times_us is not log.times_us:  # the log's first moment at or after each time
        moments = np.append(moment_of_row, moment_of_row[-1] + 1)[np.searchsorted(log.times_us, times_us)]
    num_moments = int(moment_of_row[-1]) + 2
    past = np.empty((len(users), len(PAST_COLUMNS)), np.float32)
    for place, of_log, of_rows in ((0, log.users, users), (2, log.items, items)):
        keys = of_log.astype(np.int64) * num_moments + moment_of_row
        order = np.argsort(keys, kind="stable")
        positives = np.concatenate([np.zeros(1, np.int32), np.cumsum(log.labels[order] > 0, dtype=np.int32)])
        starts, ends = _between(keys[order], of_rows, moments, num_moments)
        counts, liked = ends - starts, positives[ends] - positives[starts]
        past[:, place] = np.log1p(counts) / LOG_SCALE
        past[:, place + 1] = ((liked + PRIOR_ROWS * prior) / (counts + PRIOR_ROWS) - prior) * LOG_SCALE
        del keys, order, positives, starts, ends, counts, liked
    positives = np.flatnonzero(log.labels > 0)
    keys = log.users[positives].astype(np.int64) * num_moments + moment_of_row[positives]
    order = np.argsort(keys, kind="stable")
    starts, ends = _between(keys[order], users, moments, num_moments)
    starts = np.maximum(starts, ends - max_history)
    past[:, 4] = np.log1p(ends - starts) / LOG_SCALE
    of_users = tuple(encoder.encode(tables.users) for encoder in encoders["user"])
    of_items = tuple(encoder.encode(tables.items) for encoder in encoders["item"])
    return ModelRows(users, items, past, log.items[positives[order]], starts, ends, of_users, of_items)


def _between(
    sorted_keys: np.ndarray, numbers: np.ndarray, moments: np.ndarray, num_moments: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each (entity, moment), where the entity's keys begin and where the moment belongs among them: int32 (n,)."""
    keys = numbers.astype(np.int64) * num_moments + moments
    order = np.argsort(keys)  # sorted look-ups are ten times as fast for 20 million rows
    ends = np.empty(len(keys), np.int32)
    ends[order] = np.searchsorted(sorted_keys, keys[order])
    firsts = np.searchsorted(sorted_keys, np.arange(int(numbers.max(initial=0)) + 1, dtype=np.int64) * num_moments)
    return firsts.astype(np.int32)[numbers], ends
