"""The facts that a night gives the router are counts as of its date."""

import datetime

import pytest

from laserbatch.pipeline.planning.planner import side_routes
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.tables.read import read_tables

DATE = datetime.date(2025, 3, 1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_sample_world(folder / "tables", num_users=30, num_items=24)
    return folder


def test_the_router_is_told_counts_and_attributes(world):
    class Listening:
        def routes(self, *arguments):
            recorded.extend(arguments)

    recorded = []
    tables = read_tables(world / "tables", as_of=DATE)
    side_routes(Listening(), tables, "user")
    entities, counts = recorded
    assert entities.equals(tables.users)
    of_users = tables.interactions["user_id"].to_pylist()
    assert counts.tolist() == [of_users.count(key) for key in entities["user_id"].to_pylist()]
