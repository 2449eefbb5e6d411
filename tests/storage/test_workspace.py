"""The workspace: version, lock, published pointer."""

import datetime
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from manifests import manifest_of

from laserbatch.jobs.stages.attempt import build_on
from laserbatch.pipeline.errors import WorkspaceBusy, WorkspaceError
from laserbatch.pipeline.storage.atomic import read_json, remove_folder, write_json
from laserbatch.pipeline.storage.workspace import Workspace

HOLD = """
import sys
from laserbatch.pipeline.storage.workspace import Workspace
with Workspace.open(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""

TRY = """
import sys
from laserbatch.pipeline.errors import WorkspaceBusy
from laserbatch.pipeline.storage.workspace import Workspace
sys.stdin.readline()
try:
    with Workspace.open(sys.argv[1]).lock():
        print("got it", flush=True)
        sys.stdin.readline()
except WorkspaceBusy:
    print("busy", flush=True)
"""


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace.open(tmp_path / "workspace")


def start(script: str, workspace: Workspace) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(workspace.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def finish(workspace: Workspace, run_id: str, previous: str | None = None) -> None:
    write_json({"format_version": 1, "previous_run_id": previous}, workspace.run(run_id).manifest_path)
    workspace.run(run_id).finish()


def test_opening_twice_is_the_same_workspace(workspace):
    assert Workspace.open(workspace.root, create=False) == workspace
    assert workspace.publication.run() is None
    assert workspace.runs() == []


def test_what_is_no_workspace_is_refused(tmp_path):
    with pytest.raises(WorkspaceError, match="it is missing or empty"):
        Workspace.open(tmp_path / "none", create=False)
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(WorkspaceError, match="not a workspace"):
        Workspace.open(tmp_path)
    with pytest.raises(WorkspaceError, match="is a file"):
        Workspace.open(tmp_path / "thesis.tex")


def test_another_version_is_refused_and_named(workspace):
    write_json({"format_version": 7}, workspace.root / "workspace.json")
    with pytest.raises(WorkspaceError, match="version 7; this laserbatch reads version 1"):
        Workspace.open(workspace.root)


@pytest.mark.parametrize("damage", ['{"format', None])
def test_a_damaged_or_lost_version_is_mended_as_its_message_says(workspace, damage):
    workspace.run("2025-03-01-1a2b3c4d").root.mkdir(parents=True)
    file = workspace.root / "workspace.json"
    file.unlink() if damage is None else file.write_text(damage)
    with pytest.raises(WorkspaceError) as refused:
        Workspace.open(workspace.root)
    file.write_text(re.search(r"or write (\{.*?\}) to", str(refused.value))[1])
    assert len(Workspace.open(workspace.root).runs()) == 1


@pytest.mark.parametrize("damage", [None, '{"run', "[]", "{}", '{"run_id": "../x"}', '{"run_id": "2025-04-01-gone"}'])
def test_a_pointer_that_is_lost_or_damaged_is_restored_with_all_that_it_knew(workspace, damage):
    assert workspace.publication.repair() is None
    first, second, bad = (f"2025-03-0{day}-aaaaaaaa" for day in (1, 2, 3))
    for run_id in (first, second, bad):
        finish(workspace, run_id)
        workspace.publication.publish(run_id)
    workspace.publication.roll_back()
    pointer = workspace.root / "published.json"
    pointer.unlink() if damage is None else pointer.write_text(damage)
    if damage is None or "gone" not in damage:  # a pointer that names a run is believed
        assert workspace.publication.run_id() == second and workspace.publication.rolled_back() == [bad]
        assert workspace.publication.repair() == workspace.publication.run().run_id == second
        assert [run.run_id for run in workspace.publication.earlier_runs()] == [
            first
        ] and workspace.publication.rolled_back() == [bad]
        remove_folder(workspace.run(second).root)  # as if by hand
        assert workspace.publication.repair() == first
    assert workspace.publication.repair() is None


@pytest.mark.parametrize("damage", [{"before": None}, {"rolled_back": {}}, {"before": [5]}, {"rolled_back": ["../x"]}])
def test_a_pointer_with_damaged_lists_is_read_from_its_copy(workspace, damage):
    first, second = "2025-03-01-aaaaaaaa", "2025-03-02-aaaaaaaa"
    for run_id in (first, second):
        finish(workspace, run_id)
        workspace.publication.publish(run_id)
    write_json({"run_id": second, "before": [], "rolled_back": []} | damage, workspace.root / "published.json")
    assert workspace.publication.rolled_back() == [] and workspace.publication.not_built_on() == set()
    assert workspace.publication.roll_back() == first and workspace.publication.rolled_back() == [second]


def test_rolled_back_runs_in_a_pointer_of_version_0_1_0_stay_rolled_back(workspace):
    for run_id in ("2025-03-01-aaaaaaaa", "2025-03-02-aaaaaaaa"):
        finish(workspace, run_id)
    pointer = {"run_id": "2025-03-01-aaaaaaaa", "before": [], "withdrawn": ["2025-03-02-aaaaaaaa"]}
    write_json(pointer, workspace.root / "published.json")
    assert workspace.publication.rolled_back() == ["2025-03-02-aaaaaaaa"]
    workspace.publication.publish("2025-03-02-aaaaaaaa")
    assert "withdrawn" not in read_json(workspace.root / "published.json") and workspace.publication.rolled_back() == []


def test_a_full_disk_does_not_keep_the_lock_from_who_makes_room(workspace, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with workspace.lock(), pytest.raises(WorkspaceBusy), workspace.lock():
        pass


def test_a_held_lock_names_its_holder(workspace):
    holder = start(HOLD, workspace)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(WorkspaceBusy, match=rf"in use by pid {holder.pid} on {socket.gethostname()}"):
            workspace.lock().__enter__()
    finally:
        holder.communicate("")
    with workspace.lock():
        pass


def test_the_lock_of_a_killed_process_is_taken_over(workspace, caplog):
    holder = start(HOLD, workspace)
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with workspace.lock():
        assert (workspace.root / "LOCK").read_text() == f"pid {os.getpid()} on {socket.gethostname()}"
    assert f"left by pid {holder.pid}" in caplog.text
    assert (workspace.root / "LOCK").read_text() == ""


def test_of_two_processes_that_lock_at_once_one_gets_it(workspace):
    contenders = [start(TRY, workspace) for _ in range(2)]
    for contender in contenders:  # both have imported everything and wait for input
        contender.stdin.write("go\n")
        contender.stdin.flush()
    assert sorted(contender.stdout.readline() for contender in contenders) == ["busy\n", "got it\n"]
    for contender in contenders:
        contender.communicate("\n")


def test_the_lock_excludes_threads_of_the_same_process_too(workspace):
    outcome = []

    def attempt():
        try:
            with workspace.lock():
                outcome.append("got it")
        except WorkspaceBusy:
            outcome.append("busy")

    with workspace.lock():
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    assert outcome == ["busy"]


def test_an_error_under_the_lock_releases_it(workspace):
    with pytest.raises(RuntimeError), workspace.lock():
        raise RuntimeError
    with workspace.lock():
        pass


@pytest.mark.parametrize("content", ["", "pid", "\x00", "\x00\udcff"])
def test_whatever_a_killed_writer_left_in_the_lock_file_is_no_obstacle(workspace, content):
    (workspace.root / "LOCK").write_bytes(content.encode(errors="surrogateescape"))
    with workspace.lock():
        pass


def test_a_copy_without_times_keeps_the_order_in_which_editions_were_finished(workspace):
    first, second = "2025-03-01-0123abcd", "2025-03-01-0123abcd-2"
    for run_id in (first, second):
        finish(workspace, run_id)
    os.utime(workspace.run(second).success_path, (1, 1))
    assert [run.run_id for run in workspace.finished_runs()] == [first, second]
    workspace.run(second).success_path.write_text("")  # written by an earlier version: the file's time counts
    os.utime(workspace.run(second).success_path, (1, 1))
    assert [run.run_id for run in workspace.finished_runs()] == [second, first]


def test_a_run_finished_after_the_clock_was_set_back_is_the_newest_of_its_date(workspace, monkeypatch):
    ids = "2025-03-01-0123abcd", "2025-03-01-0123abcd-2"
    finish(workspace, ids[0])
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    finish(workspace, ids[1])
    assert [run.run_id for run in workspace.finished_runs()] == [*ids]


def test_a_run_sees_the_earlier_texts_of_its_own_settings_whichever_run_of_a_date_was_finished_last(workspace):
    own, other, tonight = "2025-03-01-0123abcd", "2025-03-01-99999999", "2025-03-02-0123abcd"
    for run_id in (own, other, tonight):
        finish(workspace, run_id)
    assert [run.run_id for run in workspace.runs_up_to(workspace.run(tonight))] == [other, own, tonight]


def test_a_run_sees_no_texts_of_another_configuration_that_runs_beside_its_own(workspace):
    before, own, tonight = "2025-03-01-99999999", "2025-03-02-0123abcd", "2025-03-05-0123abcd"
    others = "2025-03-02-99999999", "2025-03-03-99999999"  # the night of its own configuration failed on the third
    for run_id, previous in (before, None), (own, before), (others[0], before), (others[1], others[0]), (tonight, own):
        finish(workspace, run_id, previous)
    manifest = {"ancestor_run_ids": [own, before]}
    write_json(manifest, workspace.run(tonight).manifest_path)
    assert [run.run_id for run in workspace.runs_up_to(workspace.run(tonight))] == [before, own, tonight]


def test_only_a_finished_run_is_published(workspace):
    with pytest.raises(WorkspaceError, match="no _SUCCESS"):
        workspace.publication.publish("2025-03-01-aaaaaaaa")
    finish(workspace, "2025-03-01-aaaaaaaa")
    workspace.publication.publish("2025-03-01-aaaaaaaa")
    finish(workspace, "2025-03-02-aaaaaaaa")
    assert workspace.publication.run().run_id == "2025-03-01-aaaaaaaa"
    workspace.publication.publish("2025-03-02-aaaaaaaa")
    assert workspace.publication.run().run_id == "2025-03-02-aaaaaaaa"
    assert [run.run_id for run in workspace.runs()] == ["2025-03-01-aaaaaaaa", "2025-03-02-aaaaaaaa"]


def test_what_was_taken_back_and_what_was_built_on_it_unseen_is_not_built_on(workspace):
    ids = [f"2025-03-0{day}-aaaaaaaa" for day in range(1, 7)]
    first, bad, unseen, later, beside, damaged = ids
    for run_id, previous in zip(ids, (None, first, bad, unseen, first, bad), strict=True):
        finish(workspace, run_id, previous)
    workspace.run(damaged).manifest_path.write_text("{")
    workspace.publication.publish(first)
    workspace.publication.publish(bad)
    assert workspace.publication.not_built_on() == set()
    workspace.publication.roll_back()
    assert workspace.publication.not_built_on() == {bad, unseen, later}
    assert [run.run_id for run in workspace.finished_runs()] == [first, beside, damaged]
    workspace.publication.publish(unseen)  # `runs publish` overrules the rollback
    assert workspace.publication.not_built_on() == {bad}


def test_a_run_built_on_a_removed_run_that_was_built_on_a_rolled_back_one_is_not_built_on(workspace):
    first, bad, removed, built_on_it = (f"2025-03-0{day}-aaaaaaaa" for day in range(1, 5))
    finish(workspace, first)
    workspace.publication.publish(first)
    finish(workspace, bad, first)
    workspace.publication.publish(bad)
    manifest = manifest_of(workspace.root, datetime.date(2025, 3, 4), {})
    finish(workspace, removed, bad)
    build_on(manifest, workspace.run(removed))
    write_json(manifest.as_json(), workspace.run(built_on_it).manifest_path)
    workspace.run(built_on_it).finish()
    remove_folder(workspace.run(removed).root)
    assert workspace.publication.not_built_on() == set()
    workspace.publication.roll_back()
    assert workspace.publication.not_built_on() == {bad, removed, built_on_it}  # pools of a removed run may remain
    assert [run.run_id for run in workspace.finished_runs()] == [first]


def test_a_run_that_is_rolled_back_while_its_folder_is_away_comes_back_rolled_back(workspace, tmp_path):
    first, bad = "2025-03-01-aaaaaaaa", "2025-03-02-aaaaaaaa"
    for run_id in (first, bad):
        finish(workspace, run_id)
        workspace.publication.publish(run_id)
    workspace.run(bad).root.rename(tmp_path / "away")
    assert workspace.publication.roll_back() == first
    finish(workspace, "2025-03-03-aaaaaaaa", bad)  # built on `bad`
    (tmp_path / "away").rename(workspace.run(bad).root)
    assert workspace.publication.rolled_back() == [bad]
    assert [run.run_id for run in workspace.finished_runs()] == [first]


def test_a_pointer_to_nothing_is_an_error_not_an_empty_answer(workspace):
    write_json({"run_id": "2025-03-01-aaaaaaaa"}, workspace.root / "published.json")
    with pytest.raises(WorkspaceError, match=r"not there or not finished.*runs rollback"):
        workspace.publication.run()
    write_json({}, workspace.root / "published.json")
    with pytest.raises(WorkspaceError, match="has no run_id"):
        workspace.publication.run()


@pytest.mark.parametrize("run_id", ["", ".", "..", "../x", "a/b", "a b"])
def test_a_run_id_cannot_leave_the_workspace(workspace, run_id):
    with pytest.raises(WorkspaceError, match="not a run id"):
        workspace.run(run_id)
