"""Which interactions are trained on, which stop the training, and which judge it: by time, never at random.

The knowledge of a date was made from what was known at the end of that day, so everything up to then is training and
only what comes later may judge.
"""

import datetime
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from laserbatch.ctr.settings import CtrError


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
