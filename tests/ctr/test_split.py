"""The split is by time, and data that leave nothing to judge are refused."""

import datetime

import numpy as np
import pytest
from ctr_world import AS_OF

from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.log import Log, split_by_time
from laserbatch.ctr.settings import CtrSettings


def split(world, as_of=AS_OF, **changes):
    return build_dataset(world, as_of, CtrSettings(**changes))


def test_training_ends_with_the_last_moment_of_the_date(world):
    rows = split(world)
    midnight_us = int(datetime.datetime(2025, 3, 2, tzinfo=datetime.UTC).timestamp()) * 1_000_000
    assert rows.times_us[rows.train].max() < midnight_us <= rows.times_us[rows.validation].min()
    assert np.array_equal(np.concatenate([rows.train, rows.validation, rows.test]), np.arange(len(rows.labels)))


def test_validation_is_the_first_share_of_what_follows(world):
    rows = split(world, validation_share=0.3)
    num_validation, num_test = len(rows.validation), len(rows.test)
    assert num_validation / (num_validation + num_test) == pytest.approx(0.3, abs=0.01)


def test_rows_of_one_moment_stay_in_one_part():
    times = [0] * 4 + [2 * 86_400_000_000] * 6 + [3 * 86_400_000_000] * 6
    log = Log(np.zeros(16, np.int32), np.zeros(16, np.int32), np.array(times), np.tile(np.float32([0, 1]), 8))
    parts = split_by_time(log, datetime.date(1970, 1, 1), CtrSettings(validation_share=0.6))
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [4, 6, 6]
    with pytest.raises(CtrError, match=r"validation part .* has no rows: interactions of one time stay together"):
        split_by_time(log, datetime.date(1970, 1, 3), CtrSettings())


@pytest.mark.parametrize(
    ("as_of", "message"),
    [
        (datetime.date(2030, 1, 1), "no interactions after 2030-01-01"),
        (datetime.date(2020, 1, 1), "nothing to train on"),
    ],
)
def test_a_date_outside_the_interactions_is_refused(world, as_of, message):
    with pytest.raises(CtrError, match=message):
        split(world, as_of)


def test_one_label_only_is_refused(world):
    with pytest.raises(CtrError, match=r"rating >= -1; rating has values such as \d.*both labels are needed"):
        split(world, label="rating >= -1")
