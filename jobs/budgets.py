"""How much a run drafts: decided once, before its first text, and written down for every later attempt.

Owns where the numbers come from: the configuration, or else a measured cost of steps, the pools' calibration and a
pilot. `pipeline.decoding.budget` and `planning/pilot` beside it choose; `planning/run_forecast` says what is left of
the gain in the whole run, its prompts and the ends of its shards counted.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laserbatch.jobs.console import say
from laserbatch.jobs.night import Night
from laserbatch.pipeline.decoding.budget import Budget, BudgetForecast, Trial, choose_budget, with_forecast
from laserbatch.pipeline.decoding.planning.pilot import pilot_parts, plan_pilot, run_pilot
from laserbatch.pipeline.decoding.planning.pilot_texts import PilotTexts
from laserbatch.pipeline.decoding.planning.run_forecast import PREFILL_TOKENS, RunTexts, judged_on_run
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.distributed.worker import Scout
from laserbatch.pipeline.errors import RunFailed
from laserbatch.pipeline.planning.plan import PlannedRow, Shard, read_shard
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.step_cost import StepCost, read_step_cost

NUM_SAMPLED_SHARDS = 8  # read to see how many entities have a previous text, and for the pilot's rows
LEAST_SAMPLED_SHARDS, MOST_SAMPLED_ROWS = 2, 4096  # fewer of large shards, but never less than two
ROWS_PER_PILOT_TEXT = 100  # so that a pilot of a few budgets is a few percent of a run
MIN_PILOT_TEXTS, MAX_PILOT_TEXTS = 16, 512  # by default: with fewer, luck decides; more tell 1 % no better
PILOT_SEED = 0


def night_budgets(night: Night, shards: Iterable[Shard], scout: Scout) -> dict[Side, Budget]:
    """The budget of each side: that of the manifest if there is one, else chosen and saved there.

    Parameters
    ----------
    shards : those that are going to be generated.
    scout : a worker, called only where something has to be chosen by what it finds.
    """
    recorded = night.manifest.budgets
    if not recorded:
        shards = list(shards)
        decoding, version = night.settings.decoding, night.manifest.pools.version
        pools = {side: None if version is None else night.pools.open(version, side) for side in SIDES}
        step_cost = budget_step_cost(decoding, scout.step_cost)
        chosen = {
            side: _chosen(night, side, [shard for shard in shards if shard.side == side], pools[side], step_cost, scout)
            for side in SIDES
        }
        recorded = night.manifest.budgets = {side: asdict(budget) for side, budget in chosen.items()}
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


def num_pilot_texts(decoding: DecodingSettings, num_rows: int) -> int:
    """How many texts of a side a pilot writes under a budget at most; 0: no pilot."""
    if decoding.num_pilot_texts is not None:
        return min(decoding.num_pilot_texts, num_rows)
    num_texts = min(num_rows // ROWS_PER_PILOT_TEXT, MAX_PILOT_TEXTS)
    return num_texts if num_texts >= MIN_PILOT_TEXTS else 0


def run_texts(
    rows: list[PlannedRow], shards: list[Shard], pool: Pool | None, decoding: DecodingSettings
) -> RunTexts | None:
    """The sampled rows as texts of their entities' former length, or of the pool's mean; None: neither is known."""
    former = [None if row.previous_ids is None else len(row.previous_ids) for row in rows]
    known = [length for length in former if length is not None]
    if pool is not None and pool.manifest.num_texts > 0:
        usual = pool.manifest.num_tokens / pool.manifest.num_texts
    elif known:
        usual = sum(known) / len(known)
    else:
        return None
    lengths = [round(usual) if length is None else length for length in former]
    return RunTexts.of(
        [row.prompt_ids for row in rows],
        [min(length + 1, decoding.max_new_tokens) for length in lengths],
        [length is not None for length in former],
        -(-sum(shard.num_rows for shard in shards) // max(1, len(shards))),
        decoding.batch_size,
    )


def budget_of(data: Mapping[str, Any]) -> Budget:
    """A budget as a manifest keeps it."""
    forecast = data["forecast"]
    if forecast is not None:
        trials = tuple(Trial(**trial) for trial in forecast.get("trials", ()))
        forecast = BudgetForecast(**{**forecast, "trials": trials})
    return Budget(data["max_draft_tokens"], data["min_acceptance"], forecast)


def describe_budget(budget: Budget) -> str:
    """A budget in a line."""
    reason = "" if budget.forecast is None else f" ({budget.forecast.reason}{_told_gain(budget.forecast)})"
    if budget.max_draft_tokens == 0:
        return f"nothing is drafted{reason}"
    return f"up to {budget.max_draft_tokens} draft tokens above {budget.min_acceptance:g}{reason}"


def _told_gain(forecast: BudgetForecast) -> str:
    if forecast.run_speed_up is None or forecast.speed_up is None:
        return ""
    return f"; {forecast.speed_up:.2f} times plain in full batches, {forecast.run_speed_up:.2f} times in this run"


def _chosen(
    night: Night, side: Side, shards: list[Shard], pool: Pool | None, step_cost: StepCost | None, scout: Scout
) -> Budget:
    decoding = night.settings.decoding
    rows = _sampled_rows(night, shards)
    budget = _fastest(night, side, shards, rows, pool, step_cost, scout)
    texts = run_texts(rows, shards, pool, decoding)
    if step_cost is None or texts is None:
        return budget
    curve, prefill_tokens = pool and pool.budgets, decoding.max_prefill_tokens or PREFILL_TOKENS
    may_be_plain = decoding.min_acceptance is None
    return judged_on_run(
        budget, step_cost, decoding.batch_size, texts, curve, prefill_tokens, may_be_plain=may_be_plain
    )


def _fastest(
    night: Night,
    side: Side,
    shards: list[Shard],
    rows: list[PlannedRow],
    pool: Pool | None,
    step_cost: StepCost | None,
    scout: Scout,
) -> Budget:
    """Of full batches."""
    decoding = night.settings.decoding
    share_changed = sum(row.previous_ids is not None for row in rows) / max(1, len(rows))
    num_texts = num_pilot_texts(decoding, sum(shard.num_rows for shard in shards))
    if step_cost is not None and num_texts:
        plan = plan_pilot(
            step_cost,
            decoding.batch_size,
            pool,
            decoding.drafters,
            is_relaxed=decoding.verifier != "greedy",
            share_changed=share_changed,
            max_draft_tokens=decoding.max_draft_tokens,
            min_acceptance=decoding.min_acceptance,
        )
        if plan is not None:
            parts = pilot_parts(_mixed(_spread(rows, num_texts)))

            def write(budget: Budget, part: int) -> PilotTexts:
                return scout.pilot(side, parts[part], budget)

            say(f"{side}s: a pilot writes up to {num_texts} texts under each of some budgets, to choose the fastest")
            try:
                return run_pilot(plan, write, len(parts))
            except RunFailed as error:  # a row that workers die on is found later, among its shard's rows
                say(f"{side}s: chosen without a pilot: {error}")
    return side_budget(decoding, pool, step_cost, share_changed)


def _sampled_rows(night: Night, shards: list[Shard]) -> list[PlannedRow]:
    """The rows of some shards, spread over all."""
    most_rows = max((shard.num_rows for shard in shards), default=1)
    num_shards = max(LEAST_SAMPLED_SHARDS, min(NUM_SAMPLED_SHARDS, MOST_SAMPLED_ROWS // most_rows))
    return [row for shard in _spread(shards, num_shards) for row in read_shard(night.run.root / shard.path)]


def _mixed(rows: list[PlannedRow]) -> list[PlannedRow]:
    """In random order, the same each time: then the first of them are from all over, too."""
    return random.Random(PILOT_SEED).sample(rows, len(rows))


def _spread(values: list, num_wanted: int) -> list:
    """So many of the values, or all if there are fewer, at even distances."""
    num_wanted = min(num_wanted, len(values))
    return [values[number * len(values) // num_wanted] for number in range(num_wanted)]
