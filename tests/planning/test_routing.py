"""The facts that a night tells the router: counts and ages as of its date."""

import datetime

import numpy as np
import pyarrow as pa
import pytest

from laserbatch.pipeline.planning.planner import ages_days, side_routes
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.tables.read import read_tables

DATE = datetime.date(2025, 3, 1)


def utc(day, hour=0):
    return datetime.datetime(2025, 3, day, hour, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_sample_world(folder / "tables", num_users=30, num_items=24)
    return folder


def test_age_is_counted_to_the_end_of_the_date():
    created = pa.array([utc(1), utc(1, 18), None, datetime.datetime(2025, 1, 31, tzinfo=datetime.UTC)])
    table = pa.table({"user_id": [7, 8, 9, 10], "created_at": created.cast(pa.timestamp("us", "UTC"))})
    np.testing.assert_array_equal(ages_days(table, DATE), [1.0, 0.25, np.nan, 30.0])
    assert np.isnan(ages_days(table.select(["user_id"]), DATE)).all()


def test_the_router_is_told_counts_ages_and_attributes(world):
    class Listening:
        def route_all(self, *arguments):
            told.extend(arguments)

    told = []
    tables = read_tables(world / "tables", as_of=DATE)
    side_routes(Listening(), tables, "user", DATE)
    entities, counts, ages = told
    assert entities.equals(tables.users)
    of_users = tables.interactions["user_id"].to_pylist()
    assert counts.tolist() == [of_users.count(key) for key in entities["user_id"].to_pylist()]
    created = entities["created_at"].to_pylist()
    assert ages == pytest.approx([(utc(2) - one) / datetime.timedelta(days=1) for one in created])
