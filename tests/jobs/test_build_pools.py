"""Pools from a run's texts, grouped as the configuration says, and the next night's routes into those groups."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from jobs.build_pools import build_pools
from jobs.generate import router
from jobs.night import open_night
from jobs.pools import app
from jobs.settings import load_settings
from pipeline.knowledge.entities import iter_entities
from pipeline.tables.sample_world import write_sample_world

FIRST_DATE, SECOND_DATE = datetime.date(2025, 2, 28), datetime.date(2025, 3, 1)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Tables, and a module of the user's by which nobody is worth a collaborative group."""
    write_sample_world(tmp_path / "tables", num_users=30, num_items=60)
    (tmp_path / "nobody_is_known.py").write_text("def choose(facts):\n    return 'attribute'\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def opened(world, date, routing):
    path = world / "laserbatch.yaml"
    path.write_text(f"workspace: workspace\ntables: {{path: tables}}\nrouting: {routing}\n")
    return open_night(load_settings(path), date)


def write_texts(night):
    """Texts of all items whose words depend on the mood; of no user."""
    moods = {mood: number for number, mood in enumerate(sorted(set(night.tables.items["mood"].to_pylist())))}
    rng = np.random.default_rng(0)
    rows = [
        {
            "entity_id": row["item_id"],
            "model_id": "m",
            "run_id": "2025-02-28-ab",
            "token_ids": 50 * moods[row["mood"]] + rng.integers(0, 50, 20),
        }
        for row in night.tables.items.to_pylist()
    ]
    columns = {name: [row[name] for row in rows] for name in ("entity_id", "model_id", "run_id")}
    token_ids = pa.array([row["token_ids"] for row in rows], pa.list_(pa.int32()))
    texts = pa.table(columns | {"token_ids": token_ids})
    night.run.write_shard("item", "00000", texts)
    night.run.write_shard("user", "00000", texts.slice(0, 0))


def test_cold_entities_draft_from_the_leaf_that_their_pool_has(world):
    routing = "{attribute_grouping: leaves, rule: 'nobody_is_known:choose', num_groups: 4, min_group_size: 3}"
    night = opened(world, FIRST_DATE, routing)
    write_texts(night)
    groups = set(build_pools(night)["item"]["groups"])
    assert groups == {"leaf/0", "leaf/1", "leaf/2", "leaf/3"}
    shown = CliRunner().invoke(app, ["show", "--config", str(world / "laserbatch.yaml")], catch_exceptions=False)
    assert "holds" in shown.stdout and "mood=" in shown.stdout
    next_night = opened(world, SECOND_DATE, routing)
    route = router(next_night, "item")
    routes = {route(entity) for entity in iter_entities(next_night.tables, "item")}
    assert {route.scheme for route in routes} == {"attribute"}
    assert {route.group for route in routes} == groups
    no_texts = router(next_night, "user")
    assert {no_texts(user).group for user in iter_entities(next_night.tables, "user")} == {"leaf/0"}


def test_tonights_rule_decides_over_the_groups_of_last_nights_pools(world):
    night = opened(world, FIRST_DATE, "{rule: 'nobody_is_known:choose'}")
    write_texts(night)
    assert all(group.startswith("attribute") for group in build_pools(night)["item"]["groups"])
    next_night = opened(world, SECOND_DATE, "{min_interactions: 5}")
    route = router(next_night, "item")
    schemes = {route(entity).scheme for entity in iter_entities(next_night.tables, "item")}
    assert schemes == {"collaborative", "attribute"}
