"""The draft budgets of a simulated night: chosen as a night chooses its own, and judged on texts that chose nothing.

Both come from `pipeline.decoding.budget`, by replays of the texts that the pool is calibrated with. What a budget gives
is then measured on the held-back texts, and put into the seconds of a whole run. Knows no page and no terminal.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laserbatch.jobs.budgets import side_budget
from laserbatch.jobs.night import Night
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.simulate_world import SideTexts
from laserbatch.pipeline.decoding.budget import Budget, budget_forecasts, known_batch_size
from laserbatch.pipeline.decoding.planning.run_forecast import PREFILL_TOKENS, RunTexts, judged_on_run, run_speed_up
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.planning.planner import default_shard_size
from laserbatch.retrieval_pools.calibration.estimates import Bootstrap, Estimate
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.budget_curve import BudgetCurve
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.simulating.simulate import DraftSetting, Simulator
from laserbatch.retrieval_pools.step_cost import StepCost, computed_step_cost, read_step_cost

BATCH_SIZES = (1, 16, 64, 256)
MAX_RUN_TEXTS = 1024  # of a run whose seconds are forecast; longer ones are more of the same


@dataclass(frozen=True)
class Costs:
    """A step cost, and the batch sizes that are asked about."""

    step_cost: StepCost
    batch_sizes: tuple[int, ...]

    @classmethod
    def of(cls, path: Path | None, batch_sizes: tuple[int, ...], night: Night, settings: Settings) -> "Costs":
        """The cost of the given file, or the configured one, or that which the run chose by; else a computed one.

        Without batch sizes those of the file, or some.

        Raises
        ------
        PoolError
            The file cannot be read, or a batch size was not measured.
        """
        given = path or settings.decoding.step_cost
        step_cost = _measured_for(night) if given is None else read_step_cost(Path(given))
        if step_cost is None:
            chosen = batch_sizes or BATCH_SIZES
            return cls(computed_step_cost(chosen), chosen)
        for batch_size in batch_sizes:
            step_cost.plain_tokens_per_s(batch_size)  # refuses one that was not measured
        return cls(step_cost, batch_sizes or step_cost.batch_sizes)

    def batch_size_of(self, settings: Settings) -> int:
        """The one that settings are recommended for: the configured one if it is asked about, else the middle one."""
        configured = settings.decoding.batch_size
        return configured if configured in self.batch_sizes else self.batch_sizes[len(self.batch_sizes) // 2]


def _measured_for(night: Night) -> StepCost | None:
    """The measured cost that the run chose its budgets by, if it is still in the workspace."""
    forecasts = [budget.get("forecast") or {} for budget in night.manifest.budgets.values()]
    names = {forecast.get("step_cost") for forecast in forecasts}
    for path in sorted(night.workspace.step_costs_folder.glob("*.json")):
        try:
            step_cost = read_step_cost(path)
        except PoolError:  # a night would measure it again
            continue
        if step_cost.name in names:
            return step_cost
    return None


@dataclass(frozen=True)
class BudgetSpeed:
    """What one budget gives at one batch size.

    Attributes
    ----------
    budget : with its forecast, of the texts that the pool is calibrated with; all other figures are of the held-back
        ones, given previous texts as a night gives them.
    mean_drafted : draft tokens of a step.
    tokens_per_s, speed_up : of a full batch whose prompts are there; over plain decoding.
    run_speed_up : the same of a whole run with its prompts and its shards' ends; None without a calibration.
    over_configured : tokens per second over those of the configured budget.
    """

    batch_size: int
    budget: Budget
    tokens_per_step: Estimate
    mean_drafted: float
    tokens_per_s: float
    speed_up: Estimate
    run_speed_up: float | None
    over_configured: Estimate


@dataclass(frozen=True)
class SideBudgets:
    """The budgets of a side.

    Attributes
    ----------
    curve : what every budget of the grid gained on the texts that the pool is calibrated with, or None.
    grid : the same budgets with their forecasts at the batch size that settings are recommended for; none without it.
    configured : by batch size: the configuration's numbers, or where it has none the chosen ones.
    chosen : by batch size: what a night chooses that is free to.
    """

    curve: BudgetCurve | None
    grid: list[Budget]
    configured: dict[int, BudgetSpeed]
    chosen: dict[int, BudgetSpeed]


class BudgetChoice:
    """Chooses and judges the budgets of a side. As in a night, a whole run that drafts would slow down is plain.

    Parameters
    ----------
    simulator : of the side.
    base : the setting whose pool is calibrated; its budget is replaced.
    """

    def __init__(
        self, simulator: Simulator, base: DraftSetting, texts: SideTexts, settings: Settings, costs: Costs
    ) -> None:
        self.pool: Pool = simulator.night_pool(base)
        self.base = base
        self._simulator, self._settings, self._costs = simulator, settings, costs
        self._run_texts = _run_texts(texts, settings)

    def configured(self, batch_size: int) -> Budget:
        """What a night of these settings drafts."""
        return self._budget(self._settings.decoding, batch_size)

    def chosen(self, batch_size: int) -> Budget:
        """What it drafts if its settings leave the choice."""
        free = self._settings.decoding.model_copy(update={"max_draft_tokens": None, "min_acceptance": None})
        return self._budget(free, batch_size)

    def setting(self, budget: Budget) -> DraftSetting:
        """The base under another budget."""
        return self.base.with_budget(budget.max_draft_tokens, budget.min_acceptance)

    def judged(self) -> SideBudgets:
        """Both at every batch size."""
        cost, sizes = self._costs.step_cost, self._costs.batch_sizes
        batch_size = known_batch_size(cost, self._costs.batch_size_of(self._settings))
        sources, share_changed = self._settings.decoding.drafters, self._simulator.share_changed
        return SideBudgets(
            self.pool.budgets,
            budget_forecasts(cost, batch_size, self.pool, sources, share_changed),
            {size: self._speed(size, self.configured(size)) for size in sizes},
            {size: self._speed(size, self.chosen(size)) for size in sizes},
        )

    def _budget(self, decoding: DecodingSettings, batch_size: int) -> Budget:
        decoding = decoding.model_copy(update={"batch_size": batch_size})
        budget = side_budget(decoding, self.pool, self._costs.step_cost, self._simulator.share_changed)
        return judged_on_run(
            budget,
            self._costs.step_cost,
            batch_size,
            self._run_texts,
            self.pool.budgets,
            decoding.max_prefill_tokens or PREFILL_TOKENS,
            may_be_plain=decoding.min_acceptance is None,
        )

    def _speed(self, batch_size: int, budget: Budget) -> BudgetSpeed:
        cost, kind = self._costs.step_cost, self._simulator.kinds[-1]
        tally = self._simulator.replay(self.setting(budget), kind)
        bootstrap = Bootstrap(len(tally), self._settings.seed)
        sums = bootstrap.sums(tally)
        configured = bootstrap.sums(self._simulator.replay(self.setting(self.configured(batch_size)), kind))
        speeds = cost.tokens_per_s(batch_size, sums)
        curve, prefill_tokens = self.pool.budgets, self._settings.decoding.max_prefill_tokens or PREFILL_TOKENS
        has_curve = curve is not None and curve.new is not None
        return BudgetSpeed(
            batch_size,
            budget,
            Estimate.of(sums.tokens_per_step),
            float(sums.mean_drafted[0]),
            float(speeds[0]),
            Estimate.of(speeds / cost.plain_tokens_per_s(batch_size)),
            run_speed_up(cost, batch_size, self._run_texts, curve, budget, prefill_tokens=prefill_tokens)
            if has_curve
            else None,
            Estimate.of(speeds / cost.tokens_per_s(batch_size, configured)),
        )


def _run_texts(texts: SideTexts, settings: Settings) -> RunTexts:
    """As many texts as the night wrote, drawn from the held-back ones; changed ones in their share."""
    is_changed = np.array([text.previous_ids is not None for text in texts.held_back])
    share = texts.share_changed if is_changed.any() else 0.0
    share = share if (~is_changed).any() else 1.0
    weights = np.where(is_changed, share / max(1, is_changed.sum()), (1 - share) / max(1, (~is_changed).sum()))
    num_texts = max(1, min(texts.num_written, MAX_RUN_TEXTS))
    numbers = np.random.default_rng(settings.seed).choice(len(weights), num_texts, p=weights)
    drawn = [texts.held_back[number] for number in numbers]
    batch_size = settings.decoding.batch_size
    return RunTexts.of(
        [text.prompt_ids for text in drawn],
        [len(text.text_ids) + 1 for text in drawn],
        is_changed[numbers],
        settings.night.shard_size or default_shard_size(texts.num_written, batch_size),
        batch_size,
    )
