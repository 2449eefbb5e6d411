"""A pilot: a few texts written under each of some budgets before a run, to choose by what they gained.

Replays know greedy verification and texts as they are. Under a relaxed verifier a text that is offered more follows
its drafts more, so that budgets which replays call wasteful may be the fastest; and where nothing was replayed, nobody
knows whether drafting pays at all. A pilot tries the budget that is preferred without it, then bolder ones, and other
thresholds with the size that was fastest. What a text gains does not depend on its batch, so the same texts and the
same step cost choose the same budget on any machine.

Texts differ, and a pilot has few. A relaxed text that a high threshold leaves without a draft goes its own way, so that
how fast a threshold is varies more from text to text than how fast a size is. Hence of budgets with the usual threshold
the fastest is taken, and one with another threshold only where it is faster by more than chance: chosen and judged by
different texts of two collections, that lost least to the best tree of a fixed size. Knows no pool's insides, no files
and no Ray: `write` does the writing.
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
)
from pipeline.decoding.expected_step import plain_seconds, step_seconds
from pipeline.decoding.planning.pilot_texts import PilotTexts
from retrieval_pools.calibrating.estimates import Bootstrap
from retrieval_pools.step_cost import StepCost

BOLD_SIZES = (4, 8, 16, 32, 64)
BOLD_ACCEPTANCE = 0.07  # so low that the size of a tree is its limit
THRESHOLDS = (0.03, 0.07, 0.15, 0.3, 0.5)  # tried with the size that was fastest
SURE = 3.0  # standard errors by which another threshold must be faster than the usual one: a pilot compares several
SEED = 0


@dataclass(frozen=True)
class PilotPlan:
    """What a pilot tries.

    Attributes
    ----------
    batch_size : one that `step_cost` knows.
    first : the budget that is preferred without a pilot.
    bolder : by rising size; tried from `start` upwards until one is slower, and downwards if none gained.
    may_be_plain : whether not to draft at all is among the choices.
    thresholds : ascending; tried in the same way with the fastest size, from its own.
    """

    step_cost: StepCost
    batch_size: int
    first: Budget
    bolder: tuple[Budget, ...] = ()
    start: int = 0
    may_be_plain: bool = True
    thresholds: tuple[float, ...] = ()


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
        THRESHOLDS if min_acceptance is None else (),
    )


def run_pilot(plan: PilotPlan, write: Callable[[Budget], PilotTexts]) -> Budget:
    """The fastest budget, its forecast being what the pilot saw; another threshold than the usual one must be SURE.

    Decoding is plain where that is not faster by LEAST_GAIN and by its own standard error over texts.

    Parameters
    ----------
    write : writes the same texts under each budget and says what they took.
    """
    trials = _Trials(plan, write)
    trials.speed_up(plan.first)
    if plan.bolder and not trials.climb(plan.bolder[plan.start :]):
        trials.climb(plan.bolder[: plan.start + 1][::-1])
    if plan.thresholds:
        stricter, laxer = _thresholds_around(trials.fastest(), plan.thresholds)
        if not trials.climb(stricter):
            trials.climb(laxer)
    best = trials.chosen()
    forecast = BudgetForecast(
        f"the fastest of {len(trials.all)} that a pilot tried, chance allowed for",
        plan.step_cost.name,
        plan.batch_size,
        best.tokens_per_step,
        best.mean_drafted,
        best.speed_up,
        tuple(trials.all),
    )
    if plan.may_be_plain and (best.speed_up < LEAST_GAIN or best.speed_up - best.error < 1):
        gain = f"{best.speed_up:.2f} ± {best.error:.2f} times plain"
        reason = f"no budget that a pilot tried is worth its cost: the best is {gain}"
        plainly = replace(forecast, reason=reason, tokens_per_step=1.0, mean_drafted=0.0, speed_up=1.0)
        return replace(PLAIN, forecast=plainly)
    return Budget(best.max_draft_tokens, best.min_acceptance, forecast)


class _Trials:
    """What was tried so far, each budget once."""

    def __init__(self, plan: PilotPlan, write: Callable[[Budget], PilotTexts]) -> None:
        self._plan, self._write = plan, write
        self._usual_thresholds = {budget.min_acceptance for budget in plan.bolder}
        self._texts: dict[Budget, PilotTexts] = {}
        self._plain_s = plain_seconds(plan.step_cost, plan.batch_size)

    @property
    def all(self) -> list[Trial]:
        """In their order."""
        return [self._trial(budget) for budget in self._texts]

    def speed_up(self, budget: Budget) -> float:
        """Over plain decoding."""
        if budget not in self._texts:
            self._texts[budget] = self._write(budget)
        cell = self._texts[budget].cell(budget)
        return self._plain_s * cell.tokens_per_step / step_seconds(self._plan.step_cost, self._plan.batch_size, cell)

    def climb(self, budgets: Sequence[Budget]) -> bool:
        """Try one after another until one is slower than the fastest of them by more than chance.

        Whether any was faster than the first one.
        """
        best = budgets[0]
        for budget in budgets:
            if self.speed_up(budget) > self.speed_up(best):
                best = budget
            elif self._slower(budget, best) > self._error(budget, best):
                break
        return best != budgets[0]

    def fastest(self) -> Budget:
        return max(self._texts, key=self.speed_up)

    def chosen(self) -> Trial:
        """See `run_pilot`."""
        best = self.fastest()
        usual = [budget for budget in self._texts if budget.min_acceptance in self._usual_thresholds]
        if usual:
            safe = max(usual, key=self.speed_up)
            gain = self.speed_up(best) / self.speed_up(safe) - 1
            best = best if gain > SURE * self._error(best, safe) else safe
        return self._trial(best)

    def _slower(self, budget: Budget, other: Budget) -> float:
        """By which share of the other's speed."""
        return 1 - self.speed_up(budget) / self.speed_up(other)

    def _error(self, budget: Budget, other: Budget) -> float:
        """Standard error of the ratio of their speeds."""
        return _standard_error(self._speeds(budget) / self._speeds(other))

    def _speeds(self, budget: Budget) -> np.ndarray:
        """Of draws of the texts that every trial wrote, the same draws for each."""
        common = set.intersection(*(set(texts.names) for texts in self._texts.values()))
        texts = self._texts[budget].of(common)
        return texts.speeds(self._plan.step_cost, self._plan.batch_size, Bootstrap(len(common), SEED))

    def _trial(self, budget: Budget) -> Trial:
        cell, speeds, speed_up = self._texts[budget].cell(budget), self._speeds(budget), self.speed_up(budget)
        error = speed_up * _standard_error(speeds / speeds[0])
        return Trial(
            budget.max_draft_tokens, budget.min_acceptance, cell.tokens_per_step, cell.mean_drafted, speed_up, error
        )


def _standard_error(samples: np.ndarray) -> float:
    """Of float64[1 + n]: what was measured, then what resamples gave; 0 where nothing was written."""
    resampled = samples[1:][np.isfinite(samples[1:])]
    return float(resampled.std()) if len(resampled) else 0.0


def _thresholds_around(budget: Budget, thresholds: Sequence[float]) -> tuple[list[Budget], list[Budget]]:
    """The budget with higher and higher thresholds, and with lower and lower ones; itself first."""
    higher = [least for least in thresholds if least > budget.min_acceptance]
    lower = [least for least in thresholds if least < budget.min_acceptance][::-1]
    stricter, laxer = ([replace(budget, min_acceptance=least) for least in some] for some in (higher, lower))
    return [budget, *stricter], [budget, *laxer]
