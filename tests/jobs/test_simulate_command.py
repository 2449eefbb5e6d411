"""`laserbatch pools simulate` on two nights of a sample world whose texts are planted: no model is run anywhere."""

import datetime
import json
import shutil
import zlib
from pathlib import Path

import pytest
import yaml
from night_world import run_here
from planted_night import invented_text, write_night

from laserbatch.jobs.commands import simulate
from laserbatch.jobs.commands.simulate import divided_texts
from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages.night import Night, open_night, open_run
from laserbatch.pipeline.sample.world import write_sample_world

FIRST_DATE, SECOND_DATE = datetime.date(2025, 2, 28), datetime.date(2025, 3, 1)
NUM_ITEMS = 160
STEP_COST = """\
name: a small card
steps:
- {batch_size: 8, num_tokens: 8, seconds: 0.01}
- {batch_size: 8, num_tokens: 136, seconds: 0.06}
"""


def planted(folder: Path, date: datetime.date, num_changed: int = 0, previous: Path | None = None) -> Night:
    """A finished, published night."""
    night = open_night(load_settings(folder / "laserbatch.yaml"), date)
    write_night(night, num_changed, previous)
    night.run.finish()
    night.workspace.publication.publish(night.run.run_id)
    return night


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    write_sample_world(folder / "tables", num_users=30, num_items=NUM_ITEMS)
    (folder / "laserbatch.yaml").write_text("workspace: workspace\ntables: {path: tables}\n")
    (folder / "cost.yaml").write_text(STEP_COST)
    first = planted(folder, FIRST_DATE)
    planted(folder, SECOND_DATE, 5, first.run.knowledge_folder("item"))
    return folder


def simulated(capfd, world: Path, *options: str, config: Path | None = None, cost: str = "cost.yaml") -> dict:
    """What the command says as JSON."""
    arguments = "--config", str(config or world / "laserbatch.yaml"), "--step-cost", str(world / cost)
    done = run_here(capfd, "pools", "simulate", *arguments, *options, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def outcome(printed: dict, pool_share: float = 1.0, **change) -> dict:
    expected = {name.replace("__", "."): value for name, value in change.items()}
    rows = printed["sides"]["item"]["outcomes"]
    return next(row for row in rows if (row["change"], row["pool_share"]) == (expected, pool_share))


def test_what_drafting_gains_is_said_of_budgets_groups_and_pool_sizes(world, capfd):
    printed = simulated(capfd, world)
    assert list(printed["sides"]) == ["item"]  # nobody wrote of users
    side = printed["sides"]["item"]
    assert side["num_texts"] == NUM_ITEMS and side["num_measured_texts"] == NUM_ITEMS // 4
    assert side["num_calibration_texts"] == NUM_ITEMS // 5
    assert 0.9 < side["share_changed"] < 1  # an item appeared on the second day
    configured = outcome(printed)
    assert configured["max_draft_tokens"] > 0  # the night's own choice
    assert configured["tokens_per_step"] > 1
    assert [configured[name] for name in ("over_configured", "low", "high")] == [1.0] * 3
    seconds = 0.01 + 0.05 * 8 * configured["mean_drafted"] / 128
    tokens_per_s = 8 * configured["tokens_per_step"] / seconds
    assert configured["speed_up"] == pytest.approx(tokens_per_s / 800)  # which are written a second plainly
    sizes = [outcome(printed, decoding__max_draft_tokens=size, decoding__min_acceptance=None) for size in (4, 16, 64)]
    drafted = [size["mean_drafted"] for size in sizes]
    assert drafted[0] <= 4 and drafted == sorted(drafted)
    assert max(size["speed_up"] for size in sizes) <= 1.05 * configured["speed_up"]
    for scheme in ("collaborative", "attribute", "global", "random"):
        assert outcome(printed, routing__scheme=scheme)["tokens_per_step"] > 1
    walls = outcome(printed, pools__scope="group")
    assert walls["high"] < 1  # a wall keeps out texts that are as good as any
    smaller = outcome(printed, 0.25)
    assert smaller["low"] <= 1 <= smaller["high"] < 1.05  # own previous texts are what is drafted from here
    assert printed["recommendation"] is None  # of equally frequent words any is as good


def test_numbers_that_are_worse_than_the_choice_are_recommended_to_be_left_to_it(world, tmp_path, capfd):
    config = tmp_path / "laserbatch.yaml"
    fixed = "decoding: {max_draft_tokens: 1, min_acceptance: 0.9}\n"
    config.write_text(f"workspace: {world / 'workspace'}\ntables: {{path: {world / 'tables'}}}\n{fixed}")
    printed = simulated(capfd, world, config=config)
    configured, chosen = outcome(printed), printed["sides"]["item"]["outcomes"][1]
    assert (configured["max_draft_tokens"], configured["min_acceptance"]) == (1, 0.9)
    assert chosen["max_draft_tokens"] > 1 and chosen["low"] > 1
    assert set(printed["recommendation"]) == {"decoding.max_draft_tokens", "decoding.min_acceptance"}


def test_a_person_reads_a_table_and_what_is_recommended(world, capfd):
    """Where drafts cost far more than they gain."""
    dear = {"batch_size": 8, "num_tokens": 8, "seconds": 1}, {"batch_size": 8, "num_tokens": 520, "seconds": 999}
    (world / "dear.yaml").write_text(yaml.safe_dump({"name": "a dear card", "steps": list(dear)}))
    arguments = "--config", str(world / "laserbatch.yaml"), "--step-cost", str(world / "dear.yaml"), "--num-texts", "24"
    done = run_here(capfd, "pools", "simulate", *arguments)
    assert done.returncode == 0, done.stderr
    output = " ".join(done.stdout.split())
    assert "items: 24 texts held back, 100 % with a text of the night before; 104 in the pool" in output
    assert "batch 8, step cost: a dear card" in output
    assert "as configured none 1.00 0.0 1.00 1.00 (1.00 to 1.00)" in output
    assert "routing.scheme: random" in output and "a pool of 50 % of the texts" in output
    assert "Keep the configuration at batch 8 and this step cost" in output
    assert "no simulation of users: the run" in " ".join(done.stderr.split())


def test_held_back_texts_are_in_no_pool_and_the_same_for_a_seed(world, tmp_path):
    settings = load_settings(world / "laserbatch.yaml")
    night = open_run(settings, None)
    first, again, other = (
        divided_texts(night, settings.model_copy(update={"seed": seed}), "item", 20, tmp_path) for seed in (0, 0, 1)
    )
    ids = night.tables.items["item_id"].to_pylist()
    measured, calibration = ({ids[row] for row, _ in placed} for placed in (first.measured, first.calibration))
    assert len(measured) == 20 and len(calibration) == NUM_ITEMS // 5 and not measured & calibration
    assert set(first.held_back) == measured | calibration and not {*first.held_back} & {*first.others}
    assert len(first.held_back) + len(first.others) == len(first.texts) == NUM_ITEMS
    rows = [[row for row, _ in each.measured] for each in (first, again, other)]
    assert rows[0] == rows[1] != rows[2] and first.others == again.others
    for row, text in first.measured:
        seed = zlib.crc32(ids[row].encode())
        assert text.text_ids.tolist() == invented_text(seed, num_changed=5).tolist()
        assert text.previous_ids is None or text.previous_ids.tolist() == invented_text(seed).tolist()
    assert sum(text.previous_ids is not None for _, text in first.measured) == 20 * first.share_changed > 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "2020-01-01-nothing"), "no run 2020-01-01-nothing"),
        (("--step-cost", "nowhere.yaml"), "nowhere.yaml is not there"),
        (("--step-cost", "{world}/cost.yaml", "--batch-size", "64"), "has no batch size 64; it has 8"),
    ],
)
def test_what_is_missing_is_named(world, capfd, arguments, message):
    arguments = [word.format(world=world) for word in arguments]
    done = run_here(capfd, "pools", "simulate", "--config", str(world / "laserbatch.yaml"), *arguments)
    assert done.returncode == 3
    assert message in done.stderr


def test_a_workspace_without_a_run_or_with_few_texts_says_what_to_do(world, tmp_path, capfd, monkeypatch):
    (tmp_path / "laserbatch.yaml").write_text("workspace: workspace\ntables: {path: tables}\n")
    config = str(tmp_path / "laserbatch.yaml")
    assert "not a workspace" in run_here(capfd, "pools", "simulate", "--config", config).stderr
    shutil.copytree(world / "workspace", tmp_path / "workspace")
    (tmp_path / "workspace" / "published.json").unlink()
    assert "no published run yet" in run_here(capfd, "pools", "simulate", "--config", config).stderr
    (tmp_path / "few").mkdir()
    write_sample_world(tmp_path / "few" / "tables", num_users=12, num_items=20)
    shutil.copy(config, tmp_path / "few" / "laserbatch.yaml")
    planted(tmp_path / "few", FIRST_DATE)
    monkeypatch.setattr(simulate, "MIN_TEXTS", 6)
    arguments = "--config", str(tmp_path / "few" / "laserbatch.yaml"), "--step-cost", str(world / "cost.yaml")
    done = run_here(capfd, "pools", "simulate", *arguments)
    assert done.returncode == 3
    assert "wrote too few texts on either side" in done.stderr
