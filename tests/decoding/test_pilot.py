"""Pilots: how the climb goes on gains that are known, what is worth one, and that a real engine is counted right."""

import numpy as np
import pytest
from test_budget import FREE, SOURCES, STEEP, cost, larger_is_better, pool_with, shares

from pipeline.decoding.budget import LEAST_GAIN, PLAIN, Budget, choose_budget
from pipeline.decoding.drafters import RetrievalDrafter
from pipeline.decoding.engine import Engine, GenerationRequest
from pipeline.decoding.pilot import BOLD_ACCEPTANCE, PilotPlan, StepCounts, plan_pilot, run_pilot
from pipeline.decoding.settings import DecodingSettings
from pipeline.decoding.verifiers import verifier_from
from retrieval_pools.budget_curve import BudgetCell

LINEAR = {1: 0.01, 65: 0.01 * (1 + 64 * 0.05)}  # a token costs a twentieth of a step
BOLDER = tuple(Budget(size, BOLD_ACCEPTANCE) for size in (4, 8, 16, 32, 64))
FIRST = Budget(64, 0.5)


def cell(budget: Budget, tokens_per_step: float, drafted: float) -> BudgetCell:
    return BudgetCell(
        max_draft_tokens=budget.max_draft_tokens,
        min_acceptance=budget.min_acceptance,
        tokens_per_step=tokens_per_step,
        size_shares=shares(drafted),
    )


def plan(start: int, bolder=BOLDER, **options) -> PilotPlan:
    return PilotPlan(cost(LINEAR), 1, FIRST, bolder, start, **options)


def writing(tokens_per_step: dict[int, float], first: float = 2.0):
    """A `write` that knows what each size gains, all trees being full, and a list of what it wrote."""
    written = []

    def write(budget: Budget) -> BudgetCell:
        written.append(budget)
        if budget == FIRST:
            return cell(budget, first, 2)
        return cell(budget, tokens_per_step[budget.max_draft_tokens], budget.max_draft_tokens)

    return write, written


def test_bolder_budgets_are_tried_upwards_while_that_gains():
    write, written = writing({8: 4.0, 16: 8.0, 32: 20.0, 64: 21.0})
    chosen = run_pilot(plan(1), write)
    assert written == [FIRST, *BOLDER[1:]]
    assert chosen == Budget(32, BOLD_ACCEPTANCE)
    assert chosen.forecast.speed_up == pytest.approx(20.0 / (1 + 32 * 0.05))
    assert [trial.max_draft_tokens for trial in chosen.forecast.trials] == [64, 8, 16, 32, 64]


def test_downwards_where_upwards_does_not_gain():
    write, written = writing({4: 4.0, 8: 5.0, 16: 5.0, 32: 5.0})
    chosen = run_pilot(plan(2), write)
    assert written == [FIRST, BOLDER[2], BOLDER[3], BOLDER[1], BOLDER[0]]
    assert chosen == Budget(8, BOLD_ACCEPTANCE)


def test_the_first_stays_where_a_bolder_one_is_hardly_faster():
    first_speed = 2.0 / (1 + 2 * 0.05)
    for gain, expected in ((LEAST_GAIN * 0.999, FIRST), (LEAST_GAIN * 1.001, BOLDER[1])):
        write, _ = writing({4: 1.0, 8: first_speed * gain * (1 + 8 * 0.05), 16: 1.0})
        assert run_pilot(plan(1), write) == expected


def test_plain_decoding_where_nothing_tried_is_worth_its_cost():
    write, _ = writing(dict.fromkeys((4, 8, 16), 1.1), first=1.1)
    chosen = run_pilot(plan(1), write)
    assert chosen == PLAIN and "no budget that a pilot tried" in chosen.forecast.reason
    assert len(chosen.forecast.trials) == 4
    assert run_pilot(plan(1, may_be_plain=False), write) == FIRST


def test_what_is_tried():
    relaxed = plan_pilot(cost(LINEAR, 4), 6, pool_with(), is_relaxed=True)
    assert relaxed.first == choose_budget(cost(LINEAR, 4), 4, pool_with())
    assert relaxed.bolder == BOLDER and relaxed.batch_size == 4
    gains = [1 + np.log2(1 + size) * (1 - BOLD_ACCEPTANCE) for size in (4, 8, 16, 32, 64)]
    costs = [1 + 0.05 * size * (1 - BOLD_ACCEPTANCE) for size in (4, 8, 16, 32, 64)]
    assert relaxed.start == int(np.argmax(np.array(gains) / costs))
    given = plan_pilot(cost(LINEAR), 1, pool_with(), is_relaxed=True, max_draft_tokens=10)
    assert given.bolder == (Budget(10, BOLD_ACCEPTANCE),) and given.first.max_draft_tokens == 10
    given = plan_pilot(cost(LINEAR), 1, pool_with(), is_relaxed=True, min_acceptance=0.33)
    assert {budget.min_acceptance for budget in (given.first, *given.bolder)} == {0.33} and not given.may_be_plain


def test_what_is_not_worth_a_pilot():
    assert plan_pilot(cost(LINEAR), 1, pool_with(), is_relaxed=False) is None  # replays are believed
    assert plan_pilot(cost(LINEAR), 1, pool_with(), (), is_relaxed=True) is None
    for given in ({"max_draft_tokens": 0}, {"max_draft_tokens": 8, "min_acceptance": 0.1}):
        assert plan_pilot(cost(LINEAR), 1, pool_with(), is_relaxed=True, **given) is None
    assert plan_pilot(cost(STEEP), 1, is_relaxed=True) is None  # nothing was replayed, and drafting is too dear
    unreplayed = plan_pilot(cost(FREE), 1, is_relaxed=False)
    assert unreplayed.first == choose_budget(cost(FREE), 1) and unreplayed.bolder == ()
    assert plan_pilot(cost(FREE), 1, pool_with(new=larger_is_better), SOURCES, is_relaxed=False) is None


def test_the_steps_of_an_engine_are_counted_as_its_results_count_them():
    engine = Engine.from_pretrained("sample", DecodingSettings(dtype="float32", batch_size=2, max_new_tokens=40))
    prompt = np.array(engine.tokenizer("a film about a long journey and a long journey home")["input_ids"], np.int32)
    budget = Budget(5, 0.01)
    counts = StepCounts()
    requests = [GenerationRequest(str(i), prompt[i:], max_new_tokens=40) for i in range(3)]
    drafter = RetrievalDrafter(None, ("prompt", "output"), 5, 0.01)
    results = list(engine.generate(requests, drafter, verifier_from(engine.settings), counts, budget))
    found = counts.cell(budget)
    num_steps = sum(result.num_steps for result in results)
    assert found.mean_drafted == pytest.approx(sum(result.num_drafted for result in results) / num_steps) and num_steps
    num_tokens = sum(len(result.token_ids) for result in results)
    assert found.tokens_per_step == pytest.approx(max(1.0, num_tokens / num_steps))
    assert StepCounts().cell(budget).tokens_per_step == 1.0
