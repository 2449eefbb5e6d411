"""How much a run drafts: decided once, before its first text, and written down for every later attempt.

Owns where the numbers come from: the configuration, or else a measured cost of steps and the pools' calibration.
`pipeline.decoding.budget` chooses.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.console import say
from jobs.night import Night
from pipeline.decoding.budget import Budget, BudgetForecast, choose_budget, with_forecast
from pipeline.decoding.settings import DecodingSettings
from pipeline.distributed.shards import Shard, read_shard
from pipeline.knowledge.records import SIDES, Side
from retrieval_pools.pool import Pool
from retrieval_pools.step_cost import StepCost, read_step_cost

NUM_SAMPLED_SHARDS = 8  # read to see how many entities have a previous text


def night_budgets(night: Night, shards: Iterable[Shard], measure: Callable[[], StepCost]) -> dict[Side, Budget]:
    """The budget of each side: that of the manifest if there is one, else chosen and saved there.

    Parameters
    ----------
    shards : those that are going to be generated.
    measure : what steps cost on a worker; called only where something has to be chosen by it.
    """
    recorded = night.manifest.get("budgets")
    if recorded is None:
        shards = list(shards)
        decoding, version = night.settings.decoding, night.manifest["pools"]["version"]
        pools = {side: None if version is None else night.pools.open(version, side) for side in SIDES}
        step_cost = budget_step_cost(decoding, measure)
        chosen = {
            side: side_budget(decoding, pools[side], step_cost, _share_changed(night, side, shards)) for side in SIDES
        }
        recorded = night.manifest["budgets"] = {side: asdict(budget) for side, budget in chosen.items()}
        night.manifest.save()
        for side, budget in chosen.items():
            say(f"{side}s: {describe_budget(budget)}")
    return {side: budget_of(data) for side, data in recorded.items()}


def budget_step_cost(decoding: DecodingSettings, measure: Callable[[], StepCost]) -> StepCost | None:
    """The configured cost of steps, or the measured one; None where the configuration leaves nothing to choose.

    Raises
    ------
    PoolError
        The configured file cannot be read.
    """
    is_given = decoding.max_draft_tokens is not None and decoding.min_acceptance is not None
    if is_given or not decoding.drafters or decoding.max_draft_tokens == 0:
        return None
    return measure() if decoding.step_cost is None else read_step_cost(Path(decoding.step_cost))


def side_budget(
    decoding: DecodingSettings, pool: Pool | None, step_cost: StepCost | None, share_changed: float
) -> Budget:
    """The budget of one side; `step_cost` is None where the configuration leaves nothing to choose."""
    if step_cost is None:
        return with_forecast(Budget.of(decoding), pool, decoding.drafters, share_changed)
    return choose_budget(
        step_cost,
        decoding.batch_size,
        pool,
        decoding.drafters,
        share_changed=share_changed,
        max_draft_tokens=decoding.max_draft_tokens,
        min_acceptance=decoding.min_acceptance,
    )


def budget_of(data: Mapping[str, Any]) -> Budget:
    """A budget as a manifest keeps it."""
    forecast = data["forecast"]
    forecast = None if forecast is None else BudgetForecast(**forecast)
    return Budget(data["max_draft_tokens"], data["min_acceptance"], forecast)


def describe_budget(budget: Budget) -> str:
    """A budget in a line."""
    reason = "" if budget.forecast is None else f" ({budget.forecast.reason})"
    if budget.max_draft_tokens == 0:
        return f"nothing is drafted{reason}"
    return f"up to {budget.max_draft_tokens} draft tokens above {budget.min_acceptance:g}{reason}"


def _share_changed(night: Night, side: Side, shards: list[Shard]) -> float:
    """About how many of a side's rows have a previous text: of shards spread over all."""
    own = [shard for shard in shards if shard.side == side]
    sampled = own[:: max(1, len(own) // NUM_SAMPLED_SHARDS)]
    rows = [row for shard in sampled for row in read_shard(night.run.root / shard.path)]
    return sum(row.previous_ids is not None for row in rows) / len(rows) if rows else 0.0
