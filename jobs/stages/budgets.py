"""Chooses a run's draft budgets once, before its first text, and saves them for later attempts."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from laserbatch.jobs.console import say
from laserbatch.jobs.stages.night import Night, earlier_runs, means
from laserbatch.pipeline.budget.choice import ChosenBudget, budget_step_cost, by_step, read_step_cost, side_budget
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.planning.plan import Shard, read_shard
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import BudgetFigures
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.retrieval_pools.step_cost import StepCost

NUM_SAMPLED_SHARDS = 8  # shards that are read to estimate the share of entities with a previous text


def last_speed(night: Night, sides: Iterable[Side]) -> float | None:
    """Tokens per second of the newest earlier night that wrote texts of `sides`; None without such a night."""
    for run in reversed(earlier_runs(night.workspace, night.run.run_id)):
        if (manifest := unless_damaged(run.load_manifest)) is not None:
            written = manifest.generation.sides
            if speed := DecodingStats.total(written[side].stats for side in sides if side in written).tokens_per_s:
                return speed
    return None


def night_budgets(night: Night, shards: Iterable[Shard], measure: Callable[[], StepCost]) -> dict[Side, Budget]:
    """The draft budget of each side, read from the manifest; if it has none, chosen and saved there.

    `measure` lets a worker measure the step cost; it is called only if a budget has to be chosen.
    """
    if not night.manifest.generation.budgets:
        shards = list(shards)
        decoding, version = night.settings.decoding, night.manifest.generation.pools.version
        step_cost = budget_step_cost(decoding, measure)
        chosen = {}
        for side in SIDES:
            pool = None if version is None else night.pools.open(version, side)
            share_changed = _share_changed(night, [shard for shard in shards if shard.side == side])
            cost = step_cost and at_usual_context(step_cost, night.previous, side)
            chosen[side] = by_step(decoding, side_budget(decoding, pool, cost, share_changed))
        night.manifest.generation.budgets = {
            side: BudgetFigures(**asdict(budget.budget), forecast=budget.forecast) for side, budget in chosen.items()
        }
        night.manifest.save()
        for side, budget in chosen.items():
            say(f"{side}s: {describe_budget(budget)}")
    return {side: budget_of(figures) for side, figures in night.manifest.generation.budgets.items()}


def at_usual_context(step_cost: StepCost, run: RunFolder | None, side: Side) -> StepCost:
    """The step cost at a context of a side's mean prompt and half its mean text in a run; unchanged without texts."""
    prompt, text = means(run, side, ("num_prompt_tokens", "num_tokens")) if run is not None else (None, None)
    return step_cost if prompt is None or text is None else step_cost.at_context(prompt + text / 2)


def known_step_cost(night: Night) -> StepCost | None:
    """The configured step cost, or one measured in the workspace for a model of the run's texts; None without one.

    Among these, the one by which the run chose its budgets comes first, then the newest.
    """
    if night.settings.decoding.step_cost is not None:
        return read_step_cost(Path(night.settings.decoding.step_cost))
    batches = (batch for side in SIDES for batch in night.run.iter_knowledge(side, ["model_id"]))
    models = {model for batch in batches for model in batch["model_id"].unique().to_pylist()}
    used = {figures.forecast.step_cost for figures in night.manifest.generation.budgets.values()}
    measured = sorted(night.workspace.step_costs_folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    costs = [unless_damaged(partial(read_step_cost, path)) for path in reversed(measured)]
    of_run = [cost for cost in costs if cost and cost.model_id in models]
    return max(of_run, key=lambda cost: cost.name in used, default=None)


def budget_of(figures: BudgetFigures) -> Budget:
    return Budget(figures.max_draft_tokens, figures.min_acceptance, figures.is_by_step)


def describe_budget(chosen: ChosenBudget) -> str:
    budget, reason = chosen.budget, chosen.forecast.reason
    if budget.max_draft_tokens == 0:
        return f"drafting is off ({reason})"
    if budget.is_by_step:
        return f"each step chooses how much to draft for its number of texts ({reason})"
    return f"up to {budget.max_draft_tokens} draft tokens, acceptance at least {budget.min_acceptance:g} ({reason})"


def _share_changed(night: Night, shards: list[Shard]) -> float:
    """The share of rows whose entity has a previous text, in a sample spread over the shards."""
    stride = max(1, len(shards) // NUM_SAMPLED_SHARDS)
    rows = [row for shard in shards[::stride] for row in read_shard(night.run.root / shard.path)]
    return sum(row.previous_ids is not None for row in rows) / max(1, len(rows))
