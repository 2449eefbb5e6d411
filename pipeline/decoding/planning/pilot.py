"""A pilot: a few texts written under each of some budgets before a run, to choose by what they gained.

Replays know greedy verification and texts as they are. Under a relaxed verifier a text that is offered more follows
its drafts more, so that budgets which replays call wasteful may be the fastest; and where nothing was replayed, nobody
knows whether drafting pays at all. A pilot tries the budget that is preferred without it, then bolder ones, and other
thresholds with the size that was fastest. What a text gains does not depend on its batch, so the same texts and the
same step cost choose the same budget on any machine.

Texts differ, and a pilot has few. Where some of them leave it open which budget is the fastest, more are written under
those that may be, and more again. A relaxed text that a high threshold leaves without a draft goes its own way, so that
how fast a threshold is varies more from text to text than how fast a size is. Hence of budgets with the usual threshold
the fastest is taken, and one with another threshold only where it is faster by more than chance: chosen and judged by
different texts of two collections, that lost least to the best tree of a fixed size. Knows no pool's insides, no files
and no Ray: `write` does the writing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from laserbatch.pipeline.decoding.budget import (
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
from laserbatch.pipeline.decoding.expected_step import plain_seconds, step_seconds
from laserbatch.pipeline.decoding.planning.pilot_texts import PilotTexts
from laserbatch.retrieval_pools.calibration.estimates import Bootstrap
from laserbatch.retrieval_pools.step_cost import StepCost

BOLD_SIZES = (4, 8, 16, 32, 64)
BOLD_ACCEPTANCE = 0.07  # so low that the size of a tree is its limit
THRESHOLDS = (0.03, 0.07, 0.15, 0.3, 0.5)  # tried with the size that was fastest
SURE = 3.0  # standard errors by which another threshold must be faster than the usual one: a pilot compares several
FIRST_TEXTS = 32  # of a pilot; each part after them is as large as all before it
DOUBT = 2.0  # standard errors by which a budget must be slower than the fastest to be given up
WORTH_KNOWING = 0.01  # the share by which a budget would have to be faster to write more texts for it
SEED = 0

Text = TypeVar("Text")


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


def pilot_parts(texts: Sequence[Text]) -> list[Sequence[Text]]:
    """Texts divided as `run_pilot` asks for them."""
    ends = [FIRST_TEXTS]
    while ends[-1] < len(texts):
        ends.append(2 * ends[-1])
    return [texts[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def run_pilot(plan: PilotPlan, write: Callable[[Budget, int], PilotTexts], num_parts: int = 1) -> Budget:
    """The fastest budget, its forecast being what the pilot saw; another threshold than the usual one must be SURE.

    Decoding is plain where that is not faster by LEAST_GAIN and by its own standard error over texts.

    Parameters
    ----------
    write : writes a part of the texts, counted from 0, under a budget and says what they took. The first part is
        written under every budget that is tried; each later one only while more than one budget may be the fastest.
    """
    trials = _Trials(plan, write)
    trials.speed_up(plan.first)
    if plan.bolder and not trials.climb(plan.bolder[plan.start :]):
        trials.climb(plan.bolder[: plan.start + 1][::-1])
    if plan.thresholds:
        stricter, laxer = _thresholds_around(trials.fastest(), plan.thresholds)
        if not trials.climb(stricter):
            trials.climb(laxer)
    for part in range(1, num_parts):
        if not trials.is_open():
            break
        trials.write_more(part)
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
    """What was tried so far, each budget once.

    A budget that is given up keeps the texts that it has; those left have the same texts.
    """

    def __init__(self, plan: PilotPlan, write: Callable[[Budget, int], PilotTexts]) -> None:
        self._plan, self._write = plan, write
        self._usual_thresholds = {budget.min_acceptance for budget in plan.bolder}
        self._texts: dict[Budget, PilotTexts] = {}
        self._left: list[Budget] = []  # that may be chosen
        self._plain_s = plain_seconds(plan.step_cost, plan.batch_size)

    @property
    def all(self) -> list[Trial]:
        """In their order."""
        return [self._trial(budget) for budget in self._texts]

    def speed_up(self, budget: Budget) -> float:
        """Over plain decoding."""
        if budget not in self._texts:
            self._texts[budget] = self._write(budget, 0)
            self._left.append(budget)
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
            else:
                gain, error = self._gain(budget, best)
                if -gain > error:
                    break
        return best != budgets[0]

    def fastest(self) -> Budget:
        return max(self._left, key=self.speed_up)

    def is_open(self) -> bool:
        """Give up what is surely slower; whether what is left, or whether to draft at all, is not decided."""
        best = self.fastest()
        rivals = [budget for budget in self._left if budget != best and self._may_be_faster(budget, best)]
        kept = {best, self._safe() or best, *rivals}
        self._left = [budget for budget in self._left if budget in kept]
        trial = self._trial(best)
        return bool(rivals) or (self._plan.may_be_plain and abs(trial.speed_up - LEAST_GAIN) < DOUBT * trial.error)

    def write_more(self, part: int) -> None:
        """A later part of the texts, under every budget that is left."""
        for budget in self._left:
            self._texts[budget] = self._texts[budget].and_later(self._write(budget, part), part)

    def chosen(self) -> Trial:
        """See `run_pilot`."""
        best, safe = self.fastest(), self._safe()
        if safe is not None:
            gain, error = self._gain(best, safe)
            best = best if gain > SURE * error else safe
        return self._trial(best)

    def _safe(self) -> Budget | None:
        """The fastest with a usual threshold."""
        usual = [budget for budget in self._left if budget.min_acceptance in self._usual_thresholds]
        return max(usual, key=self.speed_up, default=None)

    def _may_be_faster(self, budget: Budget, other: Budget) -> bool:
        gain, error = self._gain(budget, other)
        return gain + DOUBT * error > WORTH_KNOWING

    def _gain(self, budget: Budget, other: Budget) -> tuple[float, float]:
        """The share by which a budget is faster than another on the texts that both wrote, and its standard error."""
        common = set(self._texts[budget].names) & set(self._texts[other].names)
        bootstrap = Bootstrap(len(common), SEED)
        asked = (self._plan.step_cost, self._plan.batch_size, bootstrap)
        own, others = (self._texts[one].of(common).speeds(*asked) for one in (budget, other))
        return self.speed_up(budget) / self.speed_up(other) - 1, _standard_error(own / others)

    def _trial(self, budget: Budget) -> Trial:
        texts, speed_up = self._texts[budget], self.speed_up(budget)
        num_texts = len(texts.names)
        speeds = texts.speeds(self._plan.step_cost, self._plan.batch_size, Bootstrap(num_texts, SEED))
        error = speed_up * _standard_error(speeds / speeds[0])
        cell = texts.cell(budget)
        return Trial(
            budget.max_draft_tokens,
            budget.min_acceptance,
            cell.tokens_per_step,
            cell.mean_drafted,
            speed_up,
            error,
            num_texts,
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
