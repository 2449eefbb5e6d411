"""Whole nights with the bundled model and a real Ray: what they leave, what they skip, what they survive."""

import datetime
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from night_world import FIRST_DATE, SECOND_DATE, make_world, run, run_here, start, write_config

from laserbatch.pipeline.distributed.cluster import ray_cluster
from laserbatch.pipeline.distributed.settings import ClusterSettings
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.index.store import PoolStore

pytestmark = [pytest.mark.ray, pytest.mark.slow]
# How much is drafted is chosen, by a cost of steps that does not depend on this machine nor on the batch.
CHOSEN = {"max_draft_tokens": None, "min_acceptance": None, "step_cost": "cost.yaml"}
COST = """
name: invented
steps: [{batch_size: 1, num_tokens: 1, seconds: 0.01}, {batch_size: 1, num_tokens: 65, seconds: 0.02}]
"""


@pytest.fixture(scope="module")
def two_nights(tmp_path_factory) -> Path:
    """A workspace after two nights that chose how much to draft, the second with its CTR comparison.

    The first was killed when it had finished a shard, and the same command was given again. `first.json` says what it
    found: shards and when they were written, before and after; `first.txt` what it said.
    """
    folder = make_world(tmp_path_factory.mktemp("nights"))
    (folder / "cost.yaml").write_text(COST)
    arguments = ("nightly", "--config", str(write_config(folder, decoding=CHOSEN)), "--date", FIRST_DATE)
    finished = _shards_before_a_kill(folder, start(*arguments))
    first = run(*arguments)
    assert first.returncode == 0, first.stderr
    (folder / "first.txt").write_text(first.stderr)
    (folder / "first.json").write_text(json.dumps([finished, {name: _written(Path(name)) for name in finished}]))
    night = {"shard_size": 8, "max_failed_share": 0.2, "train_ctr": True}
    config = write_config(folder, "second.yaml", night=night, decoding=CHOSEN)
    second = run("nightly", "--config", str(config), "--date", SECOND_DATE, "--json")
    assert second.returncode == 0, second.stderr
    (folder / "second.json").write_text(second.stdout)
    return folder


def _shards_before_a_kill(folder: Path, night: subprocess.Popen) -> dict[str, int]:
    """The shards that a night had finished when it was killed, and when they were written."""
    deadline = time.monotonic() + 240
    shards = lambda: sorted(folder.glob("workspace/runs/*/shards/*/0*.json"))  # noqa: E731
    while not shards() and night.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(night.pid, signal.SIGKILL)
    night.communicate()
    return {str(path): _written(path) for path in shards()}


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


@pytest.fixture(scope="module")
def cluster():
    """One Ray for the nights of this process."""
    with ray_cluster(ClusterSettings()) as layout:
        yield layout


def runs(folder: Path):
    return Workspace.open(folder / "workspace", create=False).runs()


def texts(run_folder) -> dict[str, dict[object, str]]:
    tables = {side: run_folder.read_knowledge(side) for side in SIDES}
    return {
        side: dict(zip(table["entity_id"].to_pylist(), table["text"].to_pylist(), strict=True))
        for side, table in tables.items()
    }


def test_the_next_night_can_be_simulated_from_the_texts_of_a_real_one(two_nights, capfd):
    out = two_nights / "simulation.html"
    done = run_here(
        capfd, "pools", "simulate", "--config", str(two_nights / "second.yaml"), "--out", str(out), "--json"
    )
    assert done.returncode == 0, done.stderr
    for side in json.loads(done.stdout)["sides"].values():
        configured = side["outcomes"][0]
        assert configured["study"] == "configured" and configured["num_texts"] == side["num_texts"] // 4
        assert configured["tokens_per_step"]["value"] > 1.5  # texts of one model are alike
    assert out.read_text().startswith("<!doctype html>")


def test_the_second_night_carries_over_the_unchanged_and_drafts_the_rest_from_the_first(two_nights):
    first, second = runs(two_nights)
    manifest = second.load_manifest()
    for side in SIDES:
        data = manifest["sides"][side]
        assert data["num_carried_over"] > 0
        table = second.read_knowledge(side)
        origins = pc.value_counts(table["run_id"].combine_chunks()).to_pylist()
        assert {entry["values"]: entry["counts"] for entry in origins}[first.run_id] == data["num_carried_over"]
    new = second.read_knowledge("user").filter(pc.field("run_id") == second.run_id)
    assert new.num_rows > 0
    assert set(new["pool_version"].to_pylist()) == {first.run_id}
    per_step = {night.run_id: night.load_manifest()["sides"]["user"]["stats"] for night in (first, second)}
    pace = {run_id: stats["num_accepted"] / stats["num_steps"] for run_id, stats in per_step.items()}
    assert pace[second.run_id] > pace[first.run_id]


def test_each_night_chose_its_budgets_by_what_steps_cost(two_nights):
    for night in runs(two_nights):
        manifest = night.load_manifest()
        for side in SIDES:
            budget, stats = manifest["budgets"][side], manifest["sides"][side]["stats"]
            assert manifest["sides"][side]["budget"] == budget
            assert budget["forecast"]["step_cost"] == "invented"
            assert 0 < stats["num_drafted"] <= budget["max_draft_tokens"] * stats["num_steps"]


def test_the_last_night_is_published_with_its_pools_and_report(two_nights):
    workspace = Workspace.open(two_nights / "workspace", create=False)
    second = runs(two_nights)[1]
    assert workspace.published().run_id == second.run_id
    assert PoolStore(workspace.pools_folder).current_version() == second.run_id
    assert "<html" in second.report_path.read_text(encoding="utf-8")
    assert second.load_manifest()["ctr"]["rows"]


def test_the_summary_is_json(two_nights):
    summary = json.loads((two_nights / "second.json").read_text())
    assert summary["users"]["num_carried_over"] > 0
    assert [row["variant"] for row in summary["ctr"]["rows"] if row["auc"] > 0] == ["none", "relaxed"]
    assert not [key for key in _keys(summary) if not key.isidentifier()]


def _keys(data: object) -> list[str]:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [*(data if isinstance(data, dict) else ()), *(key for value in inner for key in _keys(value))]


def test_texts_depend_neither_on_shards_nor_on_workers_nor_on_the_future(two_nights, cluster, tmp_path, capfd):
    """The same nights again, none of them killed: one worker, other shards, batches and a future made up otherwise."""
    shutil.copytree(two_nights / "tables", tmp_path / "tables")
    table = pq.read_table(tmp_path / "tables" / "interactions.parquet")
    cut = pa.scalar(_midnight_after(SECOND_DATE), table.schema.field("timestamp").type)
    is_future = pc.greater_equal(table["timestamp"], cut)
    assert pc.any(is_future).as_py()
    flipped = pc.if_else(is_future, pc.subtract(6.0, pc.cast(table["rating"], pa.float64())), table["rating"])
    flipped = pc.cast(flipped, table.schema.field("rating").type)
    changed = table.set_column(table.column_names.index("rating"), "rating", flipped)
    pq.write_table(changed, tmp_path / "tables" / "interactions.parquet")
    (tmp_path / "cost.yaml").write_text(COST)
    config = write_config(
        tmp_path,
        night={"shard_size": 13, "max_failed_share": 0.2, "train_ctr": False},
        decoding=CHOSEN | {"batch_size": 5},
        cluster={"num_workers": 1},
    )
    for date in (FIRST_DATE, SECOND_DATE):
        night = run_here(capfd, "nightly", "--config", str(config), "--date", date)
        assert night.returncode == 0, night.stderr
    for here, there in zip(runs(two_nights), runs(tmp_path), strict=True):
        assert texts(here) == texts(there)
        for side in SIDES:
            features = [pq.read_table(night.features_path(side)) for night in (here, there)]
            vectors = [dict(zip(*_columns(f, side), strict=True)) for f in features]
            assert vectors[0] == vectors[1]


def _columns(features, side):
    return features[f"{side}_id"].to_pylist(), [tuple(vector) for vector in features["vector"].to_pylist()]


def _midnight_after(date: str):
    day = datetime.date.fromisoformat(date) + datetime.timedelta(days=1)
    return datetime.datetime.combine(day, datetime.time(), datetime.UTC)


def test_a_killed_night_is_finished_by_the_same_command(two_nights):
    """With the texts of a night that was not killed: see the test above."""
    before, after = json.loads((two_nights / "first.json").read_text())
    assert before, "no shard was finished before the kill"
    assert before == after
    assert "going on with run" in (two_nights / "first.txt").read_text()
    assert len(runs(two_nights)) == 2


def test_two_nights_at_once_are_refused(two_nights, capfd):
    with Workspace.open(two_nights / "workspace").lock():
        second = run_here(capfd, "nightly", "--config", str(two_nights / "laserbatch.yaml"), "--date", SECOND_DATE)
    assert second.returncode == 5
    assert "in use by pid" in second.stderr


def test_too_many_failed_rows_fail_the_night_and_publish_nothing(cluster, tmp_path, capfd):
    make_world(tmp_path, num_users=4, num_items=20)
    night = {"shard_size": 8, "max_failed_share": 0.1}
    sections = {"knowledge": {"max_prompt_tokens": 80}, "night": night, "cluster": {"num_workers": 1}}
    config = write_config(tmp_path, **sections)
    night = run_here(capfd, "nightly", "--config", str(config), "--date", FIRST_DATE)
    assert night.returncode == 4, night.stderr
    assert "users failed: too-long" in night.stderr
    assert Workspace.open(tmp_path / "workspace").published() is None
    assert runs(tmp_path)[0].report_path.exists()
    assert runs(tmp_path)[0].read_quarantine("user").num_rows > 0
