"""The split goes by time, and refuses what cannot be judged."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from ctr_world import AS_OF

from laserbatch.ctr.dataset import split_by_time
from laserbatch.ctr.settings import CtrError


def test_training_ends_with_the_last_moment_of_the_date(world):
    rows = split_by_time(world.interactions, AS_OF)
    midnight_us = int(datetime.datetime(2025, 3, 2, tzinfo=datetime.UTC).timestamp()) * 1_000_000
    assert rows.times_us[rows.train].max() < midnight_us <= rows.times_us[rows.validation].min()
    assert np.array_equal(np.concatenate([rows.train, rows.validation, rows.test]), np.arange(len(rows.labels)))


def test_validation_is_the_first_share_of_what_follows(world):
    rows = split_by_time(world.interactions, AS_OF, validation_share=0.3)
    num_validation, num_test = len(rows.validation), len(rows.test)
    assert num_validation / (num_validation + num_test) == pytest.approx(0.3, abs=0.01)


def test_rows_of_one_moment_stay_in_one_part():
    times = [0] * 4 + [2 * 86_400_000_000] * 6 + [3 * 86_400_000_000] * 6
    table = pa.table(
        {
            "user_id": [f"u{n}" for n in range(16)],
            "item_id": ["i"] * 16,
            "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
            "rating": [1.0, 5.0] * 8,
        }
    )
    rows = split_by_time(table, datetime.date(1970, 1, 1), validation_share=0.6)
    assert [len(part) for part in (rows.train, rows.validation, rows.test)] == [4, 6, 6]


def test_labels_follow_the_threshold(world):
    ratings = world.interactions["rating"].to_numpy()
    assert split_by_time(world.interactions, AS_OF, positive_rating=4.0).labels.mean() == pytest.approx(
        (ratings >= 4).mean()
    )


@pytest.mark.parametrize(
    ("as_of", "message"),
    [
        (datetime.date(2030, 1, 1), "no interactions after 2030-01-01"),
        (datetime.date(2020, 1, 1), "nothing to train on"),
    ],
)
def test_a_date_outside_the_interactions_is_refused(world, as_of, message):
    with pytest.raises(CtrError, match=message):
        split_by_time(world.interactions, as_of)


def test_one_label_only_is_refused(world):
    with pytest.raises(CtrError, match="both labels are needed"):
        split_by_time(world.interactions, AS_OF, positive_rating=-1.0)
    with pytest.raises(CtrError, match="no `rating` column"):
        split_by_time(world.interactions.drop_columns(["rating"]), AS_OF)


def test_a_null_rating_is_no_positive(world):
    ratings = pc.if_else(pc.greater_equal(world.interactions["rating"], 4), 5.0, pa.scalar(None, pa.float64()))
    table = world.interactions.set_column(3, "rating", ratings)
    assert 0 < split_by_time(table, AS_OF).labels.mean() < 1
