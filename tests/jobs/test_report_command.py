"""`laserbatch report`: which run it draws, where it writes, what it refuses."""

import json

import pytest
import typer
from manifest_fixture import night_manifest
from typer.testing import CliRunner

from laserbatch.jobs.commands.report import report
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.atomic import write_json
from laserbatch.pipeline.storage.workspace import Workspace

app = typer.Typer()
app.command()(report)


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    """A workspace with two runs, of which the older is published."""
    made = Workspace.open(tmp_path / "ws")
    for run_id in ("2025-02-28-9c0de4f1", "2025-03-01-1a2b3c4d"):
        write_json(night_manifest() | {"run_id": run_id}, made.run(run_id).manifest_path)
        made.run(run_id).success_path.touch()
    made.publish("2025-02-28-9c0de4f1")
    return made


def test_published_run_is_drawn_by_default(workspace):
    done = CliRunner().invoke(app, ["-w", str(workspace.root), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    shown = json.loads(done.stdout)
    assert shown["run_id"] == "2025-02-28-9c0de4f1"
    assert "2025-02-28-9c0de4f1" in workspace.run("2025-02-28-9c0de4f1").report_path.read_text(encoding="utf-8")


def test_run_and_file_can_be_chosen(workspace, tmp_path):
    report(None, workspace.root, "2025-03-01-1a2b3c4d", tmp_path / "out" / "night.html", False)
    assert "Night of 1 March 2025" in (tmp_path / "out" / "night.html").read_text(encoding="utf-8")
    assert not workspace.run("2025-03-01-1a2b3c4d").report_path.exists()


def test_unknown_run_is_named_with_those_that_are_there(workspace):
    with pytest.raises(
        WorkspaceError, match=r"no run 2025-04-01-00000000; its newest runs are: 2025-02-28-9c0de4f1, 2025"
    ):
        report(None, workspace.root, "2025-04-01-00000000", None, False)


def test_workspace_without_runs_is_refused(tmp_path):
    Workspace.open(tmp_path / "ws")
    with pytest.raises(WorkspaceError, match="has no published run yet; name a run"):
        report(None, tmp_path / "ws", None, None, False)


def test_folder_that_is_no_workspace_is_refused(tmp_path):
    with pytest.raises(WorkspaceError, match="not a workspace"):
        report(None, tmp_path / "nothing", None, None, False)


def test_help_has_an_example():
    assert "laserbatch report --workspace" in CliRunner().invoke(app, ["--help"], terminal_width=200).stdout
