"""All malformed input is refused in one line that says what to do, before the workspace is touched."""

import json

import pytest
from malformed import CASES, NIGHTLY, sound_folder
from night_world import run_here

from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages.inputs import checked_inputs
from laserbatch.jobs.stages.night import parse_date
from laserbatch.jobs.stages.workers import NightWorkers


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "LOCK"}


def test_the_folder_that_the_cases_spoil_is_sound(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(sound_folder(tmp_path))
    assert checked_inputs(load_settings(tmp_path / "laserbatch.yaml"), parse_date(NIGHTLY[-1]))
    assert run_here(capfd, "data", "import", "exports", "out", "--mapping", "mapping.yaml").returncode == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_what_is_malformed_is_named_and_nothing_is_touched(case, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(sound_folder(tmp_path))
    monkeypatch.setattr(NightWorkers, "start", None)  # no case may get that far
    case.change(tmp_path)
    before = contents(tmp_path)
    done = run_here(capfd, *case.command, "--json")
    printed = json.loads(done.stdout)
    assert (done.returncode, printed["exit_code"]) == (case.code, case.code), done.stderr
    missing = [word for word in case.words if word not in printed["error"]]
    assert not missing, f"{missing} not in: {printed['error']}"
    assert "Traceback" not in done.stderr and "pydantic" not in printed["error"]
    assert contents(tmp_path) == before
