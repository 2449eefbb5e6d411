"""`laserbatch drafter train`: a drafter learns from a run's texts, and later nights draft with it."""

import json
from types import SimpleNamespace

import pytest
from night_world import FIRST_DATE, SECOND_DATE, make_world, run_here, write_config, write_here
from trained_drafters import trained

from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages.night import parse_date
from laserbatch.jobs.stages.run_night import run_night
from laserbatch.research.drafter_training import train_on_runs

DECODING = {"verifier": "greedy", "min_acceptance": 0.0, "max_new_tokens": 192}
DEPTHS = {"small": 5, "medusa": 4}  # number of tokens that each kind drafts


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("world"), num_users=12, num_items=20)
    config = write_config(folder, decoding=DECODING)
    with pytest.MonkeyPatch.context() as patched:
        write_here(patched)
        night = run_night(load_settings(config), parse_date(FIRST_DATE))
    return SimpleNamespace(folder=folder, config=config, night=night)


def test_drafters_that_are_trained_on_a_run_draft_in_the_next_night(first, capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(train_on_runs, "usable_cores", lambda: 1)
    write_here(monkeypatch)
    num_texts, few = (len(train_on_runs.texts_of_runs(first.night, limit)) for limit in (40, 20))
    assert few == 20 < num_texts
    for kind, num_depths in DEPTHS.items():
        train = ("drafter", "train", kind, "--out", str(tmp_path / kind), "--texts", "40", "--epochs", "1")
        done = run_here(capfd, *train, "--run", first.night.run.run_id, "--json", "--config", str(first.config))
        assert done.returncode == 0, done.stderr
        printed = json.loads(done.stdout)
        assert printed["num_texts"] + printed["num_held_back"] == num_texts
        assert len(printed["right_by_depth"]) == num_depths
        assert f"train {kind}: " in done.stderr and (tmp_path / kind / "model.safetensors").is_file()
    both = trained("pool", models=[str(tmp_path / "small")], head=str(tmp_path / "medusa"))
    config = write_config(first.folder, "both.yaml", decoding=DECODING | both)
    done = run_here(capfd, "nightly", "--date", SECOND_DATE, "--force", "--json", "--config", str(config))
    assert done.returncode == 0, done.stderr
    manifest = first.night.workspace.run(json.loads(done.stdout)["run_id"]).load_manifest()
    for side in manifest.generation.sides.values():
        assert side.stats.drafted_by_source["model"] and side.stats.drafted_by_source["head"]


def test_a_folder_with_other_files_is_not_written_to(first, capfd, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    train = ("drafter", "train", "small", "--out", str(tmp_path), "--config", str(first.config))
    refused = run_here(capfd, *train)
    assert refused.returncode == 3 and "thesis.txt" in refused.stderr


def test_the_advice_names_the_folder_wherever_the_configuration_is(first, capfd, monkeypatch, tmp_path):
    card = SimpleNamespace(num_texts=1, num_held_back=1, training_seconds=1.0, acceptance=(0.5,), tokens_per_step=1.0)
    monkeypatch.setattr(train_on_runs, "train_on_runs", lambda *_: card)
    monkeypatch.chdir(tmp_path)
    done = run_here(capfd, "drafter", "train", "small", "--out", "mine", "--config", str(first.config))
    assert done.returncode == 0 and f"models: [{tmp_path / 'mine'}]" in done.stderr
