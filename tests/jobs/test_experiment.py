"""`laserbatch experiment` on a few users of the sample world."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest
import yaml
from night_world import run_here, write_config, write_here
from planted_night import Encoder
from small_world import TEMPLATES

from laserbatch.jobs.report.ctr_table import audit_table, between_line, variant_table
from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages import run_experiment
from laserbatch.jobs.stages.budgets import known_step_cost
from laserbatch.jobs.stages.night import open_run
from laserbatch.jobs.stages.variants import cost_of_a_million
from laserbatch.pipeline.budget.choice import read_step_cost
from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.errors import EndpointGone, RunFailed, WorkspaceError
from laserbatch.pipeline.sample.world import write_sample_world

NAME = "2025-02-10-trial"
TRIED = ("--framework", "kar", "--framework", "mine", "--users", "8", "--items", "4", "--date", "2025-02-10",
         "--name", NAME)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A configuration with a custom framework, over a small world."""
    folder = tmp_path_factory.mktemp("experiment")
    write_sample_world(folder / "tables", num_users=24, num_items=24, num_asked=8)
    (folder / "prompts").mkdir()
    for name, framework in (("brief", "kar"), ("mine", "mine")):
        for side in ("user", "item"):
            head = {"name": f"{name}_{side}", "version": 1, "framework": framework, "parser": "free",
                    "instruction": "Describe."}  # fmt: skip
            text = yaml.safe_dump(head | TEMPLATES[f"brief_{side}"])
            (folder / "prompts" / f"{name}_{side}.yaml").write_text(text, encoding="utf-8")
    knowledge = {"template_dir": "prompts", "user_template": "brief_user", "item_template": "brief_item"}
    decoding = {"max_new_tokens": 24, "batch_size": 16, "max_draft_tokens": 8, "min_acceptance": 0.1,
                "step_cost": "cost.yaml"}  # fmt: skip
    steps = [{"batch_size": 16, "num_tokens": num, "seconds": 0.01 + num / 1e4} for num in (16, 256)]
    (folder / "cost.yaml").write_text(yaml.safe_dump({"name": "of a test", "steps": steps}))
    write_config(folder, knowledge=knowledge, cluster={"price_per_hour": 3.0}, decoding=decoding,
                 ctr={"models": ["gbdt"], "num_seeds": 2}, gates={"max_failed_share": 0.0})  # fmt: skip
    return folder


def ask(capfd, folder, *arguments, code=0):
    done = run_here(capfd, *arguments, "--config", str(folder / "laserbatch.yaml"), "--json")
    assert done.returncode == code, done.stderr
    return (json.loads(done.stdout) if done.stdout else {}) | {"said": done.stderr}


@pytest.fixture
def tried(folder, capfd, monkeypatch):
    """The experiment, killed before its second variant, then finished by the same command; run once for all tests."""
    write_here(monkeypatch)
    monkeypatch.setattr(TextEncoder, "load", lambda settings: Encoder())
    if not (folder / "result.json").exists():
        with monkeypatch.context() as broken:
            broken.setattr(run_experiment, "run_night", killed_at_second(run_experiment.run_night))
            ask(capfd, folder, "experiment", *TRIED, code=130)
        # A cost that the first variant could have measured: the second must not measure it again.
        step_costs = folder / "workspace" / "experiments" / NAME / "kar" / "step-costs"
        step_costs.mkdir(exist_ok=True)
        shutil.copy(folder / "cost.yaml", step_costs / "0123456789ab.json")
        result = ask(capfd, folder, "experiment", *TRIED)
        (folder / "result.json").write_text(json.dumps(result))
    return json.loads((folder / "result.json").read_text())


def killed_at_second(run_night):
    def run(settings, *arguments, **options):
        if settings.workspace.name == "mine":
            raise KeyboardInterrupt
        return run_night(settings, *arguments, **options)

    return run


def test_variants_are_tried_beside_what_is_published_and_a_killed_experiment_goes_on(folder, tried, capfd, monkeypatch):
    assert {row["variant"] for row in tried["variants"]} == {"kar", "mine"} and not tried["failed"]
    assert tried["said"].count("continuing the experiment") == 1 and tried["said"].count("rows to write in") == 1
    assert not (folder / "workspace" / "published.json").exists() and not (folder / "workspace" / "runs").exists()
    first, second = tried["variants"]
    assert first["lift_per_hour"] >= second["lift_per_hour"] and first["hours_of"] == "worker"
    seconds, price = first["seconds_per_million"], 3.0
    assert first["money_per_million"] == pytest.approx(seconds / 3600 * price)
    # The same prompts and so the same texts: only the time of writing differs.
    assert {row["mean_difference"] for row in tried["between"]} == {0.0}
    assert {row["variant"]: row["adaptor"] for row in tried["variants"]} == {"kar": "kar", "mine": "linear"}
    assert first["lift"] == second["lift"] and first["tokens_per_text"] == second["tokens_per_text"]
    assert sum(first["num_texts"].values()) + sum(first["num_quarantined"].values()) == 12

    monkeypatch.setattr(run_experiment, "compare_variants", None)  # nothing is computed again
    again = ask(capfd, folder, "experiment", *TRIED)
    assert {name: again[name] for name in again if name != "said"} == {name: tried[name] for name in again
                                                                       if name != "said"}  # fmt: skip
    other = ask(capfd, folder, "experiment", *TRIED, "--users", "9", code=3)
    assert f"the experiment {NAME} has other settings: num_users was 8 and is now 9" in other["error"]


def test_finished_texts_are_judged_again_after_a_change_of_how(folder, tried, capfd, monkeypatch):
    monkeypatch.setattr(run_experiment, "run_night", None)  # nothing is written again
    config, path = yaml.safe_load((folder / "laserbatch.yaml").read_text()), folder / "more-seeds.yaml"
    path.write_text(yaml.safe_dump(config | {"ctr": config["ctr"] | {"num_seeds": 3}}))
    done = run_here(capfd, "experiment", *TRIED, "--config", str(path), "--json")
    judged = json.loads(done.stdout)
    assert judged["runs"] == tried["runs"] and judged["ctr"]["kar"]["num_seeds"] == 3
    assert {row["num_seeds"] for variant in judged["variants"] for row in variant["scores"]} == {3}


def test_an_experiment_of_another_version_is_refused(tmp_path):
    (tmp_path / "experiment.json").write_text('{"asked": {"date": "2025-02-10"}}')
    with pytest.raises(WorkspaceError, match=r"no `spec`.*another --name, or remove"):
        run_experiment.read_record(tmp_path)


def test_a_variant_that_joins_and_fails_does_not_stop_the_others(folder, tried, capfd, monkeypatch):
    monkeypatch.setattr(run_experiment, "run_night", mock.Mock(side_effect=RunFailed("nothing could be parsed")))
    result = ask(capfd, folder, "experiment", "--framework", "once", *TRIED[2:], code=4)
    assert result["failed"] == {"once": "nothing could be parsed"}
    assert [row["variant"] for row in result["variants"]] == ["mine"] and result["between"] == []
    record = run_experiment.read_record(folder / "workspace/experiments" / NAME)
    assert record["spec"]["variants"].keys() == {"kar", "mine", "once"}
    monkeypatch.setattr(run_experiment, "_tried", mock.Mock(side_effect=EndpointGone("no server")))
    assert ask(capfd, folder, "experiment", *TRIED, code=6)["error"] == "no server"


def test_a_million_costs_what_its_steps_do_however_loaded_the_machine_was(folder, tried):
    assert {row["priced_by"] for row in tried["variants"]} == {"of a test"}
    assert (Path(tried["folder"]) / "mine" / "step-costs" / "0123456789ab.json").exists()
    settings = load_settings(folder / "laserbatch.yaml", {"workspace": Path(tried["folder"]) / "kar"})
    night = open_run(settings, tried["runs"]["kar"])
    cost = read_step_cost(folder / "cost.yaml")
    seconds, by_clock = cost_of_a_million(night, cost), cost_of_a_million(night)
    (measured,) = (row["seconds_per_million"] for row in tried["variants"] if row["variant"] == "kar")
    assert measured == seconds != by_clock
    for side, figures in night.manifest.generation.sides.items():
        slower = replace(figures.stats, wall_s=10 * figures.stats.wall_s)
        night.manifest.generation.sides[side] = replace(figures, stats=slower)
    assert cost_of_a_million(night, cost) == seconds
    assert cost_of_a_million(night) == pytest.approx(10 * by_clock)


def test_a_step_cost_of_another_model_prices_no_variant(folder, tried):
    """Variants share their measured costs, so the newest one may be of the other variant's model."""
    settings = load_settings(folder / "laserbatch.yaml", {"workspace": Path(tried["folder"]) / "kar"})
    night = open_run(settings, tried["runs"]["kar"])
    measured = replace(night, settings=settings.model_copy(
        update={"decoding": settings.decoding.model_copy(update={"step_cost": None})}))  # fmt: skip
    cost, folder_of_costs = read_step_cost(folder / "cost.yaml"), night.workspace.step_costs_folder
    folder_of_costs.mkdir(exist_ok=True)
    model_id = night.manifest.generation.model.id
    for day, other_id in enumerate([model_id, "another-1a2b", None]):
        path, name = folder_of_costs / f"{day}.json", f"measured {day}: not {model_id} on a CPU"
        path.write_text(cost.model_copy(update={"name": name, "model_id": other_id}).model_dump_json())
        os.utime(path, (day, day))
    assert known_step_cost(measured).model_id == model_id
    (folder_of_costs / "0.json").unlink()
    assert known_step_cost(measured) is None


def test_manifests_say_by_what_each_side_was_asked_and_runs_are_listed_with_it(folder, tried, capfd):
    workspace = ("--workspace", str(Path(tried["folder"]) / "mine"))
    (run,) = ask(capfd, folder, "runs", "list", *workspace)["runs"]
    assert run["prompts"] == {side: {"framework": "mine", "template": f"mine_{side}@1"} for side in ("user", "item")}
    shown = run_here(capfd, "runs", "list", *workspace).stdout
    assert "framework" in shown and "mine" in shown


def test_an_experiment_that_holds_somebody_is_removed_when_they_are_forgotten(folder, tried, capfd, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    place = tmp_path / "copy" / "workspace" / "experiments" / NAME
    sample = pq.read_table(place / "tables" / "users.parquet")["user_id"].to_pylist()
    others = set(pq.read_table(folder / "tables" / "users.parquet")["user_id"].to_pylist()) - set(sample)
    receipt = ask(capfd, tmp_path / "copy", "forget", "--user", min(others))
    assert receipt["removed_experiments"] == [] and place.is_dir()
    collected = ask(capfd, tmp_path / "copy", "runs", "gc")
    assert collected["experiments"] == [NAME] and collected["bytes_tried"] > 0 and place.is_dir()
    receipt = ask(capfd, tmp_path / "copy", "forget", "--user", sample[0])
    assert receipt["removed_experiments"] == [NAME] and not place.exists()
    place.mkdir()
    ask(capfd, tmp_path / "copy", "runs", "gc", "--experiments")
    assert not place.exists()


def test_the_table_has_a_row_a_variant_and_says_what_is_between_the_first_and_the_others(tried):
    table = variant_table(tried)
    assert list(table.rows[0]) == [
        "Variant", "LightGBM", "All", "Tokens/text", "Texts", "Per million", "Lift/hour",
    ]  # fmt: skip
    assert [row["Variant"] for row in table.rows] == [variant["variant"] for variant in tried["variants"]]
    assert "worker-hour" in table.caption and "and money" in table.caption
    assert between_line(tried).startswith(f"{table.rows[0]['Variant']} (all models) compared with ")
    mean = {"own": 0.5, "plain": 0.25, "surely_worse": 0.0}
    audit = {"num_pairs": 16, "num_identical": 4, "length_ratio": 1.0, "cosine": 0.9}
    audit |= {"repetition": mean, "fields": mean, "names": mean}
    assert audit_table(tried["variants"]) is None
    assert audit_table([{"variant": "kar", "audit": {"user": audit}}]).rows[0]["Fields"] == "50 % (25 %)"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("experiment", "--framework", "kar"), 2, "'kar' is only one variant; give --framework, or --config, twice"),
        (("experiment", "--framework", "kar", "--framework", "kar"), 2, "kar is given twice"),
        (("experiment", "--framework", "kar", "--framework", "onec"), 3, "framework 'onec'; found kar"),
        ((*("experiment", "--date", "2025-03-30"), *TRIED[:4]), 3, "no interactions after 2025-03-30"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_is_written(folder, capfd, arguments, code, message):
    printed = ask(capfd, folder, *arguments, code=code)
    assert message in " ".join(printed["error"].split())
    assert [path.name for path in (folder / "workspace").glob("experiments/*") if path.name != NAME] == []


def test_configurations_that_would_be_judged_on_other_rows_or_tables_are_refused(folder, tried, capfd):
    for name, changed, message in (
        ("seeds", {"ctr": {"num_seeds": 3}}, "ctr.num_seeds differs, so variants would be judged"),
        ("tables", {"tables": {"path": "others"}}, "variants are tried on one sample, so give them"),
    ):
        other = write_config(folder, f"{name}.yaml", **changed)
        refused = ask(capfd, folder, "experiment", "--config", str(other), *TRIED[4:8], "--date", "2025-02-10", code=3)
        assert message in refused["error"], name
    assert not list((folder / "workspace" / "experiments").glob("2025-02-10-????????"))
