"""A run's budgets: chosen once, kept in the manifest, never measured where nothing is left to choose."""

import datetime
import json
from types import SimpleNamespace

import numpy as np
import pytest

from laserbatch.jobs.budgets import budget_of, describe_budget, night_budgets, num_pilot_texts, run_texts
from laserbatch.jobs.night import open_night
from laserbatch.jobs.settings import load_settings
from laserbatch.pipeline.decoding.budget import PLAIN, Budget, BudgetForecast
from laserbatch.pipeline.decoding.planning.pilot_texts import PilotTexts
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import RunFailed
from laserbatch.pipeline.knowledge.entities import iter_entities
from laserbatch.pipeline.planning.plan import PlannedRow, Shard
from laserbatch.pipeline.planning.planner import plan_side
from laserbatch.pipeline.planning.previous import PreviousKnowledge
from laserbatch.pipeline.planning.prompting import prompt_renderer
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.budget_curve import KNOT_SHARES
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


class Cheap:
    """A worker whose steps cost little, and whose texts gain what their budget allows."""

    def __init__(self):
        self.piloted = []

    def step_cost(self) -> StepCost:
        return CHEAP

    def pilot(self, side, rows, budget) -> PilotTexts:
        self.piloted.append((side, len(rows), budget))
        num_tokens = np.full(len(rows), 1 + budget.max_draft_tokens / 2)
        names = tuple(f"{number:03}" for number in range(len(rows)))
        return PilotTexts(names, num_tokens, np.tile(KNOT_SHARES[budget.max_draft_tokens], (len(rows), 1)))


class Deadly(Cheap):
    def pilot(self, side, rows, budget) -> PilotTexts:
        raise RunFailed("2 workers died")


class Never:
    def step_cost(self):
        pytest.fail("the cost of steps was measured")


def test_a_budget_is_chosen_once_and_read_back_by_a_resumed_run(world):
    first = night_budgets(opened(world), [], Cheap())
    assert set(first) == {"user", "item"}
    assert first["user"].max_draft_tokens == 16 and first["user"].min_acceptance == 0.05
    resumed = opened(world)
    again = night_budgets(resumed, [], Never())
    assert again == first
    assert again["user"].forecast == first["user"].forecast
    assert resumed.manifest.budgets["item"]["forecast"]["step_cost"] == "invented"


@pytest.mark.parametrize(
    ("decoding", "expected"),
    [
        ("{max_draft_tokens: 8, min_acceptance: 0.2}", Budget(8, 0.2)),
        ("{max_draft_tokens: 0}", Budget(0, Budget().min_acceptance)),
        ("{drafters: []}", Budget()),  # nothing to draft from: the number does not matter
    ],
)
def test_nothing_is_measured_where_nothing_is_left_to_choose(world, decoding, expected):
    assert night_budgets(opened(world, decoding), [], Never()) == dict.fromkeys(("user", "item"), expected)


def test_one_number_that_is_given_is_kept_and_the_other_one_chosen(world):
    assert night_budgets(opened(world, "{min_acceptance: 0.33}"), [], Cheap())["user"] == Budget(16, 0.33)
    another = opened(world, "{max_draft_tokens: 5}")
    assert night_budgets(another, [], Cheap())["user"] == Budget(5, 0.05)


def test_a_cost_that_was_measured_elsewhere_is_read_beside_the_configuration(world):
    (world / "cost.json").write_text(CHEAP.model_dump_json())
    chosen = night_budgets(opened(world, "{step_cost: cost.json}"), [], Never())
    assert chosen["item"].forecast.step_cost == "invented"
    with pytest.raises(PoolError, match=r"absent\.json cannot be read"):
        night_budgets(opened(world, "{step_cost: absent.json}"), [], Never())


def test_budgets_survive_the_manifest_and_are_told_in_a_line(world):
    night = opened(world)
    night_budgets(night, [], Cheap())
    kept = json.loads(night.run.manifest_path.read_text())["budgets"]["user"]
    assert budget_of(kept) == Budget(16, 0.05)
    told = describe_budget(budget_of(kept))
    assert told.startswith("up to 16 draft tokens above 0.05 (a draft token costs up to 0.0")
    assert describe_budget(PLAIN) == "nothing is drafted"


@pytest.mark.parametrize(
    ("setting", "num_rows", "expected"),
    [(None, 1599, 0), (None, 1600, 16), (None, 10**6, 512), (0, 10**6, 0), (5, 100, 5), (5, 3, 3)],
)
def test_a_pilot_is_a_small_part_of_a_run_or_as_large_as_asked_for(setting, num_rows, expected):
    assert num_pilot_texts(DecodingSettings(num_pilot_texts=setting), num_rows) == expected


def test_a_pilot_writes_rows_from_all_over_a_side_and_its_budget_is_kept_with_all_that_it_tried(world):
    night = opened(world, "{num_pilot_texts: 6}")
    plan = plan_side(
        "item",
        iter_entities(night.tables, "item"),
        night.tables.entities("item").schema.field("item_id").type,
        render=prompt_renderer("item", night.settings.knowledge, night.settings.decoding, night.settings.model_dir),
        previous=PreviousKnowledge(None),
        shard_size=7,
        batch_size=16,
        run_dir=night.run.root,
    )
    worker = Cheap()
    chosen = night_budgets(night, plan.shards, worker)
    assert worker.piloted == [("item", 6, Budget(16, 0.05))]  # a first night: there are no replays to be bolder than
    assert chosen["item"] == Budget(16, 0.05) and chosen["user"] == Budget(16, 0.05)
    (trial,) = chosen["item"].forecast.trials
    assert trial.tokens_per_step == 9.0 and trial.speed_up == chosen["item"].forecast.speed_up > 1
    resumed = night_budgets(opened(world, "{num_pilot_texts: 6}"), plan.shards, Never())
    assert resumed["item"].forecast == chosen["item"].forecast
    night.manifest.budgets = {}
    without = night_budgets(night, plan.shards, Deadly())  # a row that workers die on may be among a pilot's
    assert without["item"] == chosen["item"] and not without["item"].forecast.trials


def row(num_prompt: int, num_previous: int | None) -> PlannedRow:
    previous_ids = None if num_previous is None else np.zeros(num_previous, np.int32)
    return PlannedRow("u", np.arange(num_prompt, dtype=np.int32) * num_prompt, 0, 0, "", previous_ids, None)


def test_a_runs_texts_are_as_long_as_their_entities_had_before_or_as_the_pools():
    shards = [Shard(str(number), "user", "", 3, "", "") for number in range(2)]
    rows = [row(5, 40), row(7, None), row(4, 900)]
    pool = SimpleNamespace(manifest=SimpleNamespace(num_texts=2, num_tokens=120))
    decoding = DecodingSettings(max_new_tokens=512)
    found = run_texts(rows, shards, pool, decoding)
    assert found.num_tokens.tolist() == [41, 61, 512] and found.has_previous.tolist() == [True, False, True]
    assert found.num_prompt_tokens.tolist() == [5, 6, 3] and found.shard_size == 3  # they share their first token
    assert run_texts(rows, shards, None, decoding).num_tokens.tolist() == [41, 471, 512]
    assert run_texts([row(5, None)], shards, None, decoding) is None


def test_the_gain_of_the_whole_run_is_told_beside_that_of_full_batches():
    forecast = BudgetForecast("the fastest of the replays", "invented", 16, 2.0, 4.0, 2.5, run_speed_up=1.3)
    told = describe_budget(Budget(32, 0.15, forecast))
    assert told.endswith("(the fastest of the replays; 2.50 times plain in full batches, 1.30 times in this run)")
