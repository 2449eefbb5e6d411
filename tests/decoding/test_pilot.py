"""Pilots: how the climb goes on gains that are known, what is worth one, and that a real engine is counted right."""

import itertools

import numpy as np
import pytest
from test_budget import FREE, SOURCES, STEEP, cost, larger_is_better, pool_with

from laserbatch.pipeline.decoding.budget import PLAIN, Budget, choose_budget
from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine, GenerationRequest
from laserbatch.pipeline.decoding.expected_step import step_seconds
from laserbatch.pipeline.decoding.planning.pilot import (
    BOLD_ACCEPTANCE,
    FIRST_TEXTS,
    THRESHOLDS,
    PilotPlan,
    pilot_parts,
    plan_pilot,
    run_pilot,
)
from laserbatch.pipeline.decoding.planning.pilot_texts import PilotTexts, StepCounts
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import verifier_from
from laserbatch.retrieval_pools.calibration.estimates import Bootstrap
from laserbatch.retrieval_pools.index.budget_curve import KNOT_SHARES

LINEAR = {1: 0.01, 65: 0.01 * (1 + 64 * 0.05)}  # a token costs a twentieth of a step
BOLDER = tuple(Budget(size, BOLD_ACCEPTANCE) for size in (4, 8, 16, 32, 64))
FIRST = Budget(64, 0.5)


def written_texts(tokens_per_step: float, drafted: int, luck: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)) -> PilotTexts:
    """Four texts of 100 steps each, of which some gain more than others."""
    names = tuple(map(str, range(len(luck))))
    num_tokens = 100 * tokens_per_step * np.array(luck)
    return PilotTexts(names, num_tokens, 100 * np.tile(KNOT_SHARES[drafted], (len(luck), 1)))


def plan(start: int, bolder=BOLDER, **options) -> PilotPlan:
    return PilotPlan(cost(LINEAR), 1, FIRST, bolder, start, **options)


def writing(tokens_per_step: dict[int, float], first: float = 2.0):
    """A `write` that knows what each size gains, all trees being full, and a list of what it wrote."""
    written = []

    def write(budget: Budget, part: int) -> PilotTexts:
        written.append(budget)
        if budget == FIRST:
            return written_texts(first, 2)
        return written_texts(tokens_per_step[budget.max_draft_tokens], budget.max_draft_tokens)

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


def test_the_first_stays_where_it_is_surely_faster():
    first_speed = 2.0 / (1 + 2 * 0.05)
    for gain, expected in ((0.999, FIRST), (1.001, BOLDER[1])):
        write, _ = writing({4: 1.0, 8: first_speed * gain * (1 + 8 * 0.05), 16: 1.0})
        assert run_pilot(plan(1), write) == expected


def test_of_sizes_the_fastest_is_taken_and_another_threshold_only_where_it_is_surely_faster():
    def write(budget: Budget, part: int) -> PilotTexts:
        size, luck = budget.max_draft_tokens, (1.0, 1.0, 1.0, 1.0)
        gain = {8: 0.96, 16: 1.0, 32: 0.8, 64: 1.1}[size]
        if size in (16, 64):
            luck = (0.8, 1.2, 0.8, 1.2) if size == 16 else first_luck
        return written_texts(4 * gain * (1 + size * 0.05), size, luck)

    first_luck = (0.6, 1.4, 1.4, 0.6)
    chosen = run_pilot(plan(1), write)
    assert chosen == Budget(16, BOLD_ACCEPTANCE)  # faster than 8 by less than its error, but the sizes are alike
    by_size = {trial.max_draft_tokens: trial for trial in chosen.forecast.trials[1:]}
    assert by_size[8].error == pytest.approx(0.0) and by_size[16].error == pytest.approx(4 * 0.2 / 2, rel=0.1)
    first_luck = (0.8, 1.2, 0.8, 1.2)  # the same texts are lucky, so that the ratio is sure
    assert run_pilot(plan(1), write) == FIRST


def test_a_budget_that_may_be_slower_by_chance_does_not_end_the_climb():
    def write(budget: Budget, part: int) -> PilotTexts:
        size = budget.max_draft_tokens
        luck = (0.5, 1.5, 0.5, 1.5) if size == 16 else (1.0, 1.0, 1.0, 1.0)
        gain = {2: 0.3, 8: 0.8, 16: 0.75, 32: 1.0, 64: 0.9}[2 if budget == FIRST else size]
        return written_texts(4 * gain * (1 + size * 0.05), size, luck)

    assert run_pilot(plan(1), write) == Budget(32, BOLD_ACCEPTANCE)


def test_other_thresholds_are_tried_with_the_fastest_size():
    gains = {0.15: 1.2, 0.3: 1.4, 0.5: 1.0}
    written = []

    def write(budget: Budget, part: int) -> PilotTexts:
        written.append(budget)
        if budget == FIRST:
            return written_texts(1.5, 2)
        speed = gains[budget.min_acceptance] if budget.min_acceptance != BOLD_ACCEPTANCE else 1.0
        speed *= {8: 2.0, 16: 1.0, 4: 1.0}[budget.max_draft_tokens]
        return written_texts(speed * (1 + budget.max_draft_tokens * 0.05), budget.max_draft_tokens)

    assert run_pilot(plan(1, thresholds=THRESHOLDS), write) == Budget(8, 0.3)
    assert written[-3:] == [Budget(8, 0.15), Budget(8, 0.3), Budget(8, 0.5)]
    gains.update({0.15: 0.9, 0.03: 1.1})
    assert run_pilot(plan(1, thresholds=THRESHOLDS), write) == Budget(8, 0.03)


def test_more_is_written_only_under_budgets_that_may_be_the_fastest():
    written = []
    luck = (0.9, 1.1, 0.9, 1.1)

    def write(budget: Budget, part: int) -> PilotTexts:
        size = budget.max_draft_tokens
        written.append((part, budget))
        gain = {4: 1.0, 8: 1.02 if part == 0 else 0.9, 16: 0.7, 64: 0.5}[size]
        return written_texts(4 * gain * (1 + size * 0.05), size, luck if size == 8 else luck[::-1])

    chosen = run_pilot(plan(1), write, num_parts=4)
    assert written[:4] == [(0, budget) for budget in (FIRST, BOLDER[1], BOLDER[2], BOLDER[0])]
    assert sorted(written[4:6], key=str) == sorted([(1, BOLDER[0]), (1, BOLDER[1])], key=str)
    assert chosen == Budget(4, BOLD_ACCEPTANCE)  # what the first texts said was luck
    trials = {trial.max_draft_tokens: trial for trial in chosen.forecast.trials}
    assert trials[16].num_texts == trials[64].num_texts == 4 and trials[4].num_texts >= 8
    assert trials[4].speed_up == pytest.approx(4.0) == chosen.forecast.speed_up
    only_first = run_pilot(plan(1), write, num_parts=1)
    assert only_first == Budget(8, BOLD_ACCEPTANCE)


def test_nothing_more_is_written_once_the_fastest_is_sure():
    write, written = writing({4: 4.0, 8: 9.0, 16: 4.0})
    assert run_pilot(plan(1), write, num_parts=5) == Budget(8, BOLD_ACCEPTANCE)
    assert len(written) == len(set(written)) == 4


@pytest.mark.parametrize(
    ("gains", "may_be_plain", "expected"),
    [((1.3, 1.3), True, FIRST), ((1.3, 0.8, 0.5), True, PLAIN), ((1.3,), False, FIRST)],
)
def test_more_is_written_while_it_is_open_whether_to_draft_at_all(gains, may_be_plain, expected):
    written = []

    def write(budget: Budget, part: int) -> PilotTexts:
        written.append(part)
        return written_texts(gains[part] * (1 + 64 * 0.05), 64, (0.7, 1.3, 0.7, 1.3))

    plan = PilotPlan(cost(LINEAR), 1, FIRST, may_be_plain=may_be_plain)
    assert run_pilot(plan, write, num_parts=3) == expected
    assert written == list(range(len(gains)))


@pytest.mark.parametrize(
    ("num_texts", "sizes"), [(0, [0]), (5, [5]), (FIRST_TEXTS, [32]), (33, [32, 1]), (150, [32, 32, 64, 22])]
)
def test_each_part_of_a_pilot_is_as_large_as_all_before(num_texts, sizes):
    texts = list(range(num_texts))
    parts = pilot_parts(texts)
    assert [len(part) for part in parts] == sizes and [*itertools.chain(*parts)] == texts


def test_texts_that_one_trial_lacks_count_for_none():
    def write(budget: Budget, part: int) -> PilotTexts:
        texts = written_texts(4.0, budget.max_draft_tokens)
        return texts if budget == FIRST else texts.of({"0", "2", "3"})

    assert run_pilot(plan(1, bolder=BOLDER[:2]), write).forecast.trials[1].error == pytest.approx(0.0)


def test_a_gain_that_may_be_chance_is_not_drafted_for():
    lucky = written_texts(1.3 * (1 + 64 * 0.05), 64, (0.1, 1.9, 0.1, 1.9))
    chosen = run_pilot(PilotPlan(cost(LINEAR), 1, FIRST), lambda budget, part: lucky)
    assert chosen == PLAIN and "1.30 ± 0.5" in chosen.forecast.reason
    sure = written_texts(1.3 * (1 + 64 * 0.05), 64)
    assert run_pilot(PilotPlan(cost(LINEAR), 1, FIRST), lambda budget, part: sure) == FIRST


@pytest.mark.parametrize("batch_size", [1, 4])
def test_speeds_of_texts_are_those_of_their_steps(batch_size):
    step_cost = cost({1: 0.01, 20: 0.02, 300: 0.5}, batch_size)
    texts = written_texts(3.0, 5, (0.5, 1.0, 1.5, 1.0))
    texts = PilotTexts(texts.names, texts.num_tokens, np.stack([100 * KNOT_SHARES[size] for size in (0, 3, 8, 16)]))
    speeds = texts.speeds(step_cost, batch_size, Bootstrap(4, 0))
    cell = texts.cell(FIRST)
    assert speeds[0] == pytest.approx(batch_size * 3.0 / step_seconds(step_cost, batch_size, cell))
    weights = Bootstrap(4, 0).totals(np.eye(4)[0]), Bootstrap(4, 0).totals(np.eye(4)[1])
    assert weights[0][0] == weights[1][0] == 1
    for place in (1, 2, 3):  # what a resample would take, if it were all texts: to first order the same
        drawn = np.array([Bootstrap(4, 0).totals(row)[place] for row in np.eye(4)])
        counts = PilotTexts(texts.names, texts.num_tokens * drawn, texts.num_at_knots * drawn[:, None])
        found = counts.cell(FIRST)
        exact = batch_size * found.tokens_per_step / step_seconds(step_cost, batch_size, found)
        assert speeds[place] == pytest.approx(exact, rel=0.05)


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
    assert relaxed.thresholds == THRESHOLDS
    assert relaxed.start == int(np.argmax(np.array(gains) / costs))
    given = plan_pilot(cost(LINEAR), 1, pool_with(), is_relaxed=True, max_draft_tokens=10)
    assert given.bolder == (Budget(10, BOLD_ACCEPTANCE),) and given.first.max_draft_tokens == 10
    given = plan_pilot(cost(LINEAR), 1, pool_with(), is_relaxed=True, min_acceptance=0.33)
    assert {budget.min_acceptance for budget in (given.first, *given.bolder)} == {0.33} and not given.may_be_plain
    assert given.thresholds == ()


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
    found = counts.texts().cell(budget)
    num_steps = sum(result.num_steps for result in results)
    assert found.mean_drafted == pytest.approx(sum(result.num_drafted for result in results) / num_steps) and num_steps
    num_tokens = sum(len(result.token_ids) for result in results)
    assert found.tokens_per_step == pytest.approx(max(1.0, num_tokens / num_steps))
    assert counts.texts().names == ("0", "1", "2")
    assert counts.texts().num_at_knots.sum(axis=1).tolist() == [
        next(result.num_steps for result in results if result.request_id == name) for name in ("0", "1", "2")
    ]
    assert StepCounts().texts().cell(budget).tokens_per_step == 1.0
