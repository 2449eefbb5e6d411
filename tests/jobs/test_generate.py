"""Planning and gathering of a night's texts, without a model: what is lost is done again, and nobody goes missing."""

import json
import shutil
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from night_world import FIRST_DATE, SECOND_DATE, make_world, run_here, write_config, write_here

from laserbatch.jobs import generate
from laserbatch.jobs.night import Night, open_night, parse_date
from laserbatch.jobs.settings import load_settings
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.knowledge.records import knowledge_schema
from laserbatch.pipeline.planning.plan import read_shard
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.manifest import ModelFigures
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder, ShardInfo
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.pipeline.storage.workspace import Workspace

EMPTY = {pa.string(): "", pa.int32(): 0, pa.list_(pa.int32()): [1, 2], pa.list_(pa.uint8()): [0, 0], pa.bool_(): False}


class Workers:
    """Stand in for Ray's: each writes a text of nothing but the entity's id and the run's.

    `failing` entities have none. `shards` are those that were written; `at_first` is called before the first.
    """

    def __init__(self, failing=(), at_first=lambda: None) -> None:
        self.failing, self.at_first, self.shards = failing, at_first, []

    def run_shards(self, shards, spec, layout, attempts, **options):
        for shard in shards:
            self.at_first()
            self.at_first = lambda: None
            yield shard, self._written(shard, spec)

    def _written(self, shard, spec):
        rows = read_shard(spec.run_dir / shard.path)
        schema = knowledge_schema(pa.array([rows[0].entity_id]).type)
        nothing = {field.name: EMPTY[field.type] for field in schema if field.name != "entity_id"}
        records, failed = [], []
        for row in rows:
            text = f"{row.entity_id} in {spec.run_id}, before {row.previous_ids}"
            if row.entity_id in self.failing:
                failed.append(QuarantineRow.of(row.entity_id, shard.side, "unparsable: no aspect", "ff", text))
                continue
            known = {"entity_id": row.entity_id, "fingerprint": row.fingerprint, "run_id": spec.run_id, "text": text}
            records.append(nothing | known)
        self.shards.append((shard.side, shard.name))
        stats, model = DecodingStats(wall_s=1.0), ModelFigures("m", "float32", "cpu", 1)
        info = ShardInfo(shard.sha256, shard.group, stats, model, num_workers=1)
        table = pa.Table.from_pylist(records, schema=schema)
        return RunFolder(spec.run_dir).write_shard(shard.side, shard.name, table, failed, info)


@contextmanager
def no_cluster(settings):
    yield SimpleNamespace(num_workers=1, num_threads=1, device="cpu")


def writer(patched: pytest.MonkeyPatch):
    """Generates a night's texts by `Workers`, which it returns."""

    def generated(night: Night, **options) -> Workers:
        workers = Workers(**options)
        patched.setattr(generate, "run_shards", workers.run_shards)
        generate.generate_knowledge(night)
        return workers

    patched.setattr(generate, "ray_cluster", no_cluster)
    patched.setattr(generate, "draft", lambda pool, context, num_prompt: None)
    return generated


@pytest.fixture
def write(monkeypatch):
    return writer(monkeypatch)


def opened(folder: Path, date: str, shard_size: int = 1) -> Night:
    night = {"shard_size": shard_size, "train_ctr": False, "num_report_samples": 0}
    return open_night(load_settings(write_config(folder, night=night)), parse_date(date))


@pytest.fixture(scope="module")
def first_night(tmp_path_factory) -> Path:
    """Two dates of a small world, the first generated and published."""
    folder = make_world(tmp_path_factory.mktemp("first"), 12, 20)
    with pytest.MonkeyPatch.context() as patched:
        night = opened(folder, FIRST_DATE, shard_size=16)
        writer(patched)(night)
    night.run.finish()
    Workspace.open(folder / "workspace").publish(night.run.run_id)
    return folder


@pytest.fixture
def world(first_night, tmp_path) -> Path:
    return shutil.copytree(first_night, tmp_path / "world")


def texts(run: RunFolder) -> dict:
    columns = ("entity_id", "text", "is_stale")
    tables = [read_parquet(run.knowledge_folder(side)).select(columns) for side in SIDES]
    return {row["entity_id"]: (row["text"], row["is_stale"]) for table in tables for row in table.to_pylist()}


def num_entities(night: Night) -> int:
    return night.tables.users.num_rows + night.tables.items.num_rows


def lose_a_shard_of_the_plan(path: Path) -> None:
    plan = json.loads(path.read_text())
    plan["shards"] = plan["shards"][1:]
    path.write_text(json.dumps(plan))


DAMAGE = {
    "shards/user/carried.json": Path.unlink,
    "knowledge/user/carried.parquet": Path.unlink,
    "knowledge/item/carried.parquet": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "plan/user/00000.parquet": Path.unlink,
    "plan/user/00001.parquet": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "plan/user.json": lambda path: path.write_text("{"),
    "plan/item.json": Path.unlink,
    "plan/user.json of another version": lambda path: path.write_text('{"refused": []}'),
    "plan/user.json without a shard": lose_a_shard_of_the_plan,
    "knowledge/user/00000.parquet": Path.unlink,
}


def test_whatever_is_lost_of_an_unfinished_run_is_done_again_and_nothing_else(world, write):
    night = opened(world, SECOND_DATE)
    assert len(write(night).shards) > 2
    expected = texts(night.run)
    counts = {side: night.manifest.sides[side].num_carried_over for side in SIDES}
    assert min(counts.values()) > 0 and len(expected) == num_entities(night)
    for name, damage in DAMAGE.items():
        damage(night.run.root / name.partition(" ")[0])
        again = opened(world, SECOND_DATE)
        lost = [("user", "00000")] if name == "knowledge/user/00000.parquet" else []
        assert write(again).shards == lost, name
        assert texts(again.run) == expected, name
        assert {side: again.manifest.sides[side].num_carried_over for side in SIDES} == counts
        assert not list(night.run.root.rglob("*.tmp"))


def test_shards_of_another_plan_are_not_taken_for_those_of_this_one(world, write):
    night = opened(world, SECOND_DATE)
    write(night)
    expected = texts(night.run)
    night.settings = night.settings.model_copy(
        update={"night": night.settings.night.model_copy(update={"shard_size": 3})}
    )
    (night.run.root / "plan" / "user.json").unlink()
    write(night)
    assert texts(night.run) == expected


def test_what_is_lost_while_a_run_goes_on_ends_it_and_the_next_attempt_heals_it(world, write):
    night = opened(world, SECOND_DATE)
    carried = night.run.knowledge_folder("user") / "carried.parquet"
    with pytest.raises(
        WorkspaceError, match=r"of \d+ users \d+ are neither in its knowledge nor in quarantine \(u.*again"
    ):
        write(night, at_first=lambda: carried.unlink())
    assert write(opened(world, SECOND_DATE)).shards == []
    assert len(texts(night.run)) == num_entities(night)


def test_an_entity_whose_text_fails_keeps_its_old_one_and_is_asked_about_again(world, write):
    before = texts(Workspace.open(world / "workspace").published())
    night = opened(world, SECOND_DATE)
    write(night)
    failing = [
        row["entity_id"]
        for row in read_parquet(night.run.knowledge_folder("user")).to_pylist()
        if row["run_id"] == night.run.run_id
    ]
    shutil.rmtree(night.run.root)

    night = opened(world, SECOND_DATE)
    write(night, failing=failing[:2])
    found = texts(night.run)
    assert [found[id_] for id_ in failing[:2]] == [(before[id_][0], True) for id_ in failing[:2]]
    assert sum(is_stale for _, is_stale in found.values()) == 2 and len(found) == num_entities(night)
    rows = night.run.read_quarantine("user").to_pylist()
    assert [(row["entity_id"], row["text"]) for row in rows] == [
        (id_, f"{id_} in {night.run.run_id}, before [1 2]") for id_ in sorted(failing[:2])
    ]
    figures = night.manifest.sides["user"]
    assert (figures.num_quarantined, figures.num_kept) == (2, 2)
    assert figures.num_generated + figures.num_carried_over + figures.num_quarantined == figures.num_entities
    night.run.finish()
    Workspace.open(world / "workspace").publish(night.run.run_id)

    third = opened(world, "2025-03-02")
    write(third)
    after = texts(third.run)
    assert all(after[id_] == (f"{id_} in {third.run.run_id}, before [1 2]", False) for id_ in failing[:2])


def test_too_many_failed_rows_fail_the_night_and_publish_nothing(tmp_path, monkeypatch, capfd):
    write_here(monkeypatch)
    make_world(tmp_path, num_users=4, num_items=20)
    config = write_config(tmp_path, knowledge={"max_prompt_tokens": 80}, gates={"max_failed_share": 0.1})
    done = run_here(capfd, "nightly", "--config", str(config), "--date", FIRST_DATE)
    assert done.returncode == 4, done.stderr
    assert "too-long (" in done.stderr
    workspace = Workspace.open(tmp_path / "workspace")
    assert workspace.published() is None
    (run,) = workspace.runs()
    assert run.report_path.exists() and run.read_quarantine("user").num_rows > 0


def test_a_folder_of_knowledge_is_read_as_it_is(world):
    night = opened(world, SECOND_DATE)
    folder, num_rows = night.previous.knowledge_folder("user"), 12
    assert pq.read_table(folder).num_rows == ds.dataset(folder).to_table().num_rows == num_rows
    if find_spec("pandas"):
        assert len(import_module("pandas").read_parquet(folder)) == num_rows
