"""`laserbatch doctor`: what it finds where all is well and where it is not, and that it says how to mend that."""

import json
from collections import namedtuple

import pytest
from night_world import make_world, run_here, write_config

from laserbatch.jobs.commands import doctor
from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages import inputs


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def findings(config, *checks):
    return {finding.about: finding for finding in doctor.examine(load_settings(config), checks or doctor.CHECKS)}


def test_a_machine_that_is_well_has_no_fault_and_nothing_is_left(world, capfd):
    before = sorted(world.rglob("*"))
    done = run_here(capfd, "doctor", "--config", str(write_config(world)), "--no-ray", "--json")
    told = json.loads(done.stdout)
    faults = [finding for finding in told["findings"] if finding["level"] == "fault"]
    assert (done.returncode, told["num_faults"], faults) == (0, 0, [])
    abouts = {finding["about"] for finding in told["findings"]}
    assert abouts >= {"versions", "GPU", "memory", "model", "disk", "workspace", "encoder", "pools", "tables"}
    assert sorted(path for path in world.rglob("*") if path.name != "laserbatch.yaml") == [
        path for path in before if path.name != "laserbatch.yaml"
    ]


def test_every_fault_is_told_with_how_to_mend_it_and_the_code_is_3(world, tmp_path, capfd):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("no workspace")
    config = write_config(
        world, "broken.yaml", workspace=str(tmp_path / "notes"), tables={"path": "nowhere"},
        decoding={"model": "no-model"}, encoding={"encoder": "no-encoder"}, recommending={"model": "no-recommender"},
    )  # fmt: skip
    done = run_here(capfd, "doctor", "--config", str(config), "--no-ray")
    assert done.returncode == 3
    lines = [line for line in done.stdout.splitlines() if line.startswith("fault")]
    for about, advice in (
        ("memory and model: there is no model folder", "give the path of a folder"),
        ("workspace: ", "Give a new or empty folder"),
        ("encoder: encoder folder", "expected a folder"),
        ("tables: ", "nowhere"),
        ("recommender: ", "`laserbatch recommender train"),
    ):
        assert [line for line in lines if about in line and advice in line], (about, lines)


def test_a_folder_that_cannot_be_locked_is_told(world, monkeypatch):
    def refuse(*given):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(doctor.fcntl, "flock", refuse)
    found = findings(write_config(world), doctor.check_workspace)["workspace"]
    assert found.level == "fault" and "Operation not supported" in found.found and "NFS 4" in found.mend


def test_a_full_disk_and_versions_of_another_time_are_told(world, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage(10**12, 10**12, 10**6))
    found = findings(write_config(world), doctor.check_workspace)["disk"]
    assert (found.level, found.found[:6]) == ("fault", "0.0 GB") and "pools gc" in found.mend
    monkeypatch.setattr(doctor, "version", lambda name: "0.0.1" if name == "ray" else "99")
    faults = [finding.found for finding in doctor.check_versions(None) if finding.level == "fault"]
    assert any(fault.startswith("ray is 0.0.1; ray>=") for fault in faults)


@pytest.mark.parametrize("is_there", [False, True])
def test_an_engine_that_is_not_installed_is_told(world, monkeypatch, is_there):
    monkeypatch.setattr(inputs, "find_spec", lambda name: object() if is_there else None)
    found = findings(write_config(world, "vllm.yaml", decoding={"engine": "vllm"}), doctor.check_engine)["engine"]
    assert (found.level == "ok") == is_there and "vLLM" in found.found.replace("vllm", "vLLM")
