"""Drafters of nights: trained when due, tried, kept only where they gain, drafted with, forgotten; and one's own."""

import datetime
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from night_world import FIRST_DATE, SECOND_DATE, make_world, run_here, write_config, write_here

from laserbatch.jobs.events import emit, event_log
from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages import train_drafter
from laserbatch.jobs.stages.night import parse_date
from laserbatch.jobs.stages.run_night import run_night
from laserbatch.pipeline.decoding.model.folder import model_identity
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.drafters import DrafterStore, DrafterTrial
from laserbatch.pipeline.storage.workspace import Workspace

TRAINING = {"drafter_training": {"kind": "medusa", "every_nights": 1, "num_texts": 40, "epochs": 1}}


def briefly(patched: pytest.MonkeyPatch) -> None:
    """Train and try on one thread, a few texts in one shape, once; what is tried is kept."""
    shapes = ((1, 8),)
    brief = {"MIN_GAIN": 0.0, "NUM_REPETITIONS": 1, "NUM_TRIED": 5, "SHAPES": shapes, "usable_cores": lambda: 1}
    for name, value in brief.items():
        patched.setattr(train_drafter, name, value)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A first night that trains a drafter, which is kept whatever it gains."""
    folder = make_world(tmp_path_factory.mktemp("world"))
    config = write_config(
        folder, **TRAINING, decoding={"verifier": "greedy", "min_acceptance": 0.0, "max_new_tokens": 192}
    )
    with pytest.MonkeyPatch.context() as patched:
        write_here(patched)
        briefly(patched)
        night = run_night(load_settings(config), parse_date(FIRST_DATE))
    return SimpleNamespace(folder=folder, config=config, night=night)


def laserbatch(capfd, first, *arguments: str):
    return run_here(capfd, *arguments, "--config", str(first.config))


def test_one_is_trained_into_a_folder_of_ones_own(first, capfd, tmp_path):
    train = ("drafter", "train", "small", "--out", str(tmp_path / "small"), "--texts", "40", "--epochs", "1")
    done = laserbatch(capfd, first, *train, "--run", first.night.run.run_id, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["num_texts"] + told["num_held_back"] == 40 and len(told["right_by_depth"]) == 5
    assert "train small: 5/5" in done.stderr and (tmp_path / "small" / "model.safetensors").is_file()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    refused = laserbatch(capfd, first, *train[:4], str(tmp_path / "full"))
    assert refused.returncode == 3 and "thesis.txt" in refused.stderr


def test_a_night_that_was_killed_before_its_drafter_was_tried_does_it_again(first, capfd, monkeypatch):
    folder = first.night.workspace.drafters.folder(first.night.run.run_id)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "trial.json").unlink()
    briefly(monkeypatch)
    for _ in range(2):  # of what is done nothing is done again
        done = laserbatch(capfd, first, "nightly", "--date", FIRST_DATE)
        assert done.returncode == 0, done.stderr
    assert "train medusa" not in done.stderr and (folder / "trial.json").is_file()
    assert (folder / "model.safetensors").read_bytes() == weights


def test_a_night_trains_a_drafter_that_the_next_one_drafts_with_and_that_is_forgotten(first, capfd, monkeypatch):
    store = first.night.workspace.drafters
    (trial,) = store.trials()
    assert trial.run_id == first.night.run.run_id and trial.is_kept and trial.kind == "medusa"
    assert 20 <= trial.num_texts < 48 - 10 and trial.gain > 0  # those that tried it are not among them
    assert (store.folder(trial.run_id) / "model.safetensors").is_file()
    write_here(monkeypatch)
    briefly(monkeypatch)
    monkeypatch.setattr(train_drafter, "MIN_GAIN", 1.03)
    done = laserbatch(capfd, first, "nightly", "--date", SECOND_DATE, "--force", "--json")
    assert done.returncode == 0, done.stderr
    manifest = first.night.workspace.run(json.loads(done.stdout)["run_id"]).load_manifest()
    assert manifest.drafter.run_id == trial.run_id
    assert all(side.stats.drafted_by_source["head"] for side in manifest.sides.values())
    assert [one.run_id for one in store.trials()] == [trial.run_id, manifest.run_id]  # one is due each night
    told = json.loads(laserbatch(capfd, first, "drafter", "list", "--json").stdout)["trials"]
    assert [one["is_kept"] for one in told] == [True, told[1]["gain"] >= 1.03]
    assert "tokens/s over before" in laserbatch(capfd, first, "drafter", "list").stdout
    done = laserbatch(capfd, first, "forget", "--user", "u1", "--json")
    assert json.loads(done.stdout)["drafters"] == [trial.run_id, manifest.run_id] and not store.trials()
    done = laserbatch(capfd, first, "nightly", "--date", SECOND_DATE)  # finished; what it drafted with is gone
    assert done.returncode == 0 and "training" not in done.stderr, done.stderr


@pytest.fixture
def untrained(first, tmp_path):
    """The first night, in a workspace of its own, before anything was trained on it."""
    workspace = Workspace.open(shutil.copytree(first.night.workspace.root, tmp_path / "workspace"))
    for left_by_tests in (workspace.drafters.root, *(run.root for run in workspace.runs()[1:])):
        shutil.rmtree(left_by_tests, ignore_errors=True)
    workspace.run(first.night.run.run_id).events_path.unlink()
    settings = first.night.settings.model_copy(update={"workspace": workspace.root})
    return replace(first.night, settings=settings, workspace=workspace, run=workspace.run(first.night.run.run_id))


def attempted(night, monkeypatch, error, was_finished=True):
    """Train if due, which meets an error; whether it came to a training."""
    begun = []

    def train(*_, **__):
        begun.append(1)
        raise error

    monkeypatch.setattr(train_drafter, "train_on_runs", train)
    with event_log(night.run.events_path):
        train_drafter.train_if_due(night, was_finished)
    return bool(begun)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), KeyError("ours")])
def test_a_training_that_dies_ends_no_night_and_is_given_up(untrained, monkeypatch, caplog, capfd, error):
    store, run_id = untrained.workspace.drafters, untrained.run.run_id
    assert attempted(untrained, monkeypatch, error, was_finished=False)
    assert "the same command, or the next night, tries again" in capfd.readouterr().err and not store.trials()
    with pytest.raises(KeyboardInterrupt):  # which is no attempt that died
        attempted(untrained, monkeypatch, KeyboardInterrupt())
    assert attempted(untrained, monkeypatch, ConfigError("too few texts"))  # nor is this
    assert "no drafter is trained: too few texts" in caplog.text and not (store.root / run_id).exists()
    run = untrained.workspace.run("2025-03-01-aaaaaaaa")
    shutil.copytree(untrained.run.root, run.root)
    run.events_path.unlink()
    later = replace(untrained, date=untrained.date + datetime.timedelta(days=1), run=run)
    assert attempted(later, monkeypatch, error, was_finished=False)  # the second one, whichever night it is of
    assert attempted(later, monkeypatch, error)
    (trial,) = store.trials()
    assert not trial.is_kept and type(error).__name__ in trial.failure
    assert [path.name for path in (store.root / trial.run_id).iterdir()] == ["trial.json"]
    told = " ".join(capfd.readouterr().err.split())
    assert "given up after 3 attempts" in told and "the next is 1 night later" in told and "num_texts" in told
    assert not attempted(later, monkeypatch, error) and not attempted(later, monkeypatch, error, was_finished=False)


def test_a_training_that_the_kernel_kills_is_given_up(untrained, monkeypatch, capfd):
    attempt = {"kind": "medusa", "target": model_identity(untrained.settings.model_dir), "step": 0}
    untrained.workspace.drafters.folder(untrained.run.run_id).mkdir(parents=True)
    with event_log(untrained.run.events_path):
        for step in (0, 0, 50):
            emit("drafter_training", **attempt | {"step": step})
    with pytest.raises(KeyboardInterrupt):  # at step 0 two have died: a third is begun
        attempted(untrained, monkeypatch, KeyboardInterrupt())
    with event_log(untrained.run.events_path):
        emit("drafter_training", **attempt)
    assert not attempted(untrained, monkeypatch, MemoryError())
    (trial,) = untrained.workspace.drafters.trials()
    assert "as the kernel does where memory runs short" in trial.failure
    assert "given up: the process was ended" in laserbatch_of(untrained, capfd)


def laserbatch_of(night, capfd):
    return run_here(capfd, "drafter", "list", "--workspace", str(night.workspace.root)).stderr


def test_what_is_due_and_what_is_kept(tmp_path):
    store = DrafterStore(tmp_path)
    usual = DrafterTrial("", "hass", "target", True, 1.2, 3.0, 2.5, 3, 16, 100, 1.0)
    for day in range(1, 7):
        target = "another" if day == 6 else "target"
        trial = replace(usual, run_id=f"2025-03-{day:02}-1a2b3c4d", is_kept=day != 5, target=target)
        store.folder(trial.run_id).mkdir(parents=True)
        (store.folder(trial.run_id) / "model.safetensors").write_bytes(b"w")
        templates = store.folder(trial.run_id) / "additional_chat_templates"  # as tokenizers of several are saved
        templates.mkdir()
        (templates / "tool_use.jinja").write_text("{{ messages }}")
        (store.root / "notes.txt").write_text("mine")
        store.end(trial)
    kept = {day: store.kept(f"2025-03-{day:02}", "target") for day in (2, 3, 6)}
    assert kept[2] is None  # its weights, and those before, have made room: an older night drafts with none
    assert [kept[day].run_id[:10] for day in (3, 6)] == ["2025-03-03", "2025-03-04"]
    with_weights = sorted(path.parent.name[:10] for path in tmp_path.glob("*/model.safetensors"))
    assert with_weights == ["2025-03-03", "2025-03-04", "2025-03-06"] and len(store.trials()) == 6
    assert [path.name for path in store.folder("2025-03-01-1a2b3c4d").iterdir()] == ["trial.json"]
