"""Forecasts of whole runs: the schedule is the engine's own, and what is known by hand comes out."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import PromptLookupDrafter, requests_for, tiny_engine, tiny_model

from laserbatch.pipeline.decoding.budget import PLAIN, Budget, BudgetForecast, Trial, choose_budget
from laserbatch.pipeline.decoding.planning.run_forecast import (
    RunTexts,
    judged_on_run,
    live_step_seconds,
    run_seconds,
    run_speed_up,
    written_seconds,
)
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.retrieval_pools.index.budget_curve import (
    DRAFT_TOKENS,
    MIN_ACCEPTANCES,
    SIZE_KNOTS,
    BudgetCell,
    BudgetCurve,
    ReplayedBudgets,
)
from laserbatch.retrieval_pools.step_cost import DraftCost, StepCost, StepPoint

BATCH_SIZES = (1, 2, 4)
BUDGET = Budget(8, 0.3)


def replayed(tokens_per_step: float) -> ReplayedBudgets:
    """Every budget drafts eight tokens a step and gains the same."""
    shares = tuple(float(size == 8) for size in SIZE_KNOTS)
    cells = [
        BudgetCell(max_draft_tokens=size, min_acceptance=least, tokens_per_step=tokens_per_step, size_shares=shares)
        for size in DRAFT_TOKENS
        for least in MIN_ACCEPTANCES
    ]
    return ReplayedBudgets(num_texts=10, num_tokens=100, cells=cells)


CURVE = BudgetCurve(sources=("pool",), new=replayed(2.0), changed=replayed(4.0))


def cost(fixed_s: float, token_s: float) -> StepCost:
    """Steps of a fixed duration and so much more for each packed token."""
    steps = [
        StepPoint(batch_size=size, num_tokens=number, seconds=fixed_s + token_s * number)
        for size in BATCH_SIZES
        for number in (size, 65 * size)
    ]
    return StepCost(name="invented", steps=tuple(steps))


def texts(num_texts: int, num_tokens: int, prompt: int = 0, shard_size: int = 1000, changed: bool = False) -> RunTexts:
    return RunTexts(np.full(num_texts, prompt), np.full(num_texts, num_tokens), np.full(num_texts, changed), shard_size)


def test_a_finished_shard_should_have_taken_its_prompts_and_its_steps():
    prompts = [np.arange(number, number + 100) for number in range(0, 400, 100)]
    seconds = written_seconds(cost(0.01, 0.001), 4, prompts, [10, 10, 10, 10], mean_drafted=8.0)
    assert seconds == pytest.approx(400 * 0.001 + 10 * (0.01 + 4 * 9 * 0.001))


def test_a_long_run_without_prompts_is_as_fast_as_its_steps():
    step_cost = cost(0.01, 0.0)
    assert run_speed_up(step_cost, 4, texts(400, 100), CURVE, BUDGET) == pytest.approx(2.0)
    assert run_speed_up(step_cost, 4, texts(400, 100, changed=True), CURVE, BUDGET) == pytest.approx(4.0)
    assert run_speed_up(step_cost, 4, texts(400, 100), CURVE, PLAIN) == 1.0
    dear = cost(0.01, 0.001)
    chosen = choose_budget(dear, 4, pool=_Pool(), sources=("pool",))
    assert run_speed_up(dear, 4, texts(400, 100), CURVE, chosen) == pytest.approx(chosen.forecast.speed_up)


class _Pool:
    budgets, is_calibrated = CURVE, True


def test_prompts_take_as_long_with_drafts_as_without():
    step_cost = cost(0.01, 0.001)
    plain_s = 100 * (0.01 + 4 * 0.001) + 4 * 500 * 0.001
    drafted_s = 50 * (0.01 + 4 * 9 * 0.001) + 4 * 500 * 0.001
    found = run_speed_up(step_cost, 4, texts(4, 100, prompt=500), CURVE, BUDGET)
    assert found == pytest.approx(plain_s / drafted_s)


def test_the_end_of_a_shard_costs_what_few_texts_cost():
    step_cost = cost(0.01, 0.001)
    lengths = np.array([100, 100, 100, 1000])
    uneven = replace(texts(4, 1), num_tokens=lengths)
    plain_s = 100 * 0.014 + 900 * 0.011
    drafted_s = 50 * (0.01 + 36 * 0.001) + 450 * (0.01 + 9 * 0.001)
    assert run_speed_up(step_cost, 4, uneven, CURVE, BUDGET) == pytest.approx(plain_s / drafted_s)
    alone = replace(texts(4, 100), shard_size=1)
    assert run_seconds(live_step_seconds(step_cost, 4, CURVE.new.cells[0]), np.full(4, 50.0), np.zeros(4), 1) == (
        pytest.approx(4 * 50 * 0.019)
    )
    assert run_speed_up(step_cost, 4, alone, CURVE, BUDGET) == pytest.approx(0.011 * 100 / (0.019 * 50))


def test_more_texts_of_the_same_take_as_much_longer():
    seconds = live_step_seconds(cost(0.01, 0.001), 4, CURVE.new.cells[0])
    steps = np.random.default_rng(0).integers(10, 50, 20_000).astype(float)
    whole = run_seconds(seconds, steps, np.full(20_000, 0.1), 64)
    parts = sum(run_seconds(seconds, part, np.full(len(part), 0.1), 64) for part in np.split(steps, 10))
    assert whole == pytest.approx(parts, rel=0.02)


@pytest.mark.parametrize("shard_size", [7, 20])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("is_drafted", [False, True])
def test_the_schedule_is_that_of_the_engine(batch_size, shard_size, is_drafted):
    model, rng = tiny_model(), np.random.default_rng(1)
    prompts = [rng.integers(6, 96, 12).astype(np.int32) for _ in range(20)]
    requests = [replace(one, max_new_tokens=int(rng.integers(1, 40))) for one in requests_for(prompts, 1)]
    engine = tiny_engine(model, batch_size=batch_size)
    num_live: list[int] = []
    forward = engine.runner.forward

    def counted(feeds, trees):
        num_live.append(len(feeds))
        return forward(feeds, trees)

    engine.runner.forward = counted
    num_steps: dict[str, int] = {}
    for start in range(0, len(requests), shard_size):
        drafter = PromptLookupDrafter() if is_drafted else None
        for result in engine.generate(requests[start : start + shard_size], drafter, Greedy()):
            num_steps[result.request_id] = result.num_steps
    steps = np.array([num_steps[request.request_id] for request in requests], float)
    no_prompts = np.zeros(len(steps))
    assert run_seconds(np.ones(batch_size), steps, no_prompts, shard_size) == len(num_live)
    by_live = np.arange(1.0, batch_size + 1)
    assert run_seconds(by_live**2, steps, no_prompts, shard_size) == np.square(num_live).sum()


def test_what_prompts_share_is_computed_once():
    template, other = np.arange(40, dtype=np.int32), np.arange(50, 60, dtype=np.int32)
    prompts = [np.append(template, 90), np.append(template, 91), other, np.append(template, 92)]
    found = RunTexts.of(prompts, [5, 5, 5, 5], [True, False, False, True], shard_size=2, batch_size=2)
    assert found.num_prompt_tokens.tolist() == [41, 1, 10, 1]
    forgotten = RunTexts.of(prompts, [5, 5, 5, 5], [True, False, False, True], shard_size=2, batch_size=1)
    assert forgotten.num_prompt_tokens.tolist() == [41, 1, 10, 41]
    assert found.has_previous.tolist() == [True, False, False, True] and found.num_tokens.tolist() == [5] * 4


def test_plain_decoding_does_not_draft():
    looking = cost(0.01, 0.0).model_copy(update={"draft": DraftCost(seconds_per_step=0.01)})
    assert run_speed_up(looking, 4, texts(400, 100), CURVE, BUDGET) == pytest.approx(2.0 * 0.01 / 0.02)


def chosen_for(speed_up: float, **changes) -> Budget:
    forecast = BudgetForecast("the fastest", "invented", 4, tokens_per_step=2.0, mean_drafted=8.0, speed_up=speed_up)
    return replace(BUDGET, forecast=replace(forecast, **changes))


def test_a_budget_is_told_what_its_run_gains():
    step_cost, long_prompts = cost(0.01, 0.0001), texts(4, 100, prompt=500)
    judged = judged_on_run(chosen_for(1.9), step_cost, 4, long_prompts, CURVE, may_be_plain=True)
    assert judged == BUDGET and judged.forecast.speed_up == 1.9
    assert judged.forecast.run_speed_up == run_speed_up(step_cost, 4, long_prompts, CURVE, BUDGET) < 1.5


def test_what_a_pilot_saw_comes_before_the_replays():
    step_cost, trial = cost(0.01, 0.0), Trial(8, 0.3, 3.0, 8.0, 3.0)
    piloted = chosen_for(3.0, tokens_per_step=3.0, trials=(trial,))
    for curve in (CURVE, None):
        judged = judged_on_run(piloted, step_cost, 4, texts(400, 300), curve, may_be_plain=True)
        assert judged.forecast.run_speed_up == pytest.approx(3.0)


def test_what_is_slower_than_plain_decoding_on_the_whole_run_is_not_drafted():
    dear = cost(0.01, 0.005)
    judged = judged_on_run(chosen_for(1.2), dear, 4, texts(4, 100), CURVE, may_be_plain=True)
    assert judged == PLAIN and judged.forecast.speed_up == judged.forecast.run_speed_up == 1.0
    assert "up to 8 draft tokens above 0.3 would be 0." in judged.forecast.reason
    kept = judged_on_run(chosen_for(1.2), dear, 4, texts(4, 100), CURVE, may_be_plain=False)
    assert kept == BUDGET and kept.forecast.run_speed_up < 1


def test_what_was_never_forecast_is_left_as_it_is():
    step_cost, some = cost(0.01, 0.0), texts(4, 100)
    unknown = chosen_for(None, tokens_per_step=None)
    for budget in (BUDGET, unknown, PLAIN):
        assert judged_on_run(budget, step_cost, 4, some, CURVE, may_be_plain=True).forecast == budget.forecast
    nothing = texts(0, 1)
    assert judged_on_run(chosen_for(1.5), step_cost, 4, nothing, CURVE, may_be_plain=True).forecast.run_speed_up is None
