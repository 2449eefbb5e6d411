"""Step costs: reading, interpolation, and refusals with advice."""

import json

import numpy as np
import pytest

from laserbatch.pipeline.budget.choice import read_step_cost
from laserbatch.pipeline.errors import ConfigError, LaserbatchError
from laserbatch.retrieval_pools.step_cost import DraftCost, StepCost, StepPoint

POINTS = [(8, 8, 0.01), (8, 24, 0.02), (8, 40, 0.06), (1, 1, 0.005), (1, 65, 0.006)]
DATA = {"name": "a card", "steps": [{"batch_size": b, "num_tokens": n, "seconds": s} for b, n, s in POINTS]}


def test_seconds_are_linear_between_points_flat_before_and_go_on_behind():
    cost = StepCost.model_validate(DATA)
    assert cost.batch_sizes == (1, 8)
    assert cost.seconds(8, np.array([4, 8, 16, 24, 40, 48])) == pytest.approx([0.01, 0.01, 0.015, 0.02, 0.06, 0.08])


def test_a_padded_step_costs_what_its_bucket_costs():
    cost = StepCost.model_validate(DATA | {"padded_to": [8, 24, 40]})
    steps = np.array([4, 8, 8.0000001, 9, 24, 25, 40, 48])
    assert cost.seconds(8, steps) == pytest.approx([0.01, 0.01, 0.01, 0.02, 0.02, 0.06, 0.06, 0.08])
    assert cost.plain_seconds(8) == pytest.approx(0.01)


def test_a_prompts_tokens_cost_the_slope_of_the_curve_though_steps_are_padded():
    steps = [(4, 4, 0.1), (4, 64, 0.7)]
    data = {"steps": [{"batch_size": b, "num_tokens": n, "seconds": s} for b, n, s in steps], "padded_to": [4, 64, 128]}
    assert StepCost.model_validate(data).text_seconds(4, 10, 0, 50) == pytest.approx(10 * 0.1 / 4 + 50 * 0.01)


def test_drafting_costs_a_call_its_sequences_and_its_tokens():
    draft = {"seconds_per_step": 0.1, "seconds": 0.02, "seconds_per_token": 0.003}
    cost = StepCost.model_validate(DATA | {"draft": draft})
    assert cost.draft_seconds(8, np.array([0.0, 4.0])) == pytest.approx([0.1 + 0.16, 0.1 + 0.16 + 0.096])


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_file_is_read_as_yaml_or_json(tmp_path, suffix):
    path = tmp_path / f"cost.{suffix}"
    path.write_text(json.dumps(DATA))
    assert read_step_cost(path) == StepCost.model_validate(DATA)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: []", "at least 1"),
        ("- 1", "not a step cost"),
        ("steps: [{batch_size: 1, num_tokens: 1}]", "steps.0.seconds: the key is missing"),
        ("steps: [{batch_size: 1, num_tokens: 1, seconds: 0}]", "greater than 0"),
        ("steps: [{batch: 1, num_tokens: 1, seconds: 1}]", "steps.0.batch: no such key; did you mean 'batch_size'"),
        ("name: one\nname: other", "the key name twice, in lines 1 and 2"),
        ("steps: [{batch_size: 4, num_tokens: 1, seconds: 1}]", "batch_size 4 has one point"),
        (
            "steps: [{batch_size: 4, num_tokens: 1, seconds: 1}, {batch_size: 4, num_tokens: 1, seconds: 2}]",
            "two points",
        ),
        ("steps: [", "is not YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, text, message):
    path = tmp_path / "cost.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_step_cost(path)


def test_a_file_that_is_not_there_and_a_batch_that_was_not_measured_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml is not there; expected, for example, .*num_tokens: 256"):
        read_step_cost(tmp_path / "nowhere.yaml")
    with pytest.raises(LaserbatchError, match="'a card' has no batch size 64; it has 1, 8"):
        StepCost.model_validate(DATA).seconds(64, np.array([64]))


def test_a_text_takes_its_share_of_its_steps_and_its_prompt_as_further_tokens():
    points = [StepPoint(batch_size=4, num_tokens=num, seconds=0.1 + num / 100) for num in (4, 64)]
    cost = StepCost(steps=points, draft=DraftCost(seconds_per_step=0.02, seconds_per_token=0.001))
    assert cost.text_seconds(4, 10, 0, 0) == pytest.approx(10 * 0.14 / 4)
    drafted = 10 * (0.1 + 4 * 3 / 100 + 0.02 + 4 * 0.001 * 2) / 4
    assert cost.text_seconds(4, 10, 20, 50) == pytest.approx(drafted + 0.5)


def test_steps_of_longer_texts_cost_what_their_context_adds():
    points = [StepPoint(batch_size=size, num_tokens=num, seconds=size * num / 100) for size in (2, 4) for num in (4, 8)]
    cost = StepCost(steps=points, context_tokens=50, seconds_per_context_token=0.001)
    assert cost.at_context(150).seconds(4, np.array([4, 8])).tolist() == pytest.approx([0.16 + 0.4, 0.32 + 0.4])
    assert cost.at_context(150).at_context(50).seconds(4, np.array([8]))[0] == pytest.approx(0.32)
    assert cost.at_context(0).seconds(2, np.array([4]))[0] == pytest.approx(0.008)  # never below a tenth of it
    between = cost.seconds_between(3, np.array([0, 3]), 150)
    assert between.tolist() == pytest.approx((cost.seconds_between(3, np.array([0, 3])) + 0.3).tolist())
    without = StepCost(steps=points)
    assert without.at_context(900).steps == without.steps
    of_drafts = cost.model_copy(update={"seconds_per_draft_context_token": 0.01})
    longer_s = of_drafts.at_context(150).seconds(4, np.array([4, 8]))
    assert longer_s.tolist() == pytest.approx([0.16 + 0.4, 0.32 + 0.4 + 4 * 0.01 * 100])
    assert of_drafts.seconds_between(3, np.array([3]), 150)[0] == pytest.approx(between[1] + 3 * 0.01 * 100)
