"""The facts that a night tells the router: counts and ages as of its date."""

import datetime

import pyarrow as pa
import pytest

from laserbatch.pipeline.knowledge.entities import iter_entities
from laserbatch.pipeline.planning.planner import ages_days, entity_router
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
    assert ages_days(table, "user", DATE) == {7: 1.0, 8: 0.25, 10: 30.0}
    assert ages_days(table.select(["user_id"]), "user", DATE) == {}


def test_the_router_is_told_counts_ages_and_attributes(world):
    class Listening:
        def route(self, entity_id, attributes, num_interactions, age_days):
            told[entity_id] = (attributes, num_interactions, age_days)

    told = {}
    tables = read_tables(world / "tables", as_of=DATE)
    route = entity_router(Listening(), tables, "user", DATE)
    for entity in iter_entities(tables, "user"):
        route(entity)
    assert set(told) == set(tables.users["user_id"].to_pylist())
    for row in tables.users.to_pylist():
        attributes, num_interactions, age_days = told[row["user_id"]]
        assert num_interactions == tables.interactions["user_id"].to_pylist().count(row["user_id"])
        assert age_days == pytest.approx((utc(2) - row["created_at"]) / datetime.timedelta(days=1))
        assert attributes and attributes == {name: row[name] for name in attributes}
