"""The facts that a night tells the router: counts and ages as of its date."""

import datetime

import pyarrow as pa
import pytest

from laserbatch.jobs.night import open_night
from laserbatch.jobs.settings import load_settings
from laserbatch.pipeline.knowledge.entities import iter_entities
from laserbatch.pipeline.planning.routing import ages_days, entity_router
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.tables.read import read_tables
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing.router import Router
from laserbatch.retrieval_pools.routing.rule import EntityFacts
from laserbatch.retrieval_pools.routing.settings import RoutingSettings

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


def test_the_rule_is_told_counts_ages_and_attributes(world, tmp_path, monkeypatch):
    told = {}
    source = "def choose(facts):\n    calls.append(facts)\n    return 'attribute'\n\ncalls = []\n"
    (tmp_path / "rule_that_listens.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    tables = read_tables(world / "tables", as_of=DATE)
    settings = RoutingSettings(rule="rule_that_listens:choose", min_interactions=1)
    router = Router.fit("user", tables.users, tables.interactions, settings)
    route = entity_router(router, tables, "user", DATE)
    for entity in iter_entities(tables, "user"):
        assert route(entity).scheme == "attribute"
        for facts in router.rule.function.__globals__["calls"][len(told) :]:
            told[entity.entity_id] = facts
    assert set(told) == set(tables.interactions["user_id"].to_pylist())
    for row in tables.users.to_pylist():
        if row["user_id"] in told:
            facts = told[row["user_id"]]
            count = tables.interactions["user_id"].to_pylist().count(row["user_id"])
            age = (utc(2) - row.pop("created_at")) / datetime.timedelta(days=1)
            assert facts == EntityFacts(
                count, pytest.approx(age), {k: v for k, v in row.items() if k in facts.attributes}
            )


def test_a_rule_that_cannot_be_imported_fails_before_anything_is_written(world):
    config = world / "laserbatch.yaml"
    config.write_text("workspace: workspace\ntables: {path: tables}\nrouting: {rule: 'no_such_module:choose'}\n")
    with pytest.raises(PoolError, match="no_such_module"):
        open_night(load_settings(config), DATE)
    assert not (world / "workspace").exists()


def test_the_rule_is_part_of_the_runs_settings_and_name(world, tmp_path, monkeypatch):
    (tmp_path / "own_rule.py").write_text("def choose(facts):\n    return 'attribute'\n")
    monkeypatch.syspath_prepend(tmp_path)
    runs = []
    for rule in ("null", "'own_rule:choose'"):
        config = world / "laserbatch.yaml"
        config.write_text(f"workspace: {tmp_path / 'w'}\ntables: {{path: tables}}\nrouting: {{rule: {rule}}}\n")
        runs.append(open_night(load_settings(config), DATE))
    assert runs[0].run.run_id != runs[1].run.run_id
    assert runs[1].manifest["settings"]["routing"]["rule"] == "own_rule:choose"
