"""`laserbatch runs` lists, compares, publishes, rolls back and removes runs, here with planted texts."""

import datetime
import json

import pyarrow as pa
import pytest
from manifests import manifest_of
from night_world import run_here

from laserbatch.jobs.stages.attempt import newest_attempt, newest_edition
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.workspace import Workspace

SAME = "t-p-m-d-a-h"  # the parts of a fingerprint


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace.open(tmp_path / "workspace")


def run_of(workspace, day, texts=(), is_finished=True, previous=None, failed=(), settings=None) -> str:
    """Write a run of a day in March. `texts`: (entity, text, fingerprint, day of the run that wrote it)."""
    settings = settings or {}
    root = workspace.root / "runs"
    manifest = manifest_of(root, datetime.date(2025, 3, day), settings)
    run = workspace.run(manifest.run_id)
    manifest.path, manifest.origin.previous_run_id = run.manifest_path, previous
    manifest.status = "success" if is_finished else "running"
    columns = list(zip(*texts, strict=True)) or [[]] * 4
    names = ("entity_id", "text", "fingerprint", "run_id")
    knowledge = pa.table(
        {name: pa.array(map(str, column), pa.string()) for name, column in zip(names, columns, strict=True)}
    )
    rows = [QuarantineRow.of(entity, "user", reason) for entity, reason in failed]
    record = run.shards("user").write("00000", knowledge, rows)
    run.merge_quarantine("user", [record], [], pa.string())
    manifest.save()
    if is_finished:
        run.finish()
    return run.run_id


def run_runs(workspace, capfd, *arguments, code=0):
    done = run_here(capfd, "runs", *arguments, "--workspace", str(workspace.root), "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_a_diff_names_who_changed_and_why_who_appeared_and_who_went(workspace, capfd):
    before = run_of(workspace, 1, [
        ("kept", "x", SAME, 1), ("rated", "x", SAME, 1), ("moved", "x", SAME, 1), ("alike", "x", SAME, 1),
        ("forced", "x", SAME, 1), ("gone", "x", SAME, 1), ("broken", "x", SAME, 1),
    ], failed=[("mended", "too-long")])  # fmt: skip
    after = run_of(workspace, 2, [
        ("new", "y", SAME, 2), ("mended", "y", SAME, 2), ("forced", "y", SAME, 2), ("alike", "x", "t-p-m-d-a-j", 2),
        ("moved", "y", "t-p-m-d-b-j", 2), ("rated", "y", "t-p-m-d-a-j", 2), ("kept", "x", SAME, 1),
    ], previous=before, failed=[("broken", "unparsable")], settings={"decoding": {"top_k": 3}})  # fmt: skip
    workspace.publication.publish(after)
    for arguments in ((before, after), (before,), ()):  # default: the published run, and the run that it was built on
        diff = run_runs(workspace, capfd, "diff", *arguments)
        assert (diff["before"], diff["after"], diff["settings"]) == (before, after, {"decoding.top_k": [None, 3]})
        users = diff["users"]
        counts = {name: value for name, value in users.items() if name.startswith("num")}
        assert counts == {
            "num_unchanged": 1,
            "num_regenerated_same": 1,
            "num_changed": 3,
            "num_added": 2,
            "num_removed": 2,
        }
        assert users["reasons"] == {"written again": 1, "attributes+history": 1, "history": 1}
        assert [tuple(row[key] for key in ("entity_id", "reason", "before", "after")) for row in users["changed"]] == [
            ("forced", "written again", "x", "y"),
            ("moved", "attributes+history", "x", "y"),
            ("rated", "history", "x", "y"),
        ]
        assert [(entity["entity_id"], entity["reason"]) for entity in users["added"] + users["removed"]] == [
            ("mended", "was in quarantine: too-long"),
            ("new", "new"),
            ("broken", "is in quarantine: unparsable"),
            ("gone", "no longer in the tables"),
        ]
        assert diff["items"]["num_unchanged"] == 0
    assert len(run_runs(workspace, capfd, "diff", "--limit", "1")["users"]["changed"]) == 1
    shown = run_here(capfd, "runs", "diff", "--texts", "--workspace", str(workspace.root))
    assert "user moved changed: attributes+history\n  - x\n  + y" in shown.stderr
    assert "runs are" in run_runs(workspace, capfd, "diff", before, "2025-03-09-gone", code=3)["error"]
    workspace.run(before).manifest_path.unlink()
    for arguments in (("show", before), ("diff", before, after), ("publish", before)):
        error = run_runs(workspace, capfd, *arguments, code=3)["error"]
        assert "manifest.json is missing" in error and "run 2025-03-01 again" in error


def test_a_run_that_lost_a_file_of_texts_is_neither_compared_nor_published(workspace, capfd):
    first, second = run_of(workspace, 1, [("u", "x", SAME, 1)]), run_of(workspace, 2, [("u", "x", SAME, 1)])
    for run_id in (first, second):
        workspace.publication.publish(run_id)
    lost = workspace.run(first).knowledge_folder("user") / "00000.parquet"
    lost.unlink()
    for arguments in (("diff", first, second), ("diff", second, first), ("publish", first), ("rollback",)):
        error = run_runs(workspace, capfd, *arguments, code=3)["error"]
        assert f"{lost} is missing; expected the texts of 1 users" in error and f"move {lost.parents[2]} away" in error
    assert workspace.publication.run_id() == second


def test_a_run_whose_texts_were_changed_is_neither_compared_nor_published(workspace, capfd):
    first, second = run_of(workspace, 1, [("u", "x", SAME, 1)]), run_of(workspace, 2, [("u", "y", SAME, 1)])
    for run_id in (first, second):
        workspace.publication.publish(run_id)
    changed = workspace.run(first).knowledge_folder("user") / "00000.parquet"
    content = bytearray(changed.read_bytes())
    content[8] ^= 1
    changed.write_bytes(content)
    for arguments in (("publish", first), ("rollback",), ("diff", first, second)):
        assert f"{changed} is damaged or was changed" in run_runs(workspace, capfd, *arguments, code=3)["error"]
    assert workspace.publication.run_id() == second


def test_listed_are_state_mark_and_size_also_of_what_cannot_be_read(workspace, capfd):
    ids = [run_of(workspace, 1), run_of(workspace, 2), run_of(workspace, 3, is_finished=False), run_of(workspace, 4)]
    workspace.run(ids[3]).manifest_path.write_text("{")
    for run_id in ids[:2]:
        workspace.publication.publish(run_id)
    workspace.publication.roll_back()
    (workspace.root / "runs" / ".gone.1-ab.tmp").mkdir()  # the remains of a killed removal
    listed = run_runs(workspace, capfd, "list")["runs"]
    marks = [(row["state"], row["published"], row["rolled_back"]) for row in listed]
    assert marks == [
        ("finished", True, False),
        ("finished", False, True),
        ("unfinished", False, False),
        ("damaged", False, False),
    ]
    assert all(row["num_bytes"] > 0 for row in listed)
    table = run_here(capfd, "runs", "list", "--workspace", str(workspace.root)).stdout
    assert f"*  {ids[0]}" in table and "rolled back" in table
    assert "framework" not in table and "items  " not in table
    assert run_runs(workspace, capfd, "show")["run_id"] == ids[0]


def test_what_was_published_is_rolled_back_run_by_run_and_published_again(workspace, capfd):
    ids = [run_of(workspace, day) for day in (1, 2, 3)]
    for run_id in ids:
        run_runs(workspace, capfd, "publish", run_id)
    assert run_runs(workspace, capfd, "rollback") == {"published": ids[1], "rolled_back": ids[2]}
    assert run_runs(workspace, capfd, "rollback") == {"published": ids[0], "rolled_back": ids[1]}
    assert "of the runs that were published before" in run_runs(workspace, capfd, "rollback", code=3)["error"]
    assert workspace.publication.rolled_back() == [ids[2], ids[1]] and workspace.publication.run().run_id == ids[0]
    assert run_runs(workspace, capfd, "publish", ids[2]) == {"published": ids[2], "published_before": ids[0]}
    assert workspace.publication.rolled_back() == [ids[1]]
    unfinished = run_of(workspace, 4, is_finished=False)
    assert (
        "`laserbatch nightly --date 2025-03-04` finishes it"
        in run_runs(workspace, capfd, "publish", unfinished, code=3)["error"]
    )


def test_a_published_run_that_was_deleted_by_hand_is_rolled_back_from(workspace, capfd):
    ids = [run_of(workspace, day) for day in (1, 2)]
    for run_id in ids:
        workspace.publication.publish(run_id)
    (workspace.run(ids[1]).success_path).unlink()
    assert run_runs(workspace, capfd, "rollback")["published"] == ids[0]


def test_a_rolled_back_run_whose_folder_is_away_does_not_lend_its_id_to_a_new_run(workspace, tmp_path):
    ids, date = [run_of(workspace, day) for day in (1, 2)], datetime.date(2025, 3, 2)
    for run_id in ids:
        workspace.publication.publish(run_id)
    workspace.publication.roll_back()
    workspace.run(ids[1]).root.rename(tmp_path / "away")
    assert newest_attempt(workspace, date, {}, {}).run.run_id == f"{ids[1]}-2"
    assert newest_edition(workspace, date, {}) == 1


def test_the_newest_usable_run_of_each_configuration_that_still_runs_is_kept(workspace, capfd):
    b = {"seed": 1}
    own, held = run_of(workspace, 1), run_of(workspace, 3, is_finished=False)
    workspace.run(held).finish(is_held=True)
    others = [run_of(workspace, day, settings=b) for day in (1, 2, 3)]
    assert run_runs(workspace, capfd, "gc", "--keep", "2")["kept"].keys() == {own, held, others[2]}


def test_old_runs_are_removed_but_none_that_somebody_needs(workspace, capfd):
    ids = {day: run_of(workspace, day) for day in (1, 2, 3, 4, 7, 8)}
    ids[5] = run_of(workspace, 5, is_finished=False, previous=ids[4])
    ids[9] = run_of(workspace, 9)
    for day in (2, 3, 9, 8):
        workspace.publication.publish(ids[day])
    workspace.publication.roll_back()  # day 8
    workspace.publication.roll_back()  # day 9

    def run_ids():
        return [run.run_id for run in workspace.runs()]

    (workspace.root / "runs" / ".gone.1-ab.tmp").mkdir()
    elsewhere = workspace.run(ids[1]).root.rename(workspace.root.with_name("elsewhere"))  # moved to another disk
    workspace.run(ids[1]).root.symlink_to(elsewhere)
    before = run_ids()
    cleaned = run_runs(workspace, capfd, "gc", "--keep", "1", "--dry-run")
    assert run_ids() == before and cleaned["num_bytes"] > 0 and cleaned["num_leftovers"] == 1
    assert cleaned["removed"] == [ids[1], ids[8]]
    assert cleaned["kept"] == {
        ids[2]: "a rollback publishes it",
        ids[3]: "published",
        ids[4]: f"run {ids[5]} is built on it",
        ids[5]: "not finished",
        ids[7]: "the next night builds on it",
        ids[9]: "among the newest 1",
    }
    assert run_runs(workspace, capfd, "gc", "--keep", "1")["removed"] == cleaned["removed"]
    assert not elsewhere.exists() and not workspace.run(ids[1]).root.is_symlink()
    assert run_ids() == sorted(cleaned["kept"]) and not list((workspace.root / "runs").glob(".*"))
    assert run_runs(workspace, capfd, "gc", "--keep", "1")["num_bytes"] == 0
    more = run_runs(workspace, capfd, "gc", "--keep", "1", "--unfinished")["removed"]
    assert more == []  # newer than what is kept
    with workspace.lock():
        assert run_runs(workspace, capfd, "gc", code=5)["kind"] == "WorkspaceBusy"
