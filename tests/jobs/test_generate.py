"""Planning and collecting a night's texts, without a model: lost work is repeated, and no entity is lost."""

import errno
import json
import re
import shutil
import threading
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import yaml
from in_process import without_ray
from night_world import FIRST_DATE, SECOND_DATE, make_world, write_config

from laserbatch.jobs.settings import PACKAGE_ROOT, load_settings
from laserbatch.jobs.stages import night_plans, shards
from laserbatch.jobs.stages.night import Night, open_night, parse_date
from laserbatch.jobs.stages.run_night import WRITING, run_stages
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.knowledge.records import knowledge_schema
from laserbatch.pipeline.planning import postpone
from laserbatch.pipeline.planning.plan import read_shard
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.figures import ModelFigures, ShardInfo
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.pipeline.storage.workspace import Workspace

EMPTY = {pa.string(): "", pa.int32(): 0, pa.list_(pa.int32()): [1, 2], pa.list_(pa.uint8()): [0, 0], pa.bool_(): False}
WALL_S = 1000.0  # time of every shard


class Workers:
    """Stand-ins for Ray's workers: each writes the ids of the entity and of the run as a text.

    `failing` entities get no text. `shards` are the written ones; `at_first` is called before the first of them.
    """

    def __init__(self, failing=(), at_first=lambda: None) -> None:
        self.failing, self.at_first, self.shards = failing, at_first, []

    def run_shards(self, shards, worker_pool, choose_budgets, on_first_text):
        for shard in shards:
            self.at_first()
            self.at_first = lambda: None
            yield shard, self._written(shard, worker_pool.spec)

    def _written(self, shard, spec):
        rows = read_shard(spec.run_dir / shard.path)
        schema = knowledge_schema(pa.array([rows[0].entity_id]).type)
        nothing = {field.name: EMPTY[field.type] for field in schema if field.name != "entity_id"}
        records, failed = [], []
        for row in rows:
            text = f"{row.entity_id} in {spec.run_id}, before {row.previous_ids}"
            if row.entity_id in self.failing:
                failed.append(
                    QuarantineRow.of(row.entity_id, shard.side, "unparsable: no aspect", row.fingerprint, text)
                )
                continue
            known = {"entity_id": row.entity_id, "fingerprint": row.fingerprint, "run_id": spec.run_id, "text": text}
            records.append(nothing | known | {"num_tokens": 2, "num_history": row.shown.num_events})
        self.shards.append((shard.side, shard.name))
        stats, model = DecodingStats(wall_s=WALL_S), ModelFigures("m", "float32", "cpu", 1)
        info = ShardInfo(shard.sha256, shard.group, stats, model, num_workers=1)
        table = pa.Table.from_pylist(records, schema=schema)
        return RunFolder(spec.run_dir).shards(shard.side).write(shard.name, table, failed, info)


def writer(patched: pytest.MonkeyPatch):
    """A function that generates a night's texts with `Workers`, and returns them."""

    def generated(night: Night, **options) -> Workers:
        workers = Workers(**options)
        patched.setattr(shards, "run_shards", workers.run_shards)
        run_stages(night, WRITING[:1], NightWorkers(night.settings.cluster))
        return workers

    without_ray(patched.setattr)
    return generated


@pytest.fixture
def write(monkeypatch):
    return writer(monkeypatch)


def opened(folder: Path, date: str, shard_size: int = 1, **sections) -> Night:
    night = {"shard_size": shard_size, "train_ctr": False}
    return open_night(load_settings(write_config(folder, night=night, **sections)), parse_date(date))


@pytest.fixture(scope="module")
def first_night(tmp_path_factory) -> Path:
    """A small world whose first date is generated and published."""
    folder = make_world(tmp_path_factory.mktemp("first"), 12, 20)
    with pytest.MonkeyPatch.context() as patched:
        night = opened(folder, FIRST_DATE, shard_size=16)
        writer(patched)(night)
    night.run.finish()
    Workspace.open(folder / "workspace").publication.publish(night.run.run_id)
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
    counts = {side: night.manifest.generation.sides[side].num_carried_over for side in SIDES}
    assert min(counts.values()) > 0 and len(expected) == num_entities(night)
    for name, damage in DAMAGE.items():
        damage(night.run.root / name.partition(" ")[0])
        again = opened(world, SECOND_DATE)
        lost = [("user", "00000")] if name == "knowledge/user/00000.parquet" else []
        assert write(again).shards == lost, name
        assert texts(again.run) == expected, name
        assert {side: again.manifest.generation.sides[side].num_carried_over for side in SIDES} == counts
        assert not list(night.run.root.rglob("*.tmp"))


@pytest.mark.parametrize(("name", "said"), [("00000", "is damaged or was changed"), ("copy", "is not listed in")])
def test_texts_that_the_earlier_run_did_not_write_are_not_carried_over(world, write, name, said):
    night = opened(world, SECOND_DATE)
    folder = night.previous.knowledge_folder("user")
    rows = read_parquet(folder / "00000.parquet")
    changed = pa.array(["I wrote this.", *rows["text"].to_pylist()[1:]])
    write_parquet(rows.set_column(rows.schema.get_field_index("text"), rows.schema.field("text"), changed),
                  folder / f"{name}.parquet")  # fmt: skip
    with pytest.raises(WorkspaceError, match=rf"knowledge/user/{name}\.parquet .*{said}"):
        write(night)


def test_a_disk_that_is_full_of_what_is_carried_over_ends_the_night_at_the_next_shard(world, monkeypatch):
    night = opened(world, SECOND_DATE)
    is_refused, workers = threading.Event(), Workers(at_first=lambda: is_refused.wait(5) and time.sleep(0.01))

    def full(keep):
        is_refused.set()
        raise OSError(errno.ENOSPC, "No space left on device", "carried.parquet")

    monkeypatch.setattr(night_plans.planner.CarryOver, "write", full)
    monkeypatch.setattr(shards, "run_shards", workers.run_shards)
    without_ray(monkeypatch.setattr)
    with pytest.raises(OSError, match=r"No space left on device.*carried\.parquet"):
        run_stages(night, WRITING[:1], NightWorkers(night.settings.cluster))
    assert len(workers.shards) == 1


def test_the_rate_counts_the_seconds_of_writing_alone(world, write, capfd):
    night = opened(world, SECOND_DATE)
    write(night)  # the workers report 1,000 s, and take none
    assert re.search(rf"generate: (\d+)/\1  {WALL_S:.0f} s", capfd.readouterr().err)


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

    def lose() -> None:
        while "carried" not in night.run.shards("user").finished():  # it is written while the workers write
            time.sleep(0.01)
        (night.run.knowledge_folder("user") / "carried.parquet").unlink()

    with pytest.raises(
        WorkspaceError, match=r"of \d+ users \d+ are missing, or postponed without the text that they keep \(u.*again"
    ):
        write(night, at_first=lose)
    assert write(opened(world, SECOND_DATE)).shards == []
    assert len(texts(night.run)) == num_entities(night)


def test_an_entity_whose_text_fails_keeps_its_old_one_and_is_asked_again_when_its_turn_comes(
    world, write, monkeypatch, capfd
):
    before = texts(Workspace.open(world / "workspace").publication.run())
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
    written = texts(night.run)
    assert [written[id_] for id_ in failing[:2]] == [(before[id_][0], True) for id_ in failing[:2]]
    assert sum(is_stale for _, is_stale in written.values()) == 2 and len(written) == num_entities(night)
    rows = night.run.read_quarantine("user").to_pylist()
    assert [(row["entity_id"], row["text"]) for row in rows] == [
        (id_, f"{id_} in {night.run.run_id}, before [1 2]") for id_ in sorted(failing[:2])
    ]
    figures = night.manifest.generation.sides["user"]
    assert (figures.num_quarantined, figures.num_stale) == (2, 2)
    assert figures.num_generated + figures.num_carried_over + figures.num_quarantined == figures.num_entities
    night.run.finish()
    Workspace.open(world / "workspace").publication.publish(night.run.run_id)

    monkeypatch.setattr(postpone, "DAYS_BETWEEN_TRIES", 1 << 40)  # no row is tried again
    third = opened(world, "2025-03-02")
    capfd.readouterr()
    write(third)
    assert "users in quarantine that were not tried tonight: unparsable (2)" in capfd.readouterr().err
    after = texts(third.run)
    assert all(after[id_] == written[id_] for id_ in failing[:2])
    assert third.run.read_quarantine("user").to_pylist() == rows
    figures = third.manifest.generation.sides["user"]
    assert (figures.num_quarantined, figures.num_stale) == (2, 2) and figures.quarantine_reasons == {"unparsable": 2}
    third.manifest.save()
    third.run.finish()
    Workspace.open(world / "workspace").publication.publish(third.run.run_id)

    monkeypatch.setattr(postpone, "DAYS_BETWEEN_TRIES", 1)  # every row is tried again
    third = opened(world, "2025-03-04")
    write(third)
    after = texts(third.run)
    assert all(after[id_] == (f"{id_} in {third.run.run_id}, before [1 2]", False) for id_ in failing[:2])


def finished(night: Night) -> dict:
    """Check that every counted entity is there once, publish the night, and return its texts by id."""
    for side, figures in night.manifest.generation.sides.items():
        num_counted = figures.num_generated + figures.num_carried_over + figures.num_waiting + figures.num_without_text
        assert num_counted + figures.num_quarantined == figures.num_entities
        postponed = night.run.read_postponed(side)
        assert len(postponed) == figures.num_waiting + figures.num_without_text == sum(figures.postponed.values())
        rows = {row["entity_id"]: row["is_stale"] for row in read_parquet(night.run.knowledge_folder(side)).to_pylist()}
        assert {key for key, is_stale in rows.items() if is_stale} == {
            row["entity_id"] for row in postponed.to_pylist() if row["has_text"]
        }
        assert rows.keys() | set(postponed["entity_id"].to_pylist()) == set(
            night.tables.entities(side)[f"{side}_id"].to_pylist()
        )
    night.manifest.save()
    night.run.finish()
    Workspace.open(night.workspace.root).publication.publish(night.run.run_id)
    return texts(night.run)


def test_whose_change_is_not_due_keeps_the_text_and_waits(world, write):
    before = texts(Workspace.open(world / "workspace").publication.run())
    night = opened(world, SECOND_DATE, refresh={"min_new_interactions": 10**6})
    write(night)
    (night.run.knowledge_folder("user") / "waiting.parquet").unlink()  # the file is lost, so the side is planned again
    assert not write(night).shards
    records, figures = finished(night), night.manifest.generation.sides["user"]
    waiting = [key for key, (_, is_stale) in records.items() if is_stale]
    assert figures.num_waiting == len(waiting) > 0 and figures.postponed == {"not-due": len(waiting)}
    assert all(records[key][0] == before[key][0] for key in waiting)
    assert all(records[key][0].startswith(f"{key} in {night.run.run_id}") for key in records.keys() - before.keys())

    third = opened(world, "2025-03-02", refresh={"max_age_days": 2, "min_new_interactions": 10**6})
    write(third)
    assert not any(is_stale for _, is_stale in finished(third).values())  # the texts are of the 28th


def test_a_budget_spreads_a_new_way_to_ask_over_nights_until_everybody_was_asked(world, write):
    """Every entity is due; a night has room for twelve texts of two tokens."""
    first, num_written, num_old = Workspace.open(world / "workspace").publication.run().run_id, [], []
    for day in range(1, 5):
        budget = {"max_tokens": 24}
        night = opened(world, f"2025-03-0{day}", decoding={"max_new_tokens": 200}, refresh=budget)
        write(night)
        records = finished(night)
        num_written.append(sum(figures.num_generated for figures in night.manifest.generation.sides.values()))
        num_old.append(sum(first in text for text, _ in records.values()))
    assert max(num_written) <= 13  # each side may begin one text with a token left
    assert num_old == sorted(num_old, reverse=True) and num_old[0] > 16 and num_old[-1] == 0


def test_each_side_has_what_the_other_leaves_of_a_budget(world, write, tmp_path):
    """The budget just suffices for all due texts, most of which are of users or of items."""
    for number, side in enumerate(SIDES):
        template = yaml.safe_load((PACKAGE_ROOT / "configs" / "prompts" / f"kar_{side}.yaml").read_text())
        (tmp_path / f"other_{side}.yaml").write_text(yaml.safe_dump(template | {"name": f"other_{side}"}))
        changed = {"knowledge": {"template_dir": str(tmp_path), f"{side}_template": f"other_{side}"}}
        free = opened(world, SECOND_DATE, refresh={"min_interactions": 1}, **changed)
        plans = night_plans.plan_night(free, RunFolder(tmp_path / f"free{number}"))
        num_due = [sum(shard.num_rows for shard in plan.shards) for plan in plans.values()]
        assert max(num_due) > 1.5 * min(num_due) > 0
        budget = {"min_interactions": 1, "max_tokens": sum(plan.num_tokens for plan in plans.values()) - 1}
        night = opened(world, SECOND_DATE, refresh=budget, **changed)
        plans = night_plans.plan_night(night, RunFolder(tmp_path / side))
        assert [sum(shard.num_rows for shard in plan.shards) for plan in plans.values()] == num_due


def test_about_whom_there_is_no_evidence_nothing_is_written(world, write):
    night = opened(world, SECOND_DATE, refresh={"min_interactions": 10**6})
    write(night)
    records, figures = finished(night), night.manifest.generation.sides["user"]
    assert figures.num_without_text == figures.num_entities == night.tables.users.num_rows
    assert figures.postponed == {"evidence": figures.num_entities} and figures.num_quarantined == 0
    assert records.keys() == set(night.tables.items["item_id"].to_pylist())


def test_a_folder_of_knowledge_is_read_as_it_is(world):
    night = opened(world, SECOND_DATE)
    folder, num_rows = night.previous.knowledge_folder("user"), 12
    assert pq.read_table(folder).num_rows == ds.dataset(folder).to_table().num_rows == num_rows
    if find_spec("pandas"):
        assert len(import_module("pandas").read_parquet(folder)) == num_rows
