"""A run's budgets: chosen once, stored in the manifest, and not measured if nothing is left to choose."""

import datetime
import json
from types import SimpleNamespace

import numpy as np
import pytest

from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages import budgets
from laserbatch.jobs.stages.budgets import budget_of, describe_budget, night_budgets
from laserbatch.jobs.stages.night import open_night
from laserbatch.pipeline.budget.choice import PLAIN, ChosenBudget
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.planning.plan import Shard
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.storage.figures import BudgetForecast
from laserbatch.retrieval_pools.step_cost import StepCost, StepPoint

DATE = datetime.date(2025, 3, 1)
CHEAP = StepCost(
    name="invented",
    steps=[StepPoint(batch_size=16, num_tokens=n, seconds=s) for n, s in ((16, 0.01), (1040, 0.02))],
)


@pytest.fixture
def world(tmp_path):
    write_sample_world(tmp_path / "tables", num_users=20, num_items=20)
    return tmp_path


def opened(world, decoding: str = "{}"):
    path = world / "laserbatch.yaml"
    path.write_text(f"workspace: workspace\ntables: {{path: tables}}\ndecoding: {decoding}\n")
    return open_night(load_settings(path), DATE)


def never() -> StepCost:
    pytest.fail("the cost of steps was measured")


def test_a_budget_is_chosen_once_and_read_back_by_a_resumed_run(world):
    first = night_budgets(opened(world), [], lambda: CHEAP)
    assert set(first) == {"user", "item"}
    assert first["user"].max_draft_tokens == 16 and first["user"].min_acceptance == 0.05
    resumed = opened(world)
    again = night_budgets(resumed, [], never)
    assert again == first
    assert resumed.manifest.generation.budgets["item"].forecast.step_cost == "invented"


@pytest.mark.parametrize(
    ("decoding", "expected"),
    [
        ("{max_draft_tokens: 8, min_acceptance: 0.2}", Budget(8, 0.2)),
        ("{max_draft_tokens: 0}", Budget(0, Budget().min_acceptance)),
        ("{drafters: []}", Budget(0, 1.0)),
    ],
)
def test_nothing_is_measured_where_nothing_is_left_to_choose(world, decoding, expected):
    assert night_budgets(opened(world, decoding), [], never) == dict.fromkeys(("user", "item"), expected)


def test_one_number_that_is_given_is_kept_and_the_other_one_chosen(world):
    assert night_budgets(opened(world, "{min_acceptance: 0.33}"), [], lambda: CHEAP)["user"] == Budget(16, 0.33)
    another = opened(world, "{max_draft_tokens: 5}")
    assert night_budgets(another, [], lambda: CHEAP)["user"] == Budget(5, 0.05)


def test_a_cost_that_was_measured_elsewhere_is_read_beside_the_configuration(world):
    (world / "cost.json").write_text(CHEAP.model_dump_json())
    night = opened(world, "{step_cost: cost.json}")
    night_budgets(night, [], never)
    assert night.manifest.generation.budgets["item"].forecast.step_cost == "invented"
    with pytest.raises(ConfigError, match=r"absent\.json is not there"):
        night_budgets(opened(world, "{step_cost: absent.json}"), [], never)


def test_budgets_survive_the_manifest_and_are_told_in_a_line(world):
    night = opened(world)
    night_budgets(night, [], lambda: CHEAP)
    recorded = json.loads(night.run.manifest_path.read_text())["budgets"]["user"]
    assert budget_of(night.manifest.generation.budgets["user"]) == Budget(16, 0.05)
    assert (recorded["max_draft_tokens"], recorded["min_acceptance"]) == (16, 0.05)
    assert recorded["forecast"]["reason"].startswith("a draft token costs up to 0.0")
    forecast = BudgetForecast("the fastest in replays")
    description = describe_budget(ChosenBudget(Budget(16, 0.05), forecast))
    assert description == "up to 16 draft tokens, acceptance at least 0.05 (the fastest in replays)"
    assert describe_budget(ChosenBudget(PLAIN, forecast)) == "drafting is off (the fastest in replays)"


def test_shards_spread_over_a_side_say_how_many_entities_have_a_previous_text(world, monkeypatch):
    night, shares = opened(world), {}

    def note(decoding, pool, step_cost, share_changed):
        shares[len(shares)] = share_changed
        return ChosenBudget(Budget(), BudgetForecast("noted"))

    monkeypatch.setattr(budgets, "side_budget", note)
    rows = {"a": [None, np.zeros(3, np.int32)], "b": [np.zeros(3, np.int32)] * 2}
    monkeypatch.setattr(
        budgets, "read_shard", lambda path: [SimpleNamespace(previous_ids=previous) for previous in rows[path.name]]
    )
    night_budgets(night, [Shard(name, "item", "", 2, name, "") for name in rows], lambda: CHEAP)
    assert list(shares.values()) == [0.0, 0.75]  # users have no shards
