"""`laserbatch pools simulate` on two nights of a sample world whose texts are planted: no model is run anywhere."""

import datetime
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import yaml
from night_world import run_here

from laserbatch.jobs import simulate_world
from laserbatch.jobs.build_pools import build_pools
from laserbatch.jobs.night import Night, open_night, open_run
from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.simulate_check import checked_nights
from laserbatch.jobs.simulate_view import check_lines
from laserbatch.jobs.simulate_world import SimulationSize, divided_texts
from laserbatch.pipeline.decoding.budget import choose_budget
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.sides import SIDES
from laserbatch.retrieval_pools.calibration.calibrate import num_held_back
from laserbatch.retrieval_pools.index.budget_curve import BudgetCurve
from laserbatch.retrieval_pools.simulating import studies
from laserbatch.retrieval_pools.step_cost import StepCost

FIRST_DATE, SECOND_DATE = datetime.date(2025, 2, 28), datetime.date(2025, 3, 1)
REALISED_ACCEPTED, REALISED_STEPS = 60, 20  # of every text that the second night wrote: 4 tokens a step
STEP_COST = """\
name: a small card
steps:
- {batch_size: 8, num_tokens: 8, seconds: 0.01}
- {batch_size: 8, num_tokens: 136, seconds: 0.06}
"""


def planted_text(entity_id: str, version: int) -> np.ndarray:
    """Eight stock phrases of ten tokens, chosen by entity; a later version differs in the last two."""
    rng = np.random.default_rng(sum(map(ord, entity_id)))
    chosen = rng.integers(0, 12, 8)
    chosen[6:] = (chosen[6:] + version) % 12
    return (1000 + 10 * chosen[:, None] + np.arange(10)).reshape(-1).astype(np.int32)


def write_night(folder: Path, date: datetime.date) -> None:
    """A finished, published night: the first leaves out one entity in six; of the others one in four then changes."""
    night = open_night(load_settings(folder / "laserbatch.yaml"), date)
    for side in SIDES:
        known = set() if night.previous is None else set(night.previous.read_knowledge(side)["entity_id"].to_pylist())
        rows = []
        for number, entity_id in enumerate(night.tables.entities(side)[f"{side}_id"].to_pylist()):
            if night.previous is None and number % 6 == 1:
                continue
            is_written = entity_id not in known or number % 4 == 0
            token_ids = planted_text(entity_id, version=int(entity_id in known and is_written))
            rows.append(
                {
                    "entity_id": entity_id,
                    "model_id": "planted",
                    "token_ids": token_ids,
                    "run_id": night.run.run_id if is_written else night.previous.run_id,
                    "num_steps": REALISED_STEPS,
                    "num_drafted": 2 * REALISED_ACCEPTED,
                    "num_accepted": REALISED_ACCEPTED,
                }
            )
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        token_ids = pa.array(columns.pop("token_ids"), pa.list_(pa.int32()))
        night.run.write_shard(side, "00000", pa.table(columns | {"token_ids": token_ids}))
    night.manifest.pools_built = build_pools(night)
    night.manifest.save()
    night.run.finish()
    night.workspace.publish(night.run.run_id)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    write_sample_world(folder / "tables", num_users=160, num_items=80)
    (folder / "laserbatch.yaml").write_text("workspace: workspace\ntables: {path: tables}\n")
    (folder / "cost.yaml").write_text(STEP_COST)
    for date in (FIRST_DATE, SECOND_DATE):
        write_night(folder, date)
    return folder


@pytest.fixture(scope="module")
def found(world, tmp_path_factory) -> dict:
    """What the command says as JSON, and its page."""
    out = tmp_path_factory.mktemp("out") / "page.html"
    command = [sys.executable, "-c", "from laserbatch.jobs.cli import main; main()", "pools", "simulate", "--json"]
    options = ["--config", str(world / "laserbatch.yaml"), "--step-cost", str(world / "cost.yaml"), "--out", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert "simulate users" in done.stderr
    return json.loads(done.stdout) | {"page": out.read_text()}


@pytest.fixture
def few_studies(monkeypatch):
    """For a command in this process that is not asked about studies: `found` has them all, each takes as long."""
    monkeypatch.setattr(
        simulate_world, "GROUPINGS", {name: simulate_world.GROUPINGS[name] for name in ("whole", "router")}
    )
    monkeypatch.setattr(studies, "GROUP_COUNTS", (2,))
    monkeypatch.setattr(studies, "OPTION_VALUES", {"group_weight": studies.OPTION_VALUES["group_weight"]})


def outcomes(found: dict, side: str, study: str, kind: str = "mixed") -> dict[str, dict]:
    rows = found["sides"][side]["outcomes"]
    return {row["value"]: row for row in rows if (row["study"], row["kind"]) == (study, kind)}


def test_both_kinds_of_entity_are_predicted_with_intervals(found):
    for side in SIDES:
        new, changed, mixed = (
            outcomes(found, side, "configured", kind)["as configured"] for kind in ("new", "changed", "mixed")
        )
        for outcome in (new, changed, mixed):
            assert 1 < outcome["tokens_per_step"]["low"] <= outcome["tokens_per_step"]["value"]
            assert outcome["aal"]["value"] == pytest.approx(outcome["tokens_per_step"]["value"] - 1)
        assert new["num_texts"] == mixed["num_texts"] == found["sides"][side]["num_texts"] // 4
        calibrated_with = found["sides"][side]["num_calibration_texts"]
        assert calibrated_with == num_held_back(found["sides"][side]["num_texts"], 400) > 10
        num_apart = new["num_texts"] + calibrated_with
        assert found["sides"][side]["num_pool_texts"] == found["sides"][side]["num_texts"] - num_apart


def test_every_study_is_there(found):
    groupings = outcomes(found, "user", "grouping")
    for name in ("router", "collaborative", "attribute", "leaves", "random"):
        assert {f"{name}, preferred", f"{name}, walls"} <= set(groupings)
    assert groupings["router, preferred"]["verdict"] == "configured"
    assert groupings["random, walls"]["verdict"] == "worse"  # a wall keeps out texts that are as good as any
    assert "collaborative, 2 groups, walls" in outcomes(found, "user", "number of groups")
    assert list(outcomes(found, "user", "pool size")) == ["50", "all 88"]
    assert list(outcomes(found, "user", "min_support")) == ["1", "2", "3", "5"]
    assert outcomes(found, "user", "sources", "new")["without pool"]["verdict"] == "worse"
    # others write the same phrases, so that a previous text with two other ones may mislead; it is drafted from
    assert outcomes(found, "user", "sources", "changed")["without previous"]["gain"]["value"] != 1
    assert "without previous" not in outcomes(found, "user", "sources", "new")


def test_speeds_are_of_the_given_step_cost(found):
    assert found["step_cost"] == "a small card"
    for side in SIDES:
        row = outcomes(found, side, "configured")["as configured"]
        [speed] = found["sides"][side]["budgets"]["configured"]
        assert speed["batch_size"] == 8
        assert speed["tokens_per_step"] == pytest.approx(row["tokens_per_step"])
        assert speed["mean_drafted"] == pytest.approx(row["mean_drafted"])
        seconds = 0.01 + 0.05 * 8 * row["mean_drafted"] / 128
        assert speed["tokens_per_s"] == pytest.approx(8 * row["tokens_per_step"]["value"] / seconds)
        assert speed["speed_up"]["value"] == pytest.approx(speed["tokens_per_s"] / 800)
        assert 1 < speed["run_speed_up"] < speed["speed_up"]["value"]  # prompts take time, too


def test_a_simulation_and_a_night_choose_the_same_budget(found):
    for side in SIDES:
        data = found["sides"][side]
        [configured], [chosen] = data["budgets"]["configured"], data["budgets"]["chosen"]
        assert configured == chosen  # the configuration leaves the choice
        curve = BudgetCurve.model_validate(data["budgets"]["replayed"])
        pool = SimpleNamespace(budgets=curve, is_calibrated=True)
        step_cost = StepCost.model_validate(yaml.safe_load(STEP_COST))
        night = choose_budget(step_cost, 8, pool, curve.sources, share_changed=data["share_changed"])
        assert chosen["budget"]["forecast"].pop("run_speed_up") == chosen["run_speed_up"]
        expected = json.loads(json.dumps(asdict(night)))
        del expected["forecast"]["run_speed_up"]
        assert chosen["budget"] == expected
        assert night.max_draft_tokens > 0
    assert "decoding.max_draft_tokens" not in found["recommendation"]["changes"]


def test_a_budget_that_would_slow_down_the_whole_run_is_plain_as_in_a_night(found, world, few_studies, tmp_path, capfd):
    """Drafts gain in full batches; a lone text at a shard's end is made to cost far more with them than without."""
    step_cost = yaml.safe_load(STEP_COST)
    step_cost["steps"] += [
        {"batch_size": 1, "num_tokens": 1, "seconds": 0.001},
        {"batch_size": 1, "num_tokens": 2, "seconds": 50.0},
        {"batch_size": 1, "num_tokens": 65, "seconds": 60.0},
    ]
    (tmp_path / "ends.yaml").write_text(yaml.safe_dump(step_cost))
    options = ["--step-cost", str(tmp_path / "ends.yaml"), "--batch-size", "8", "--out", str(tmp_path / "page.html")]
    done = run_here(capfd, "pools", "simulate", "--config", str(world / "laserbatch.yaml"), *options, "--json")
    assert done.returncode == 0, done.stderr
    for side, data in json.loads(done.stdout)["sides"].items():
        assert found["sides"][side]["budgets"]["chosen"][0]["budget"]["max_draft_tokens"] > 0
        [chosen] = data["budgets"]["chosen"]
        assert chosen["budget"]["max_draft_tokens"] == 0
        assert "ends of shards" in chosen["budget"]["forecast"]["reason"]


def test_numbers_that_are_worse_than_the_choice_are_recommended_to_be_left_to_it(world, few_studies, tmp_path, capfd):
    config = tmp_path / "laserbatch.yaml"
    fixed = "decoding: {max_draft_tokens: 1, min_acceptance: 0.9}\n"
    config.write_text(f"workspace: {world / 'workspace'}\ntables: {{path: {world / 'tables'}}}\n{fixed}")
    options = ["--step-cost", str(world / "cost.yaml"), "--out", str(tmp_path / "page.html"), "--json"]
    done = run_here(capfd, "pools", "simulate", "--config", str(config), *options)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    [configured], [chosen] = (data["sides"]["user"]["budgets"][name] for name in ("configured", "chosen"))
    assert (configured["budget"]["max_draft_tokens"], configured["budget"]["min_acceptance"]) == (1, 0.9)
    assert chosen["budget"]["max_draft_tokens"] > 1 and chosen["over_configured"]["low"] > 1
    changes = data["recommendation"]["changes"]
    assert changes["decoding.max_draft_tokens"] is None and changes["decoding.min_acceptance"] is None
    assert data["recommendation"]["holds"]


def test_a_night_that_drafts_nothing_is_said_and_its_options_are_studied_all_the_same(
    world, few_studies, tmp_path, capfd
):
    dear = tmp_path / "dear.yaml"
    dear.write_text(
        "steps: [{batch_size: 8, num_tokens: 8, seconds: 1}, {batch_size: 8, num_tokens: 520, seconds: 999}]"
    )
    options = ["--step-cost", str(dear), "--out", str(tmp_path / "page.html"), "--num-texts", "24"]
    done = run_here(capfd, "pools", "simulate", "--config", str(world / "laserbatch.yaml"), *options)
    assert done.returncode == 0, done.stderr
    said = "users: at batch 8 and this step cost a night drafts nothing; all else is studied with up to 16 draft tokens"
    assert said in done.stdout and said in (tmp_path / "page.html").read_text()
    assert "decoding.max_draft_tokens" not in done.stdout


def test_how_many_have_a_text_of_the_night_before_is_said(found, world):
    night = open_run(load_settings(world / "laserbatch.yaml"), None)
    for side in SIDES:
        records = night.run.read_knowledge(side).select(["entity_id", "run_id"]).to_pylist()
        before = set(night.previous.read_knowledge(side)["entity_id"].to_pylist())
        written = [one["entity_id"] for one in records if one["run_id"] == night.run.run_id]
        assert found["sides"][side]["num_written"] == len(written)
        share = sum(entity_id in before for entity_id in written) / len(written)
        assert found["sides"][side]["share_changed"] == pytest.approx(share) and 0.2 < share < 0.9
    assert (
        f"A text of the night before had {found['sides']['user']['share_changed']:.0%}".replace("%", " %")
        in (found["page"])
    )


def test_the_prediction_is_compared_with_what_the_night_after_realised(found, world):
    assert found["check_refused"] is None
    assert found["checks"], "the second night drafted from the pools of the first"
    first, second = (run.run_id for run in open_run(load_settings(world / "laserbatch.yaml"), None).workspace.runs())
    for check in found["checks"]:
        assert (check["run_before"], check["run_after"]) == (first, second)
        assert check["realised"]["value"] == pytest.approx(1 + REALISED_ACCEPTED / REALISED_STEPS)
        assert check["error"] == pytest.approx(check["predicted"]["value"] / 4 - 1)
        assert check["kind"] == "new"  # the first night had no texts from before


def edit_json(path: Path, *keys: str, value: object) -> None:
    data = json.loads(path.read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(data))


@pytest.fixture(scope="module")
def compared(world) -> None:
    """The nights as they are, but for what a test changes, are compared."""
    settings = load_settings(world / "laserbatch.yaml")
    check = checked_nights(settings, open_run(settings, None), SimulationSize(8))
    assert check.predictions and check.refused is None


@pytest.fixture
def copied(world, compared, tmp_path) -> Night:
    """The second night, in a workspace of its own."""
    shutil.copytree(world / "workspace", tmp_path / "workspace")
    return open_run(load_settings(world / "laserbatch.yaml", {"workspace": str(tmp_path / "workspace")}), None)


@pytest.mark.parametrize(
    ("file", "keys", "value", "reason"),
    [
        ("runs/{after}", ("laserbatch_version",), "0.0.7", "run {after} was made by laserbatch 0.0.7, which may draft"),
        ("runs/{before}", ("laserbatch_version",), "0.0.7", "run {before} was made by laserbatch 0.0.7"),
        ("runs/{after}", ("settings", "pools", "old_option"), 1, "does not have (pools.old_option)"),
        ("runs/{before}", ("format_version",), 0, "has format version 0"),
        ("pools/{before}/user", ("format_version",), 1, "is a pool of format 1; this version expects"),
        ("pools/{before}/item", ("settings", "group_weight"), 1.5, "pools.group_weight is 1.5 there and 3.0 in the"),
    ],
)
def test_a_night_that_drafted_otherwise_is_not_compared(copied, file, keys, value, reason):
    places = {"before": copied.manifest.pools.version, "after": copied.run.run_id}
    edit_json(copied.workspace.root / file.format(**places) / "manifest.json", *keys, value=value)
    check = checked_nights(copied.settings, copied, SimulationSize(8))
    assert check.predictions == []
    assert reason.format(**places) in check.refused
    [line] = check_lines(SimpleNamespace(check=check))
    assert line.startswith("not checked: ") and line.endswith(".") and "realised" not in line


def test_a_night_whose_pools_are_gone_is_not_compared(copied):
    shutil.rmtree(copied.workspace.root / "pools" / copied.manifest.pools.version)
    check = checked_nights(copied.settings, copied, SimulationSize(8))
    assert check.predictions == [] and "no longer there" in check.refused


def test_the_page_holds_everything_and_needs_nothing(found):
    page = found["page"]
    assert page.count("<svg") >= 8
    assert "http://" not in page.replace("http://www.w3.org/", "") and "<script" not in page
    assert "Pools are calibrated, as those of a night are: users on 32 further texts" in page
    for heading in ("What drafting gains", "Draft budget", "Groupings", "Pool size", "Checked on a night"):
        assert heading in page


def test_held_back_texts_are_in_no_pool_and_the_same_for_a_seed(world):
    night = open_run(load_settings(world / "laserbatch.yaml"), None)
    one, again, other = (divided_texts(night, "user", SimulationSize(num_texts=20), seed, 16) for seed in (0, 0, 1))
    assert len(one.held_back) == 20
    assert one.held_back_ids == again.held_back_ids != other.held_back_ids
    assert len(one.calibration) == 16 and one.calibration_ids == again.calibration_ids
    assert len({*one.held_back_ids, *one.calibration_ids, *one.corpus.entity_ids}) == one.num_texts
    assert len(one.corpus) + 20 + 16 == one.num_texts
    assert sum(text.previous_ids is not None for text in one.held_back) == 10
    assert sum(text.previous_ids is not None for text in one.calibration) == 8
    apart = zip([*one.held_back_ids, *one.calibration_ids], [*one.held_back, *one.calibration], strict=True)
    for entity_id, text in apart:
        version = int(text.previous_ids is not None)
        assert text.text_ids.tolist() == planted_text(entity_id, version).tolist()
        if version:
            assert text.previous_ids.tolist() == planted_text(entity_id, 0).tolist()


def test_a_person_reads_tables_and_what_is_recommended(world, few_studies, capfd):
    small = ["--num-texts", "8", "--out", str(world / "small.html")]
    done = run_here(capfd, "pools", "simulate", "--config", str(world / "laserbatch.yaml"), *small)
    assert done.returncode == 0, done.stderr
    for words in ("Predicted from run", "computed, not measured", "check, "):
        assert words in done.stdout
    assert "within noise" in done.stdout
    assert ("Recommended at batch 16" in done.stdout) != ("Keep the configuration at batch 16" in done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "2020-01-01-nothing"), "no run 2020-01-01-nothing"),
        (("--step-cost", "nowhere.yaml"), "nowhere.yaml cannot be read"),
        (("--step-cost", "{world}/cost.yaml", "--batch-size", "64"), "has no batch size 64; it has 8"),
    ],
)
def test_what_is_missing_is_named(world, capfd, arguments, message):
    arguments = [word.format(world=world) for word in arguments]
    done = run_here(capfd, "pools", "simulate", "--config", str(world / "laserbatch.yaml"), *arguments)
    assert done.returncode == 3
    assert message in done.stderr


def test_a_workspace_without_a_run_or_with_few_texts_says_what_to_do(world, tmp_path, capfd):
    (tmp_path / "laserbatch.yaml").write_text("workspace: workspace\ntables: {path: tables}\n")
    config = str(tmp_path / "laserbatch.yaml")
    assert "not a workspace" in run_here(capfd, "pools", "simulate", "--config", config).stderr
    shutil.copytree(world / "workspace", tmp_path / "workspace")
    (tmp_path / "workspace" / "published.json").unlink()
    assert "no published run yet" in run_here(capfd, "pools", "simulate", "--config", config).stderr
    (tmp_path / "few").mkdir()
    write_sample_world(tmp_path / "few" / "tables", num_users=12, num_items=20)
    shutil.copy(config, tmp_path / "few" / "laserbatch.yaml")
    write_night(tmp_path / "few", FIRST_DATE)
    done = run_here(capfd, "pools", "simulate", "--config", str(tmp_path / "few" / "laserbatch.yaml"))
    assert done.returncode == 3
    assert "fewer than 20 texts on either side" in done.stderr


def test_the_command_has_an_example_and_stands_among_its_neighbours(capfd):
    assert "laserbatch pools simulate --config" in " ".join(
        run_here(capfd, "pools", "simulate", "--help").stdout.split()
    )
    assert "simulate" in run_here(capfd, "pools", "--help").stdout
