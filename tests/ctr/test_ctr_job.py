"""The CTR stage on a run's folder: the features that it compares, and the input that it refuses."""

import sys
from types import SimpleNamespace

import pytest
from ctr_world import AS_OF, make_features, make_world

from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.settings import CtrSettings
from laserbatch.jobs.commands.ctr import changed_settings, print_ctr
from laserbatch.jobs.events import read_events
from laserbatch.jobs.report.ctr_table import ctr_section
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.compare_ctr import compare_ctr, compare_night, judge_first, run_variants
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.fetched import remove_copies
from laserbatch.pipeline.tables.parts import tables_folder

SETTINGS = CtrSettings(models=("gbdt",), num_seeds=2)


@pytest.fixture(scope="module")
def world():
    return make_world(num_users=60, num_items=40, num_interactions=900, num_cold=10)


def write_features(run: RunFolder, features):
    for side in ("user", "item"):
        write_parquet(features[side], run.features_folder(side) / "00000.parquet")


def test_a_run_is_compared_with_and_without_its_plain_texts(world, tmp_path, capsys):
    run = RunFolder(tmp_path / "run")
    write_features(run, make_features(world))
    assert list(run_variants(run, "top_k")) == ["none", "top_k"]
    rows = compare_ctr(run.root, world, AS_OF, "greedy", SETTINGS).rows
    assert {row.variant for row in rows} == {"none", "greedy"}
    write_features(run.plain, make_features(world, seed=1))
    figures = compare_ctr(run.root, world, AS_OF, "greedy", SETTINGS)
    assert [row.variant for row in figures.rows] == ["none", "none", "plain", "greedy"] and len(figures.seeds) == 6
    assert figures.equivalence["all"].num_pairs == 2
    print_ctr(figures)
    output = " ".join(capsys.readouterr().out.split())
    assert "LightGBM greedy" in output and "new users and new seeds" in output


@pytest.fixture
def night(world, tmp_path):
    """A night as its CTR stage sees it, after three earlier runs, one of which has other settings."""
    workspace = Workspace.open(tmp_path / "workspace")
    for run_id in ("2025-02-20-00000001", "2025-03-01-00000001", "2025-03-02-00000002", "2025-03-08-00000001"):
        run = workspace.run(run_id)
        write_features(run, make_features(world, run_id=run_id))
        run.success_path.touch()
    run.success_path.unlink()
    for name in ("users", "items", "interactions"):
        write_parquet(getattr(world, name), tmp_path / "tables" / f"{name}.parquet")
    settings = Settings(ctr=SETTINGS, tables={"path": str(tmp_path / "tables")})
    return SimpleNamespace(settings=settings, workspace=workspace, run=run)


def test_a_comparison_that_the_kernel_kills_stops_no_night_and_says_why(night, monkeypatch):
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr("laserbatch.jobs.stages.compare_ctr.CHILD", killed)
    assert "killed by SIGKILL, probably by the kernel because memory ran short" in compare_night(night).skipped


@pytest.mark.parametrize("is_here", [False, True])
def test_the_last_run_that_can_be_judged_stands_for_a_live_night_and_no_copy_of_tables_at_a_uri_is_left(
    night, tmp_path, monkeypatch, is_here
):
    """The process that trains leaves no copy at its `os._exit`; a copy that the night has is read and not removed."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    uri = (tmp_path / "tables").as_uri()
    night.settings = Settings(ctr=SETTINGS, tables={"path": uri})
    before = []
    if is_here:
        before = [tables_folder(uri)]
        for file in (tmp_path / "tables").glob("*.parquet"):
            file.unlink()  # so that a second copy cannot be made
    figures = compare_night(night)
    assert (figures.judged_run_id, figures.judged_age_days) == ("2025-03-01-00000001", 7)
    assert {row.variant for row in figures.rows} == {"none", "relaxed"}
    lead = ctr_section(figures).lead
    assert lead.startswith("This run cannot be judged yet; these figures are of run 2025-03-01-00000001, 7 days")
    events = read_events(night.run.events_path)
    assert any("is judged instead" in event.get("line", "") for event in events)
    assert list(scratch.glob("laserbatch*")) == before
    remove_copies()


@pytest.mark.parametrize("error", [MemoryError("no 3 GB"), RuntimeError("CUDA out of memory"), CtrError("too few")])
def test_a_comparison_that_fails_says_why(night, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr("laserbatch.jobs.stages.compare_ctr.compare_ctr", fail)
    tables = str(night.settings.tables.path)
    figures = judge_first(night.workspace, [night.run.run_id], tables, "relaxed", SETTINGS)
    assert str(error) in figures.skipped and figures.rows == []
    assert str(error) in str(ctr_section(figures).blocks[0])


def test_the_command_line_changes_models_and_seeds():
    changed = changed_settings(CtrSettings(), "DIN, gbdt", 5)
    assert changed.models == ("din", "gbdt") and changed.num_seeds == 5
    assert changed_settings(CtrSettings(), None, None) == CtrSettings()
    with pytest.raises(ConfigError, match="expected some of din, dcnv2, gbdt"):
        changed_settings(CtrSettings(), "din,deepfm", None)
    for models in (" ,", "din,gbdt,din"):
        with pytest.raises(ConfigError, match=r"is not a list of models.*each at most once"):
            changed_settings(CtrSettings(), models, None)
