"""A pilot: a few texts written under each of some budgets before a run, to choose by what they gained.

Replays know greedy verification and texts as they are. Under a relaxed verifier a text that is offered more follows
its drafts more, so that budgets which replays call wasteful may be the fastest; and where nothing was replayed, nobody
knows whether drafting pays at all. A pilot tries the budget that is preferred without it, then bolder ones. What a text
gains does not depend on its batch, so the same texts and the same step cost choose the same budget on any machine.

Knows no pool's insides, no files and no Ray: `write` does the writing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.decoding.budget import (
    LEAST_GAIN,
    PLAIN,
    SOURCES,
    Budget,
    BudgetForecast,
    Trial,
    as_given,
    budget_forecasts,
    choose_budget,
    fastest,
    known_batch_size,
    plain_seconds,
    step_seconds,
)
from pipeline.decoding.sequence import StepEvent
from retrieval_pools.budget_curve import KNOT_SHARES, SIZE_KNOTS, BudgetCell
from retrieval_pools.step_cost import StepCost

BOLD_SIZES = (4, 8, 16, 32, 64)
BOLD_ACCEPTANCE = 0.07  # so low that the size of a tree is its limit


@dataclass(frozen=True)
class PilotPlan:
    """What a pilot tries.

    Attributes
    ----------
    batch_size : one that `step_cost` knows.
    first : the budget that is preferred without a pilot.
    bolder : by rising size; tried from `start` upwards while that gains, and downwards if it does not.
    may_be_plain : whether not to draft at all is among the choices.
    """

    step_cost: StepCost
    batch_size: int
    first: Budget
    bolder: tuple[Budget, ...] = ()
    start: int = 0
    may_be_plain: bool = True


class StepCounts:
    """Counts the steps of texts as the engine reports them (`Engine.generate`, `on_event`)."""

    def __init__(self) -> None:
        self._num_steps = self._num_tokens = 0
        self._num_at_knots = np.zeros(len(SIZE_KNOTS))

    def __call__(self, event: StepEvent) -> None:
        self._num_steps += 1
        self._num_tokens += len(event.token_ids)
        self._num_at_knots += KNOT_SHARES[event.num_drafted]

    def cell(self, budget: Budget) -> BudgetCell:
        """What a budget gained, as replays say it; without any step, nothing."""
        num_steps = max(1, self._num_steps)
        return BudgetCell(
            max_draft_tokens=budget.max_draft_tokens,
            min_acceptance=budget.min_acceptance,
            tokens_per_step=max(1.0, self._num_tokens / num_steps),  # below 1: steps that wrote an end token
            size_shares=tuple((self._num_at_knots / num_steps).tolist()) if self._num_steps else KNOT_SHARES[0],
        )


def plan_pilot(
    step_cost: StepCost,
    batch_size: int,
    pool=None,
    sources: Sequence[str] = SOURCES,
    *,
    is_relaxed: bool,
    share_changed: float = 0.0,
    max_draft_tokens: int | None = None,
    min_acceptance: float | None = None,
) -> PilotPlan | None:
    """What a pilot is to try; None where there is nothing to find out. The other parameters: see `choose_budget`.

    Parameters
    ----------
    is_relaxed : more may be accepted than the target's own choice. If not, replays are believed, and only what was
        never replayed is tried.
    """
    given = {"max_draft_tokens": max_draft_tokens, "min_acceptance": min_acceptance}
    if not sources or max_draft_tokens == 0 or None not in given.values():
        return None
    batch_size = known_batch_size(step_cost, batch_size)
    asked = (step_cost, batch_size, pool, sources, share_changed)
    forecasts = budget_forecasts(*asked, **given)
    may_be_plain = min_acceptance is None
    if not forecasts:
        first = choose_budget(step_cost, batch_size, pool, sources, **given)
        return PilotPlan(step_cost, batch_size, first) if may_be_plain and first.max_draft_tokens else None
    if not is_relaxed:
        return None
    low = BOLD_ACCEPTANCE if min_acceptance is None else min_acceptance
    bold = budget_forecasts(*asked, max_draft_tokens=max_draft_tokens, min_acceptance=low)
    bold = [budget for budget in bold if budget.max_draft_tokens in BOLD_SIZES] or bold
    return PilotPlan(
        step_cost,
        batch_size,
        as_given(fastest(forecasts), **given),
        tuple(as_given(budget, **given) for budget in bold),
        bold.index(fastest(bold)),
        may_be_plain,
    )


def run_pilot(plan: PilotPlan, write: Callable[[Budget], BudgetCell]) -> Budget:
    """The fastest budget of those tried, its forecast being what the pilot saw.

    A bolder budget must be faster than the first one by LEAST_GAIN, since it also moves relaxed texts further; and the
    fastest than plain decoding by as much.

    Parameters
    ----------
    write : writes the same texts under each budget and says what they gained.
    """
    trials: dict[Budget, Trial] = {}
    plain_s = plain_seconds(plan.step_cost, plan.batch_size)

    def speed_up(budget: Budget) -> float:
        if budget not in trials:
            cell = write(budget)
            gain = plain_s * cell.tokens_per_step / step_seconds(plan.step_cost, plan.batch_size, cell)
            trials[budget] = Trial(
                budget.max_draft_tokens, budget.min_acceptance, cell.tokens_per_step, cell.mean_drafted, gain
            )
        return trials[budget].speed_up

    speed_up(plan.first)
    upwards, downwards = plan.bolder[plan.start :], plan.bolder[: plan.start + 1][::-1]
    if _climb(upwards, speed_up) <= 1:
        _climb(downwards, speed_up)
    best = max(trials.values(), key=lambda trial: trial.speed_up)
    if best.speed_up < trials[plan.first].speed_up * LEAST_GAIN:
        best = trials[plan.first]
    forecast = BudgetForecast(
        f"the fastest of {len(trials)} that a pilot tried",
        plan.step_cost.name,
        plan.batch_size,
        best.tokens_per_step,
        best.mean_drafted,
        best.speed_up,
        tuple(trials.values()),
    )
    if best.speed_up < LEAST_GAIN and plan.may_be_plain:
        reason = f"no budget that a pilot tried is worth its cost: the best is {best.speed_up:.2f} times plain"
        plainly = replace(forecast, reason=reason, tokens_per_step=1.0, mean_drafted=0.0, speed_up=1.0)
        return replace(PLAIN, forecast=plainly)
    return Budget(best.max_draft_tokens, best.min_acceptance, forecast)


def _climb(budgets: Sequence[Budget], speed_up: Callable[[Budget], float]) -> int:
    """Try one after another while each is faster than the one before; how many were."""
    speeds = [0.0]
    for budget in budgets:
        speeds.append(speed_up(budget))
        if speeds[-1] <= speeds[-2]:
            return len(speeds) - 2
    return len(speeds) - 1
