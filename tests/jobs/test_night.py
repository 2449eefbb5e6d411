"""The run that a night builds on, continues and publishes: chosen by date, and not by time of writing."""

import datetime
import errno
import json
import os
from dataclasses import asdict
from shutil import rmtree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from night_world import run_here

from laserbatch.jobs.commands import nightly as nights
from laserbatch.jobs.commands.ctr import _opened as opened_for_ctr
from laserbatch.jobs.gates import measure
from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages import publishing
from laserbatch.jobs.stages import run_night as stages
from laserbatch.jobs.stages.budgets import known_step_cost, last_speed
from laserbatch.jobs.stages.build_pools import unchanged_pools
from laserbatch.jobs.stages.night import earlier_runs, new_night, open_night, open_run
from laserbatch.jobs.stages.night_plans import NightPlanner, plan_night
from laserbatch.jobs.stages.run_night import finish_night, publish_night, run_night
from laserbatch.pipeline.errors import RunHeld, TableError, WorkspaceError
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.atomic import write_json
from laserbatch.pipeline.storage.figures import GateFigures, PoolsUsed, ShardRecord, SideFigures
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.pipeline.storage.workspace import Workspace

DAY = datetime.date(2025, 3, 1)
UTC = datetime.UTC


@pytest.fixture
def world(tmp_path):
    """Tables of two users and an item, and a configuration."""
    write_tables(tmp_path)
    (tmp_path / "laserbatch.yaml").write_text("workspace: workspace\ntables: {path: tables}\n")
    return tmp_path


def write_tables(folder, moods=("calm", "loud"), days=(27, 28)):
    """Write users with `moods`, the first of whom liked an item on `days` of February."""
    (folder / "tables").mkdir(exist_ok=True)
    start = datetime.datetime(2025, 2, 1, tzinfo=UTC)
    users = [f"u{number}" for number in range(len(moods))]
    tables = {
        "users": {"user_id": users, "mood": list(moods), "created_at": [start] * len(users)},
        "items": {"item_id": ["i0"], "title": ["The Pier"]},
        "interactions": {
            "user_id": ["u0"] * len(days),
            "item_id": ["i0"] * len(days),
            "timestamp": [start + datetime.timedelta(days=day - 1) for day in days],
        },
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / "tables" / f"{name}.parquet")


def opened(world, date=DAY, **options):
    return open_night(load_settings(world / "laserbatch.yaml"), date, **options)


def done(night, policy="if-newer"):
    """Finish and publish a night like `nightly`, without texts."""
    night.manifest.pools_built = {}
    with night.pools.publish(night.run.run_id, make_current=False):
        pass
    finish_night(night)
    publish_night(night, policy)
    return night


def test_a_night_builds_on_the_newest_run_that_is_not_of_a_later_date(world):
    night = done(opened(world))
    assert night.previous is None
    after, before = DAY + datetime.timedelta(days=2), DAY - datetime.timedelta(days=1)
    later = done(opened(world, after))
    assert (later.previous.run_id, later.manifest.generation.pools.version) == (night.run.run_id, night.run.run_id)
    backfilled = opened(world, before)
    assert backfilled.previous is None and backfilled.manifest.generation.pools.version is None
    between = opened(world, DAY + datetime.timedelta(days=1))
    assert (between.previous.run_id, between.manifest.generation.pools.version) == (night.run.run_id, night.run.run_id)


def test_of_runs_of_one_date_that_of_the_same_settings_is_built_on_else_the_last(tmp_path):
    workspace = Workspace.open(tmp_path / "ws")
    ids = ("2025-02-28-bbbbbbbb", "2025-03-01-aaaaaaaa", "2025-03-01-cccccccc", "2025-03-01-bbbbbbbb")
    for finished_s, run_id in enumerate(ids):
        workspace.run(run_id).root.mkdir(parents=True)
        workspace.run(run_id).success_path.touch()
        os.utime(workspace.run(run_id).success_path, (finished_s, finished_s))
    workspace.run("2025-03-02-bbbbbbbb").root.mkdir()  # an unfinished run
    expected = {"2025-03-03-aaaaaaaa": "2025-03-01-aaaaaaaa", "2025-03-03-dddddddd": "2025-03-01-bbbbbbbb"}
    assert {run_id: earlier_runs(workspace, run_id)[-1].run_id for run_id in expected} == expected
    assert earlier_runs(workspace, "2025-03-01-aaaaaaaa-2")[-1].run_id == "2025-03-01-aaaaaaaa"
    assert earlier_runs(workspace, "2025-02-28-bbbbbbbb") == []


def test_a_night_builds_on_its_own_configuration_although_another_runs_unless_that_follows_it(tmp_path):
    workspace = Workspace.open(tmp_path / "ws")
    ids = ("2025-03-01-aaaaaaaa", "2025-03-01-bbbbbbbb", "2025-03-02-bbbbbbbb")
    for run_id, before in zip(ids, ([], [ids[0]], [ids[1], ids[0]]), strict=True):
        write_json({"ancestor_run_ids": before}, workspace.run(run_id).manifest_path)
        workspace.run(run_id).success_path.touch()
    assert earlier_runs(workspace, "2025-03-02-aaaaaaaa")[-1].run_id == ids[0]
    write_json({"ancestor_run_ids": [ids[0]]}, workspace.run(ids[2]).manifest_path)  # edited, and edited back
    assert earlier_runs(workspace, "2025-03-03-aaaaaaaa")[-1].run_id == ids[2]


def test_an_older_date_is_neither_published_nor_drafted_from(world, capsys):
    night = done(opened(world))
    older = done(opened(world, DAY - datetime.timedelta(days=1)))
    assert older.run.is_finished
    assert f"not published: run {night.run.run_id}, of a later date, stays published" in capsys.readouterr().err
    assert night.workspace.publication.run().run_id == night.run.run_id == night.pools.current_version()
    (world / "laserbatch.yaml").write_text("workspace: workspace\ntables: {path: tables}\npools: {scope: group}\n")
    same_date = done(opened(world))
    assert night.workspace.publication.run().run_id == same_date.run.run_id == night.pools.current_version()
    publishing.publish_run(night.workspace, night.run)
    said = capsys.readouterr().err
    assert f"no longer {night.run.run_id}" not in said, "the configuration was edited"
    assert f"no longer {same_date.run.run_id}, which has other settings" in said


def test_an_older_date_is_published_where_that_is_asked_for_and_rolled_back_from(world):
    newer, older = done(opened(world)), done(opened(world, DAY - datetime.timedelta(days=1)), "always")
    workspace = older.workspace
    assert workspace.publication.run().run_id == older.run.run_id == older.pools.current_version()
    workspace.publication.roll_back()
    assert workspace.publication.run().run_id == newer.run.run_id
    assert workspace.publication.rolled_back() == [older.run.run_id]


def test_what_was_taken_back_is_not_built_on_nor_published_by_itself(world, capsys):
    first, second = done(opened(world)), done(opened(world, DAY + datetime.timedelta(days=1)))
    second.workspace.publication.roll_back()
    publish_night(second)
    assert f"not published: run {second.run.run_id} was rolled back" in capsys.readouterr().err
    assert second.workspace.publication.run().run_id == first.run.run_id
    third = opened(world, DAY + datetime.timedelta(days=2))
    assert third.previous.run_id == first.run.run_id
    publish_night(second, "always")
    assert (
        second.workspace.publication.rolled_back() == []
        and second.workspace.publication.run().run_id == second.run.run_id
    )


def test_nothing_of_what_was_taken_back_is_used(world, capfd):
    days = [DAY + datetime.timedelta(days=number) for number in range(5)]
    first, second = done(opened(world, days[0])), done(opened(world, days[1]))
    workspace = second.workspace
    begun, unseen = opened(world, days[2]), done(opened(world, days[3]), "never")
    assert (
        begun.previous.run_id == second.run.run_id == begun.manifest.generation.pools.version == unseen.previous.run_id
    )

    run_here(capfd, "runs", "rollback", "--workspace", str(workspace.root))
    assert first.pools.current_version() == first.run.run_id
    for before in (begun, unseen):  # other runs of these dates, built on the published one
        again = opened(world, before.date)
        assert (again.run.run_id, again.previous.run_id) == (f"{before.run.run_id}-2", first.run.run_id)
        assert again.manifest.generation.pools.version == first.run.run_id
    done(opened(world, days[4]))  # its pools are current, but of a later date
    again = opened(world, days[2], force=True)
    assert again.manifest.generation.pools.version == first.run.run_id
    again.manifest.generation.pools = PoolsUsed(second.run.run_id)  # the pools of its beginning, before the rollback
    again.manifest.save()
    again = opened(world, days[2])
    assert again.manifest.generation.pools.version is None


def test_pools_of_what_was_taken_back_do_not_stay_current(world, capfd):
    first, second = done(opened(world)), done(opened(world, DAY + datetime.timedelta(days=1)))
    first.pools.drop(first.run.run_id)
    run_here(capfd, "runs", "rollback", "--workspace", str(first.workspace.root))
    assert first.pools.current_version() is None
    first.pools.use(second.run.run_id)  # made current by name; nights skip it all the same
    assert opened(world, DAY + datetime.timedelta(days=2)).manifest.generation.pools.version is None


def test_a_night_drafts_from_the_pools_of_its_own_configuration_unless_others_were_chosen(world):
    own = done(opened(world))
    config = world / "laserbatch.yaml"
    config.write_text((settings := config.read_text()) + "pools: {scope: group}\n")
    other = done(opened(world))
    config.write_text(settings)
    next_date = DAY + datetime.timedelta(days=1)
    assert (
        new_night(load_settings(config), own.workspace, next_date).manifest.generation.pools.version == own.run.run_id
    )
    own.workspace.publication.publish(own.run.run_id)
    own.pools.use(other.run.run_id)
    assert opened(world, next_date).manifest.generation.pools.version == other.run.run_id


def test_pools_of_a_held_run_are_not_drafted_from_after_the_run_was_removed(world):
    first = done(opened(world))
    held = opened(world, DAY + datetime.timedelta(days=1))
    with held.pools.publish(held.run.run_id, make_current=False):
        pass
    held.run.finish(is_held=True)
    done(opened(world, DAY + datetime.timedelta(days=3)))
    rmtree(held.run.root)
    between = opened(world, DAY + datetime.timedelta(days=2))  # the current pools are of a later date
    assert between.manifest.generation.pools.version == first.run.run_id


def test_a_backfill_goes_from_each_night_to_the_next_and_publishes_its_last_when_asked(world, capfd, monkeypatch):
    newest = done(opened(world, DAY + datetime.timedelta(days=9)))
    (world / "laserbatch.yaml").write_text("workspace: workspace\ntables: {path: tables}\npools: {scope: group}\n")
    other = done(opened(world, DAY + datetime.timedelta(days=1)))  # other settings, and a date within the range
    (world / "laserbatch.yaml").write_text("workspace: workspace\ntables: {path: tables}\n")
    fails_on = {DAY + datetime.timedelta(days=2)}

    def night(settings, date, redo, policy, base_run):
        if date in fails_on:
            raise WorkspaceError("no")
        night = open_night(settings, date, redo=redo, base_run=base_run)
        return night if night.run.is_finished else done(night, policy)

    monkeypatch.setattr(nights, "run_night", night)
    arguments = ("backfill", "--config", str(world / "laserbatch.yaml"), "--from", "2025-03-01", "--to", "2025-03-04")
    stopped = run_here(capfd, *arguments, "--json")
    assert stopped.returncode == 3 and json.loads(stopped.stdout)["error"] == "the night of 2025-03-03: no"
    assert "stopped at 2025-03-03, 2 of 4 nights done" in stopped.stderr
    fails_on.clear()
    ended = json.loads((unpublished := run_here(capfd, *arguments, "--json")).stdout)
    assert ended["published"] == newest.run.run_id and "--publish was not given" in unpublished.stderr
    runs = [newest.workspace.run(row["run_id"]) for row in ended["nights"]]
    manifests = [run.load_manifest() for run in runs]
    assert [manifest.origin.previous_run_id for manifest in manifests] == [None, *(run.run_id for run in runs[:-1])]
    assert manifests[-1].origin.ancestor_run_ids == [run.run_id for run in runs[-2::-1]]
    assert [manifest.generation.pools.version for manifest in manifests] == [None, *(run.run_id for run in runs[:-1])]
    assert other.run.run_id not in {run.run_id for run in runs}
    assert json.loads(run_here(capfd, *arguments, "--json", "--publish").stdout)["published"] == runs[-1].run_id
    assert newest.workspace.publication.run().run_id == runs[-1].run_id == newest.pools.current_version()
    newest.workspace.publication.roll_back()
    repeated = run_here(capfd, *arguments, "--json", "--publish")
    assert f"not published: run {runs[-1].run_id} was rolled back" in " ".join(repeated.stderr.split())
    assert json.loads(repeated.stdout)["published"] == newest.run.run_id
    longer = json.loads(run_here(capfd, *arguments[:-1], "2025-03-05", "--json").stdout)
    fifth = newest.workspace.run(longer["nights"][-1]["run_id"]).load_manifest()
    assert fifth.origin.previous_run_id == fifth.generation.pools.version == runs[-2].run_id


def test_words_that_users_may_share_are_warned_about_once_a_run(world, capsys):
    sampling = (
        "decoding: {verifier: rsd, temperature: 1, drafters: [pool, trained], "
        "drafter_options: {trained: {models: [small]}}}"
    )
    lossless = ("decoding: {verifier: greedy}", sampling)
    for options, is_warned in (("", True), ("pools: {min_support: 5}", False), *((rule, False) for rule in lossless)):
        (world / "laserbatch.yaml").write_text(f"workspace: workspace\ntables: {{path: tables}}\n{options}\n")
        opened(world)
        warning = "from the next night on, users' texts are drafted"  # the first one has no pools
        assert (warning in " ".join(capsys.readouterr().err.split())) == is_warned
        opened(world)  # the run is continued
        assert "min_support" not in capsys.readouterr().err


@pytest.mark.parametrize("step", ["write_report", "finish", "use", "publish", "collect_pools"])
def test_a_night_that_was_killed_at_its_end_is_published_by_the_same_command(world, monkeypatch, step):
    night = opened(world)
    owners = {
        "write_report": publishing,
        "use": type(night.pools),
        "publish": type(night.workspace.publication),
        "finish": type(night.run),
    }

    def killed(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owners.get(step, stages), step, killed)
        with pytest.raises(KeyboardInterrupt):
            done(night)
    # If the run is not finished, all earlier stages find their work done.
    again = run_night(night.settings, DAY) if night.run.is_finished else done(opened(world))
    assert again.run.run_id == night.run.run_id
    assert night.workspace.publication.run().run_id == night.run.run_id == night.pools.current_version()
    assert night.run.report_path.exists()


@pytest.mark.parametrize("step", ["write_report", "finish", "use", "publish"])
def test_publishing_a_held_run_goes_on_where_it_was_killed(world, monkeypatch, step):
    night = opened(world)
    with night.pools.publish(night.run.run_id, make_current=False):
        pass
    night.manifest.judgement.gates = [GateFigures("quarantine", "user", 1.0)]
    with pytest.raises(RunHeld):
        finish_night(night)
    owners = {"use": type(night.pools), "publish": type(night.workspace.publication), "finish": type(night.run)}

    def killed(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owners.get(step, publishing), step, killed)
        with pytest.raises(KeyboardInterrupt):
            publishing.force_publish(night.workspace, night.run.run_id)
    assert night.workspace.publication.run() is None
    publishing.force_publish(night.workspace, night.run.run_id)
    assert night.workspace.publication.run().run_id == night.run.run_id == night.pools.current_version()
    assert not night.run.held_path.exists() and night.run.load_manifest().status == "success"


def test_old_pools_that_cannot_be_removed_fail_no_night(world, monkeypatch, caplog):
    def busy(*_, **__):
        raise OSError(errno.EBUSY, "Device or resource busy", "pools/.nfs01")

    monkeypatch.setattr(stages, "collect_pools", busy)
    night = done(opened(world))
    assert night.workspace.publication.run().run_id == night.run.run_id
    assert "old pools were not removed; the next night tries again: pools/.nfs01" in caplog.text


def test_what_is_damaged_of_earlier_nights_is_named_and_passed_over(world, caplog):
    """No damaged file of another night stops a night: manifests, quarantine, receipts, step costs."""
    first = opened(world)
    stats = DecodingStats(num_texts=10, num_tokens=2000, wall_s=10.0)
    first.manifest.generation.sides = {"user": SideFigures(1, 1, 0, 0, 0, {}, {}, [], stats)}
    done(first)
    second, workspace = done(opened(world, DAY + datetime.timedelta(days=1))), first.workspace
    damaged = [
        second.run.manifest_path,
        second.run.quarantine_path("user"),
        workspace.root / "forgotten" / "2025-03-01T00-00-00Z-1a2b3c4d.json",
        workspace.step_costs_folder / "1a2b3c4d.json",
    ]
    for path in damaged:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{")
    third = opened(world, DAY + datetime.timedelta(days=2))
    assert third.previous.run_id == second.run.run_id
    assert unchanged_pools(third, second.run.run_id) == {}
    assert last_speed(third, SIDES) == 200  # from the first night's manifest
    assert known_step_cost(second) is None
    assert NightPlanner(third, third.run, third.settings.decoding)._rules("user").unusable is None
    measure(third.manifest, third.run, third.previous)
    assert not workspace.publication.not_built_on()
    done(third)
    for path in damaged:
        assert sum(str(path) in record.getMessage() for record in caplog.records) == 1, path


def test_a_lost_file_of_texts_is_named_with_its_entities(world, tmp_path, caplog):
    first = done(opened(world))
    files = {"00000": 22, "carried": 3, "carried-00000": 2, "stale": 4, "waiting": 6}
    for name, num_users in files.items():
        record = ShardRecord(name, f"knowledge/user/{name}.parquet", num_users, "")
        write_json(asdict(record), first.run.root / "shards" / "user" / f"{name}.json")
    second = opened(world, DAY + datetime.timedelta(days=1))
    second.manifest.generation.pools = PoolsUsed()
    plan_night(second, RunFolder(tmp_path / "plan"))
    for name, num_users in files.items():
        assert f"knowledge/user/{name}.parquet is missing: its {num_users} users have no earlier text" in caplog.text


def test_a_pointer_that_cannot_be_followed_is_replaced(world, capsys):
    night = done(opened(world))
    (night.workspace.root / "published.json").write_text('{"run_id": "2025-04-01-gone"}')
    publish_night(night)
    assert night.workspace.publication.run().run_id == night.run.run_id
    assert "2025-04-01-gone, which is not there" in " ".join(capsys.readouterr().err.split())


def test_a_run_goes_on_when_its_tables_only_got_what_came_later(world):
    night = opened(world)
    write_tables(world, days=(27, 28, 31))
    assert opened(world).run.run_id == night.run.run_id
    write_tables(world, moods=("calm", "quiet"), days=(26, 27, 28))
    with pytest.raises(WorkspaceError, match=r"started from other inputs \(users, interactions changed since\)"):
        opened(world)


def test_a_finished_date_is_done_again_only_where_its_tables_changed(world):
    night = done(opened(world))
    assert opened(world, redo=True).changed_inputs == () and opened(world, redo=True).run.run_id == night.run.run_id
    write_tables(world, moods=("calm", "quiet"))
    assert opened(world).changed_inputs == ("users",) and opened(world).run.run_id == night.run.run_id
    redone = opened(world, redo=True)
    assert redone.run.run_id == f"{night.run.run_id}-2" and not redone.manifest.origin.force
    assert redone.previous.run_id == night.run.run_id
    done(redone)
    assert opened(world).run.run_id == redone.run.run_id and opened(world).changed_inputs == ()
    assert redone.workspace.publication.run().run_id == redone.run.run_id


def test_a_forced_run_is_another_one_and_gone_on_with_by_either_command(world):
    first = opened(world)
    forced = opened(world, force=True)
    assert (first.manifest.origin.force, forced.manifest.origin.force) == (False, True)
    assert forced.run.run_id == f"{first.run.run_id}-2"
    assert [opened(world, force=force).run.run_id for force in (True, False)] == [forced.run.run_id] * 2
    done(forced)
    assert opened(world, force=True).run.run_id == f"{first.run.run_id}-3"


def test_a_date_on_which_nobody_is_known_is_refused(world):
    columns = {"item_id": ["i0"], "title": ["x"], "created_at": [datetime.datetime(2025, 2, 1, tzinfo=UTC)]}
    pq.write_table(pa.table(columns), world / "tables" / "items.parquet")
    with pytest.raises(TableError, match=r"neither a user nor an item of .*tables is known at the end of 2020-01-01"):
        opened(world, datetime.date(2020, 1, 1))
    assert not (world / "workspace").exists()


def test_a_run_is_read_without_settings_that_this_version_does_not_have(world, capsys):
    night = opened(world)
    night.manifest.origin.settings["ctr"] |= {"label": "rating >= 3", "of_old": 1}
    night.manifest.origin.settings_hash = "another"
    night.manifest.save()
    settings = open_run(load_settings(world / "laserbatch.yaml"), night.run.run_id).settings
    assert settings.ctr.label == "rating >= 3"
    assert "are ignored: ctr.of_old" in capsys.readouterr().err


def test_ctr_models_are_trained_as_the_configuration_says_and_without_one_as_the_run_does(world, tmp_path):
    night = opened(world)
    changed = tmp_path / "changed.yaml"
    changed.write_text("ctr: {num_seeds: 4}")
    opened_by = {path: opened_for_ctr(path, world / "workspace", night.run.run_id)[1] for path in (changed, None)}
    assert [options.num_seeds for options in opened_by.values()] == [4, night.settings.ctr.num_seeds]
    assert night.settings.ctr.num_seeds != 4
