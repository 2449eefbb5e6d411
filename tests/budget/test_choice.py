"""Choice of budgets: solved for known costs and replays; given values are kept; unknown costs mean few drafts."""

from types import SimpleNamespace

import numpy as np
import pytest

from laserbatch.pipeline.budget.choice import (
    MAX_RELAXED_ACCEPTANCE,
    PLAIN,
    budget_step_cost,
    configured_budget,
    side_budget,
    step_seconds,
)
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.retrieval_pools.index.calibration_record import (
    DRAFT_TOKENS,
    MIN_ACCEPTANCES,
    SIZE_KNOTS,
    BudgetCell,
    BudgetCurve,
    ReplayedBudgets,
)
from laserbatch.retrieval_pools.step_cost import DraftCost, StepCost, StepPoint

SOURCES = ("previous", "prompt", "output", "pool")
FREE = {1: 0.01, 2: 0.01, 65: 0.01}
STEEP = {1: 0.01, 2: 0.02, 65: 0.65}  # a draft token costs as much as a plain step
GEMV = {1: 0.01, 2: 0.03, 65: 0.03}  # the first draft token costs two plain steps, and further ones nothing


def cost(points: dict[int, float], batch_size: int = 1, draft: DraftCost = DraftCost()) -> StepCost:
    steps = [
        StepPoint(batch_size=batch_size, num_tokens=batch_size * number, seconds=seconds)
        for number, seconds in points.items()
    ]
    return StepCost(name="invented", steps=steps, draft=draft)


def shares(mean: float) -> tuple[float, ...]:
    """The shares of trees that all have `mean` tokens."""
    return tuple(float(np.interp(mean, SIZE_KNOTS, row)) for row in np.eye(len(SIZE_KNOTS)))


def replayed(pace, sizes=lambda size, least: shares(size * (1 - least))) -> ReplayedBudgets:
    cells = [
        BudgetCell(
            max_draft_tokens=size,
            min_acceptance=least,
            tokens_per_step=pace(size, least),
            size_shares=sizes(size, least),
        )
        for size in DRAFT_TOKENS
        for least in MIN_ACCEPTANCES
    ]
    return ReplayedBudgets(num_texts=10, num_tokens=100, cells=cells)


def larger_is_better(size: int, least: float) -> float:
    return 1 + np.log2(1 + size) * (1 - least)


def pool_with(new=larger_is_better, changed=None, sources=SOURCES, is_calibrated=True):
    curve = BudgetCurve(sources=sources, new=replayed(new), changed=None if changed is None else replayed(changed))
    return SimpleNamespace(budgets=curve, is_calibrated=is_calibrated, manifest=SimpleNamespace(num_texts=9))


def choose_budget(step_cost, batch_size, pool=None, sources=SOURCES, *, share_changed=0.0, is_relaxed=False, **fields):
    verifier = "relaxed" if is_relaxed else "greedy"
    decoding = DecodingSettings(batch_size=batch_size, drafters=sources, verifier=verifier, **fields)
    return side_budget(decoding, pool, step_cost, share_changed)


def test_free_tokens_are_drafted_to_the_last_and_dear_ones_not_at_all():
    free = choose_budget(cost(FREE), 1, pool_with())
    assert free.budget == Budget(64, MIN_ACCEPTANCES[0])
    assert free.forecast.speed_up == pytest.approx(free.forecast.tokens_per_step)
    dear = choose_budget(cost(STEEP), 1, pool_with())
    assert dear.budget == PLAIN and dear.forecast.speed_up == 1.0


def test_a_relaxed_rule_is_offered_more_than_replays_would_have():
    pool = pool_with(new=lambda size, least: 1 + least)
    assert choose_budget(cost(FREE), 1, pool).budget.min_acceptance == MIN_ACCEPTANCES[-1]
    assert choose_budget(cost(FREE), 1, pool, is_relaxed=True).budget.min_acceptance == MAX_RELAXED_ACCEPTANCE
    assert choose_budget(cost(FREE), 1, pool, is_relaxed=True, min_acceptance=0.5).budget.min_acceptance == 0.5


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_the_best_budget_is_that_of_the_plain_formula_where_all_trees_are_alike(batch_size):
    curve = cost({1: 0.01, 9: 0.012, 65: 0.05}, batch_size, DraftCost(seconds=1e-5, seconds_per_token=1e-6))
    pool = pool_with(new=lambda size, least: 1 + np.log2(1 + size) * (1 - least) * 0.5)
    chosen = choose_budget(curve, batch_size, pool).budget

    def speed(cell: BudgetCell) -> float:
        seconds = float(curve.seconds(batch_size, np.array(batch_size * (1 + cell.mean_drafted))))
        draft = batch_size * (1e-5 + 1e-6 * cell.mean_drafted)
        return batch_size * cell.tokens_per_step / (seconds + draft)

    best = max(map(speed, pool.budgets.new.cells))
    (cell,) = [c for c in pool.budgets.new.cells if (c.max_draft_tokens, c.min_acceptance) == (
        chosen.max_draft_tokens, chosen.min_acceptance)]  # fmt: skip
    assert speed(cell) == pytest.approx(best, rel=0.03)  # trees of a size between two knots count for both


def test_what_models_draft_is_verified_where_it_is_likelier_than_its_price():
    def chosen(step_cost, **options):
        return side_budget(DecodingSettings(batch_size=1, **options), pool_with(), step_cost, 0.0).budget

    head = {"drafters": ("pool", "trained"), "drafter_options": {"trained": {"head": "head"}}}
    assert chosen(cost(FREE), **head) == Budget(16, MIN_ACCEPTANCES[0])  # not the replays' budget: they ran no head
    assert chosen(cost(STEEP), **head) == PLAIN
    assert chosen(cost(FREE), **head, max_draft_tokens=8) == Budget(8, MIN_ACCEPTANCES[0])
    price = cost({1: 0.01, 17: 0.01 + 16 * 0.002})  # a draft token costs a fifth of a plain one
    trained, unchecked = chosen(price, **head), chosen(price, drafters=("lookahead",))
    assert 0.2 <= trained.min_acceptance < 0.4 <= unchecked.min_acceptance
    drawn = DecodingSettings(
        temperature=1.0, verifier="rsd", drafters=("trained",), drafter_options={"trained": {"models": ["small"]}}
    )
    assert budget_step_cost(drawn, None) is None  # what was drawn stays whole
    for number, reason in ((None, "fixed number, since the rule samples"), (8, "set in the configuration")):
        named = drawn.model_copy(update={"max_draft_tokens": number})
        assert reason in side_budget(named, None, None, 0.0).forecast.reason


def test_a_step_that_drafts_nothing_does_not_pay_for_one_that_drafts_much():
    def rarely(size, least):  # at the highest threshold one step in ten drafts, and then a whole tree
        return tuple(np.eye(len(SIZE_KNOTS))[0] * 0.9 + np.array(shares(size)) * 0.1)

    curve = replayed(lambda size, least: 1.4 if least == 0.9 else 1.5, lambda size, least: rarely(size, least)
                     if least == 0.9 else shares(size))  # fmt: skip
    pool = SimpleNamespace(budgets=BudgetCurve(sources=SOURCES, new=curve), is_calibrated=True)
    chosen = choose_budget(cost(GEMV), 1, pool)
    assert chosen.budget.min_acceptance == 0.9
    assert chosen.forecast.speed_up == pytest.approx(1.4 * 0.01 / (0.9 * 0.01 + 0.1 * 0.03))


def test_the_time_of_drafting_decides_too():
    costly = DraftCost(seconds=0.1)
    assert choose_budget(cost(FREE, draft=costly), 1, pool_with()).budget == PLAIN


def test_changed_texts_count_by_their_share():
    pool = pool_with(new=lambda size, least: 1.0, changed=larger_is_better)
    assert choose_budget(cost(FREE), 1, pool, share_changed=0.0).budget == PLAIN
    all_changed = choose_budget(cost(FREE), 1, pool, share_changed=1.0)
    some_changed = choose_budget(cost(FREE), 1, pool, share_changed=0.5)
    assert all_changed.budget == Budget(64, MIN_ACCEPTANCES[0])
    assert some_changed.budget.max_draft_tokens == 64
    whole = larger_is_better(64, some_changed.budget.min_acceptance)
    assert some_changed.forecast.tokens_per_step == pytest.approx(1 / (0.5 + 0.5 / whole))


def test_numbers_that_are_given_are_kept():
    for size, least in ((10, None), (None, 0.33), (10, 0.33)):
        chosen = choose_budget(cost(FREE), 1, pool_with(), max_draft_tokens=size, min_acceptance=least).budget
        assert size is None or chosen.max_draft_tokens == size
        assert least is None or chosen.min_acceptance == least
    assert choose_budget(cost(FREE), 1, pool_with(), max_draft_tokens=0).budget == PLAIN
    assert choose_budget(cost(FREE), 1, pool_with(), sources=()).budget == PLAIN
    configured = configured_budget(Budget(16, 0.07), pool_with(), SOURCES, 0.0)
    assert configured.budget == Budget(16, 0.07)
    assert configured.forecast.tokens_per_step == pytest.approx(larger_is_better(16, 0.07))


def test_where_nothing_was_replayed_only_what_is_likelier_than_its_price_is_drafted():
    cheap = choose_budget(cost({1: 0.01, 65: 0.01 * (1 + 64 * 0.04)}), 1)  # a draft token costs 0.04 steps
    assert cheap.budget == Budget(16, 0.1)  # twice 0.04, rounded to the grid
    calibrated = SimpleNamespace(budgets=None, is_calibrated=True, manifest=SimpleNamespace(num_texts=9))
    sure = choose_budget(cost({1: 0.01, 65: 0.01 * (1 + 64 * 0.04)}), 1, calibrated)
    assert sure.budget.min_acceptance == 0.05
    assert choose_budget(cost(STEEP), 1).budget == PLAIN
    looking = DraftCost(seconds=0.001)  # drafting costs a tenth of a step, and may find nothing
    assert choose_budget(cost(FREE, draft=looking), 1).budget == PLAIN
    empty, filled = (SimpleNamespace(budgets=None, is_calibrated=False, manifest=SimpleNamespace(num_texts=number))
                     for number in (0, 9))  # fmt: skip
    assert choose_budget(cost(FREE, draft=looking), 1, empty).budget == PLAIN
    assert choose_budget(cost(FREE, draft=looking), 1, filled).budget.max_draft_tokens == 16


@pytest.mark.parametrize("has_replays", [True, False])
def test_a_largest_tree_alone_that_is_not_drafted_is_named_in_the_reason(has_replays):
    pool = pool_with() if has_replays else None
    chosen = choose_budget(cost(STEEP), 1, pool, max_draft_tokens=8)
    assert chosen.budget == PLAIN
    assert "max_draft_tokens 8 is only a limit: set min_acceptance too" in chosen.forecast.reason
    assert "max_draft_tokens" not in choose_budget(cost(STEEP), 1, pool).forecast.reason
    assert choose_budget(cost(STEEP), 1, pool, max_draft_tokens=8, min_acceptance=0.1).budget == Budget(8, 0.1)


def test_without_drafters_the_budget_is_that_of_plain_decoding():
    assert side_budget(DecodingSettings(drafters=()), None, None, 0.0).budget == PLAIN


def test_where_texts_are_few_the_dearest_number_of_draft_tokens_must_pay():
    """The first draft token of a step of 16 texts costs a tenth of it, and further tokens next to nothing."""
    points = {16: 0.01, 17: 0.011, 32: 0.0111, 1040: 0.02}
    jump = StepCost(steps=[StepPoint(batch_size=16, num_tokens=n, seconds=seconds) for n, seconds in points.items()])
    filled = SimpleNamespace(budgets=None, is_calibrated=False, manifest=SimpleNamespace(num_texts=9))
    assert choose_budget(jump, 16).budget == PLAIN
    assert choose_budget(jump, 16, filled).budget.max_draft_tokens == 16


def test_replays_of_other_sources_are_not_believed():
    pool = pool_with(sources=("output", "pool"))
    assert choose_budget(cost(FREE), 1, pool).budget.max_draft_tokens == 16
    assert choose_budget(cost(FREE), 1, pool, ("pool", "output")).budget.max_draft_tokens == 64


def test_a_batch_size_that_was_not_measured_takes_the_next_smaller_one():
    curve = StepCost(steps=(*cost(FREE, 4).steps, *cost(STEEP, 8).steps))
    assert choose_budget(curve, 6, pool_with()).forecast.batch_size == 4
    assert choose_budget(curve, 100, pool_with()).budget == PLAIN
    assert choose_budget(curve, 1, pool_with()).forecast.batch_size == 4


def test_trees_of_a_batch_are_taken_as_they_fall_beside_others_of_the_mean_size():
    """Half of the trees are empty, half have 64 tokens: a single text has steps of either kind, many have about 32."""
    cell = BudgetCell(
        max_draft_tokens=64, min_acceptance=0.1, tokens_per_step=2.0, size_shares=(0.5, 0, 0, 0, 0, 0, 0, 0.5)
    )
    assert step_seconds(cost(GEMV), 1, cell) == pytest.approx((0.01 + 0.03) / 2)
    assert step_seconds(cost(GEMV, 16), 16, cell) == pytest.approx(0.03)


def test_drafts_that_fill_a_steps_padding_are_free_and_the_next_ones_pay_for_a_bucket():
    steps = [StepPoint(batch_size=20, num_tokens=number, seconds=number / 1000) for number in (24, 64)]
    padded = StepCost(steps=steps, padded_to=(24, 64))

    def seconds(mean: float) -> float:
        cell = BudgetCell(max_draft_tokens=1, min_acceptance=0.1, tokens_per_step=1.0, size_shares=shares(mean))
        return step_seconds(padded, 20, cell)

    assert padded.plain_seconds(20) == pytest.approx(0.024)
    assert seconds(0.15) == pytest.approx(0.024)
    assert seconds(0.5) == pytest.approx(0.064)


def test_settings_without_numbers_are_the_usual_budget():
    assert Budget.of(DecodingSettings()) == Budget()
    assert Budget.of(DecodingSettings(max_draft_tokens=3, min_acceptance=0.5)) == Budget(3, 0.5)
