"""How much is drafted: the largest tree, and the threshold that a drafted token's path must reach.

What a sequence is offered depends on this pair and on the sequence alone, so the pair is fixed for a run. It is chosen
for the most tokens a second, from what a step costs here and what replays of the pool's texts gained. Knows no model,
no files and no clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from laserbatch.pipeline.decoding.expected_step import plain_seconds, step_seconds
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.retrieval_pools.index.budget_curve import (
    MIN_ACCEPTANCES,
    BudgetCell,
    BudgetCurve,
    ReplayedBudgets,
)
from laserbatch.retrieval_pools.step_cost import StepCost

SOURCES = ("previous", "prompt", "output", "pool")
LEAST_GAIN = 1.02  # predicted, below which plain decoding is the safer choice
AS_GOOD = 0.995  # of the best predicted speed
# Uncalibrated estimates from a sequence's own texts held for 0.45 to 1 of what they said in most bands of two
# collections of published texts; in a few for less.
UNCHECKED_TRUST = 0.5
UNCHECKED_SIZE = 16  # largest tree where nothing was replayed
MOST_FOR_LOOKING = 0.01  # of a plain step, spent on drafts that find nothing


@dataclass(frozen=True)
class Trial:
    """What texts gained that a pilot wrote under a budget; bonus token included, speed-up as in `BudgetForecast`.

    `error` is the standard error of `speed_up`, other texts being written; `num_texts` is how many were. A budget with
    fewer texts than another was given up: on the texts of both it was slower.
    """

    max_draft_tokens: int
    min_acceptance: float
    tokens_per_step: float
    mean_drafted: float
    speed_up: float
    error: float = 0.0
    num_texts: int = 0


@dataclass(frozen=True)
class BudgetForecast:
    """What a budget was chosen for.

    Attributes
    ----------
    reason : how it was chosen, in a sentence.
    step_cost : the name of the step cost, None where it did not matter.
    batch_size : that of the forecast.
    tokens_per_step, mean_drafted : of replays or of a pilot, bonus token included; None where there was neither.
    speed_up : tokens per second over plain decoding, prompts not counted; None likewise.
    trials : the budgets that a pilot wrote texts under, the chosen one among them; see `pilot`.
    run_speed_up : speed-up of the whole run, its prompts and the ends of its shards counted; None where not forecast.
    """

    reason: str
    step_cost: str | None = None
    batch_size: int | None = None
    tokens_per_step: float | None = None
    mean_drafted: float | None = None
    speed_up: float | None = None
    trials: tuple[Trial, ...] = ()
    run_speed_up: float | None = None


@dataclass(frozen=True)
class Budget:
    """A draft budget.

    Attributes
    ----------
    max_draft_tokens : largest tree, 0 to 64; 0 decodes plainly.
    min_acceptance : a token whose path is estimated less likely to be accepted is not drafted.
    forecast : why, where it was chosen by measurement; budgets compare without it.
    """

    max_draft_tokens: int = 16
    min_acceptance: float = 0.07
    forecast: BudgetForecast | None = field(default=None, compare=False)

    @classmethod
    def of(cls, settings: DecodingSettings) -> "Budget":
        """The settings' own numbers; where they leave the choice, those of the class: nothing is measured here."""
        given = {"max_draft_tokens": settings.max_draft_tokens, "min_acceptance": settings.min_acceptance}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def min_log_acceptance(self) -> float:
        """Natural logarithm of `min_acceptance`."""
        return math.log(self.min_acceptance) if self.min_acceptance > 0 else -math.inf


PLAIN = Budget(0, 1.0)


def choose_budget(
    step_cost: StepCost,
    batch_size: int,
    pool=None,
    sources: Sequence[str] = SOURCES,
    *,
    share_changed: float = 0.0,
    max_draft_tokens: int | None = None,
    min_acceptance: float | None = None,
) -> Budget:
    """The budget that writes the most tokens a second. The same arguments give the same budget.

    With the replays of a calibrated pool, speed is predicted for every budget of their grid and for none. Without them
    a token is drafted where its acceptance is likelier than what it costs: the threshold is the price of a packed token
    in plainly decoded ones (the Lagrange multiplier of tokens per second), and twice that where estimates were never
    checked.

    Parameters
    ----------
    step_cost : measured; of its batch sizes the largest that is not above `batch_size` is used.
    batch_size : sequences written side by side.
    pool : what is drafted from beside a sequence's own texts, or None.
    sources : which of "previous", "prompt", "output" and "pool" may be drafted from.
    share_changed : share of the sequences that have a previous text.
    max_draft_tokens, min_acceptance : a number is kept, and the other one is chosen for it.
    """
    if not sources or max_draft_tokens == 0:
        return replace(PLAIN, forecast=BudgetForecast("drafting is off"))
    batch_size = known_batch_size(step_cost, batch_size)
    forecasts = budget_forecasts(
        step_cost,
        batch_size,
        pool,
        sources,
        share_changed,
        max_draft_tokens=max_draft_tokens,
        min_acceptance=min_acceptance,
    )
    if forecasts:
        budget = fastest(forecasts)
        gain = budget.forecast.speed_up
        if gain < LEAST_GAIN and min_acceptance is None:
            reason = f"no budget of the replays is worth its cost: the best would be {gain:.2f} times plain"
            return replace(PLAIN, forecast=BudgetForecast(reason, step_cost.name, batch_size, 1.0, 0.0, 1.0))
    else:
        is_calibrated = pool is not None and "pool" in sources and pool.is_calibrated
        has_texts = is_calibrated or (pool is not None and pool.manifest.num_texts > 0)
        budget = _worth_its_price(step_cost, batch_size, 1.0 if is_calibrated else UNCHECKED_TRUST, has_texts)
    if budget.max_draft_tokens == 0 and min_acceptance is None:
        return budget
    return as_given(budget, max_draft_tokens, min_acceptance)


def as_given(budget: Budget, max_draft_tokens: int | None, min_acceptance: float | None) -> Budget:
    """The budget with the numbers that somebody gave."""
    return replace(
        budget,
        max_draft_tokens=budget.max_draft_tokens if max_draft_tokens is None else max_draft_tokens,
        min_acceptance=budget.min_acceptance if min_acceptance is None else min_acceptance,
    )


def known_batch_size(step_cost: StepCost, batch_size: int) -> int:
    """Of the batch sizes that were measured the largest that is not above another one."""
    return max([known for known in step_cost.batch_sizes if known <= batch_size] or step_cost.batch_sizes[:1])


def budget_forecasts(
    step_cost: StepCost,
    batch_size: int,
    pool,
    sources: Sequence[str],
    share_changed: float,
    *,
    max_draft_tokens: int | None = None,
    min_acceptance: float | None = None,
) -> list[Budget]:
    """Every budget of the replays' grid with its forecast, in the grid's order; none where nothing was replayed.

    Of a number that is given, only the nearest of the grid.
    """
    kinds = _kinds(pool, sources, share_changed)
    if not kinds:
        return []
    found = []
    plain_s = plain_seconds(step_cost, batch_size)
    for cell in _nearest(kinds[0][1].cells, max_draft_tokens, min_acceptance):
        number = kinds[0][1].cells.index(cell)
        seconds_per_token = sum(
            share * step_seconds(step_cost, batch_size, kind.cells[number]) / kind.cells[number].tokens_per_step
            for share, kind in kinds
        )
        pace, drafted = _blended(kinds, number)
        speed_up = plain_s / seconds_per_token
        forecast = BudgetForecast("the fastest of the replays", step_cost.name, batch_size, pace, drafted, speed_up)
        found.append(Budget(cell.max_draft_tokens, cell.min_acceptance, forecast))
    return found


def fastest(forecasts: Sequence[Budget]) -> Budget:
    """Of budgets that are as good as the best, the one that drafts least: noise of a measurement decides less often."""
    best = max(budget.forecast.speed_up for budget in forecasts)
    among_best = [budget for budget in forecasts if budget.forecast.speed_up >= best * AS_GOOD]
    return min(among_best, key=lambda budget: budget.forecast.mean_drafted)


def with_forecast(budget: Budget, pool=None, sources: Sequence[str] = SOURCES, share_changed: float = 0.0) -> Budget:
    """A budget that somebody gave, with what replays say of the nearest one of their grid."""
    kinds = _kinds(pool, sources, share_changed)
    if not kinds or budget.max_draft_tokens == 0:
        return replace(budget, forecast=BudgetForecast("given in the configuration"))
    cells = _nearest(kinds[0][1].cells, budget.max_draft_tokens, budget.min_acceptance)
    (number,) = [kinds[0][1].cells.index(cell) for cell in cells]
    pace, drafted = _blended(kinds, number)
    forecast = BudgetForecast("given in the configuration", tokens_per_step=pace, mean_drafted=drafted)
    return replace(budget, forecast=forecast)


def _kinds(pool, sources: Sequence[str], share_changed: float) -> list[tuple[float, ReplayedBudgets]]:
    """Replays of texts as they are going to be written, each with its share; none where nothing fits."""
    curve: BudgetCurve | None = None if pool is None else pool.budgets
    if curve is None or curve.new is None or set(curve.sources) != set(sources):
        return []
    if curve.changed is None:
        return [(1.0, curve.new)]
    kinds = [(1.0 - share_changed, curve.new), (share_changed, curve.changed)]
    return [(share, kind) for share, kind in kinds if share > 0]


def _blended(kinds: list[tuple[float, ReplayedBudgets]], number: int) -> tuple[float, float]:
    """Tokens per step and mean tree of one budget over all kinds, which are shares of texts and so of tokens."""
    cells = [(share, kind.cells[number]) for share, kind in kinds]
    steps = sum(share / cell.tokens_per_step for share, cell in cells)
    drafted = sum(share / cell.tokens_per_step * cell.mean_drafted for share, cell in cells)
    return 1 / steps, drafted / steps


def _nearest(
    cells: Sequence[BudgetCell], max_draft_tokens: int | None, min_acceptance: float | None
) -> list[BudgetCell]:
    """The cells of given numbers, or of the grid's nearest; all of what is not given."""
    if max_draft_tokens is not None:
        nearest = min((abs(cell.max_draft_tokens - max_draft_tokens), cell.max_draft_tokens) for cell in cells)[1]
        cells = [cell for cell in cells if cell.max_draft_tokens == nearest]
    if min_acceptance is not None:
        nearest = min((abs(cell.min_acceptance - min_acceptance), cell.min_acceptance) for cell in cells)[1]
        cells = [cell for cell in cells if cell.min_acceptance == nearest]
    return list(cells)


def _worth_its_price(step_cost: StepCost, batch_size: int, trust: float, has_texts: bool) -> Budget:
    """Draft what is estimated likelier than it costs, whatever the size of the tree up to UNCHECKED_SIZE.

    Without a pool's texts drafts may find nothing for whole texts, or one token for one text of a step: the price is
    then that of whatever number of tokens is the dearest.
    """
    plain_s = plain_seconds(step_cost, batch_size)
    totals = np.arange(1, UNCHECKED_SIZE * batch_size + 1)  # draft tokens of a step
    if has_texts:
        totals = totals[batch_size - 1 :: batch_size]
    added_s = step_cost.seconds(batch_size, batch_size + totals) - plain_s
    added_s = added_s + step_cost.draft_seconds(batch_size, totals / batch_size)
    price = float((added_s * batch_size / (totals * plain_s)).max())
    looking = float(step_cost.draft_seconds(batch_size, np.zeros(()))) / plain_s
    affordable = [least for least in MIN_ACCEPTANCES if least >= price / trust]
    checked = "" if trust == 1.0 else ", and estimates were never checked"
    disturbed = "" if step_cost.disturbance is None else f", {step_cost.disturbance}"
    facts = f"a draft token costs up to {price:.2f} plainly decoded ones{checked}{disturbed}"
    if not affordable or (looking > MOST_FOR_LOOKING and not has_texts):
        return replace(PLAIN, forecast=BudgetForecast(f"not worth drafting: {facts}", step_cost.name, batch_size))
    return Budget(UNCHECKED_SIZE, affordable[0], BudgetForecast(facts, step_cost.name, batch_size))
