"""The choice of a budget: the largest tree, and the least estimated acceptance of a drafted token's path.

The drafts of a sequence depend on this pair and on the sequence alone, so the pair is fixed for a run. It is chosen for
the most tokens per second, from the cost of a step here and the gain in replays of the pool's texts. Ends of shards and
prompts are not counted: with fewer texts at once drafts gain more, and prompts take the same time either way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from laserbatch.pipeline.decoding.plugins import drafter_plugin
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.storage.figures import BudgetForecast
from laserbatch.pipeline.validation import read_yaml, validated
from laserbatch.retrieval_pools.index.calibration_record import MIN_ACCEPTANCES, SIZE_KNOTS, BudgetCell
from laserbatch.retrieval_pools.step_cost import StepCost

EXAMPLE = (
    "steps: [{batch_size: 16, num_tokens: 16, seconds: 0.0043}, {batch_size: 16, num_tokens: 256, seconds: 0.0064}]"
)
PLAIN = Budget(0, 1.0)
OFF = "turned off in the configuration"
NOT_MEASURED = "a fixed number, since the rule samples; decoding.max_draft_tokens sets another"
MIN_GAIN = 1.1  # with less predicted gain, plain decoding is safer: measured gains were 10 to 35 % below predictions
AS_GOOD = 0.995  # share of the best predicted speed that counts as equally fast
# Highest threshold under a relaxed rule. A text then follows its drafts, which replays of fixed texts cannot show: they
# would choose thresholds of 0.4 to 0.9 for long answers, where 0.07 was faster (`benchmarks/engine.py --quick`).
MAX_RELAXED_ACCEPTANCE = 0.1
# Actual over estimated acceptance, for uncalibrated estimates from a sequence's own texts: in two collections of
# published texts it was 0.45 to 1 in most bands, and less in a few.
UNCHECKED_TRUST = 0.5
UNCHECKED_SIZE = 16  # largest tree where nothing was replayed
MAX_LOOKUP_OVERHEAD = 0.01  # share of a plain step that looking for drafts may cost where none is found


@dataclass(frozen=True)
class ChosenBudget:
    budget: Budget
    forecast: BudgetForecast


def budget_step_cost(decoding: DecodingSettings, measure: Callable[[], StepCost]) -> StepCost | None:
    """The configured cost of steps, or the measured one; None if the configuration leaves nothing to choose."""
    is_configured = decoding.max_draft_tokens is not None and decoding.min_acceptance is not None
    drafts = decoding.drafters and decoding.max_draft_tokens != 0
    if decoding.engine == "vllm" or decoding.verifier_samples or is_configured or not drafts:
        return None
    return measure() if decoding.step_cost is None else read_step_cost(Path(decoding.step_cost))


def read_step_cost(path: Path) -> StepCost:
    """A step cost that was measured here or elsewhere, from YAML or JSON.

    Raises ConfigError: the file is missing, is neither YAML nor JSON, or does not hold a `StepCost`.
    """
    data = read_yaml(path, "step cost", f"expected, for example, `{EXAMPLE}`")
    return validated(StepCost, data, f"{path} is not a step cost", f". Expected, for example, `{EXAMPLE}`")


def side_budget(decoding: DecodingSettings, pool, step_cost: StepCost | None, share_changed: float) -> ChosenBudget:
    """The budget of one side that writes the most tokens per second. The same arguments give the same budget.

    With the replays of a calibrated pool, speed is predicted for every budget of their grid and for plain decoding.
    Without them a token is drafted if its probability of acceptance exceeds its price: the threshold is the price of a
    packed token in plainly decoded ones (the Lagrange multiplier of tokens per second), and twice that if estimates
    were never checked. If one of the two numbers is configured it is kept, and the other one is chosen for it.

    `pool`, or None, is drafted from besides a sequence's own texts. `step_cost` is used at its largest batch size that
    is not above the configured one; None: the configuration leaves nothing to choose. `share_changed` is the share of
    the sequences that have a previous text.
    """
    if decoding.engine == "vllm":
        budget = Budget.of(decoding) if pool is not None and decoding.drafters else PLAIN
        return ChosenBudget(budget, BudgetForecast("vLLM's proposer chooses the number at each step"))
    if decoding.engine == "endpoint":
        return ChosenBudget(PLAIN, BudgetForecast("a server writes the texts"))
    if not decoding.drafters:
        return ChosenBudget(PLAIN, BudgetForecast(OFF))
    if step_cost is None:
        chosen = configured_budget(Budget.of(decoding), pool, decoding.drafters, share_changed)
        if decoding.verifier_samples and decoding.max_draft_tokens is None:
            chosen = replace(chosen, forecast=replace(chosen.forecast, reason=NOT_MEASURED))
        return chosen
    batch_size, sources = known_batch_size(step_cost, decoding.batch_size), decoding.drafters
    configured = decoding.max_draft_tokens, decoding.min_acceptance
    if decoding.plugin_drafters:
        is_checked = any(drafter_plugin(name).is_calibrated for name in decoding.plugin_drafters)
        trust = 1.0 if is_checked else UNCHECKED_TRUST
        return _worth_its_price(step_cost, batch_size, trust, True, configured)
    if decoding.max_draft_tokens == 0:
        return ChosenBudget(PLAIN, BudgetForecast(OFF))
    cells = _nearest(replayed_cells(pool, sources, share_changed), *configured)
    if decoding.verifier != "greedy" and decoding.min_acceptance is None:
        cells = [cell for cell in cells if cell.min_acceptance <= MAX_RELAXED_ACCEPTANCE]
    if cells:
        pace = plain_pace(pool, share_changed)
        chosen = _fastest(step_cost, batch_size, cells, pace)
        gain = chosen.forecast.speed_up
        assert gain is not None
        if gain < MIN_GAIN and decoding.min_acceptance is None:
            reason = f"no budget repays its cost: the best one is {gain:.2f} times as fast as plain decoding in replays"
            reason += _how_to_draft(decoding.max_draft_tokens)
            return ChosenBudget(PLAIN, BudgetForecast(reason, step_cost.name, batch_size, pace, 0.0, 1.0))
        return replace(chosen, budget=chosen.budget.with_overrides(*configured))
    is_calibrated = pool is not None and "pool" in sources and pool.is_calibrated
    has_texts = pool is not None and pool.manifest.num_texts > 0
    trust = 1.0 if is_calibrated else UNCHECKED_TRUST
    return _worth_its_price(step_cost, batch_size, trust, has_texts, configured)


def by_step(decoding: DecodingSettings, chosen: ChosenBudget) -> ChosenBudget:
    """A side's chosen budget; under greedy verification the largest one, from which each step verifies what pays.

    The forecast stays that of the best fixed budget.
    """
    if not decoding.chooses_by_step or not decoding.drafters:
        return chosen
    budget = Budget(SIZE_KNOTS[-1], MIN_ACCEPTANCES[0], is_by_step=True)
    return ChosenBudget(budget, replace(chosen.forecast, reason="with greedy verification, drafts change no text"))


def configured_budget(budget: Budget, pool, sources: Sequence[str], share_changed: float) -> ChosenBudget:
    """A configured budget, with the forecast of replays for the nearest budget of their grid."""
    forecast = BudgetForecast("set in the configuration")
    cells = replayed_cells(pool, sources, share_changed)
    if cells and budget.max_draft_tokens:
        (cell,) = _nearest(cells, budget.max_draft_tokens, budget.min_acceptance)
        forecast = replace(forecast, tokens_per_step=cell.tokens_per_step, mean_drafted=cell.mean_drafted)
    return ChosenBudget(budget, forecast)


def known_batch_size(step_cost: StepCost, batch_size: int) -> int:
    """The largest measured batch size that is not above `batch_size`; the smallest if all are."""
    return max([size for size in step_cost.batch_sizes if size <= batch_size] or step_cost.batch_sizes[:1])


def step_seconds(step_cost: StepCost, batch_size: int, cell: BudgetCell) -> float:
    """Mean seconds of a full batch's step: one text's tree has each size by its share, all others the mean size.

    A step's cost is not linear where a kernel changes, so the mean size alone would mislead at batch 1.
    """
    num_drafted = np.array(SIZE_KNOTS) + (batch_size - 1) * cell.mean_drafted
    verified_s = float(np.array(cell.size_shares) @ step_cost.seconds(batch_size, batch_size + num_drafted))
    return verified_s + float(step_cost.draft_seconds(batch_size, np.array(cell.mean_drafted)))


def replayed_cells(pool, sources: Sequence[str], share_changed: float) -> list[BudgetCell]:
    """The gains of each budget in replays of texts like those to be written; empty if no replay fits."""
    curve = None if pool is None else pool.budgets
    if curve is None or curve.new is None or set(curve.sources) != set(sources):
        return []
    if curve.changed is None:
        return list(curve.new.cells)
    return [_mixed(*cells, share_changed) for cells in zip(curve.new.cells, curve.changed.cells, strict=True)]


def _mixed(new: BudgetCell, changed: BudgetCell, share_changed: float) -> BudgetCell:
    """Average a budget's replays over new and changed texts; shares of texts are used as shares of tokens."""
    steps = np.array([(1 - share_changed) / new.tokens_per_step, share_changed / changed.tokens_per_step])  # per token
    shares = steps @ np.array([new.size_shares, changed.size_shares]) / steps.sum()
    return new.model_copy(update={"tokens_per_step": 1 / steps.sum(), "size_shares": tuple(shares.tolist())})


def plain_pace(pool, share_changed: float) -> float:
    """Tokens per step without drafts, for texts like those to be written; above 1 if a grammar appends tokens."""
    curve = None if pool is None else pool.budgets
    if curve is None or curve.new is None:
        return 1.0
    new, changed = (replay.plain_tokens_per_step for replay in (curve.new, curve.changed or curve.new))
    return 1 / ((1 - share_changed) / new + share_changed / changed)


def _fastest(step_cost: StepCost, batch_size: int, cells: Sequence[BudgetCell], pace_of_plain: float) -> ChosenBudget:
    """The budget that drafts least among those about as fast as the fastest, so that noise decides less often."""
    plain_s = step_cost.plain_seconds(batch_size) / pace_of_plain
    speed_ups = [plain_s * cell.tokens_per_step / step_seconds(step_cost, batch_size, cell) for cell in cells]
    among_best = [pair for pair in zip(cells, speed_ups, strict=True) if pair[1] >= max(speed_ups) * AS_GOOD]
    cell, speed_up = min(among_best, key=lambda pair: pair[0].mean_drafted)
    pace, drafted = cell.tokens_per_step, cell.mean_drafted
    forecast = BudgetForecast("the fastest in replays", step_cost.name, batch_size, pace, drafted, speed_up)
    return ChosenBudget(Budget(cell.max_draft_tokens, cell.min_acceptance), forecast)


def _nearest(
    cells: Sequence[BudgetCell], max_draft_tokens: int | None, min_acceptance: float | None
) -> list[BudgetCell]:
    """The cells nearest to the given numbers; a number that is None is ignored."""
    for name, value in (("max_draft_tokens", max_draft_tokens), ("min_acceptance", min_acceptance)):
        if value is not None and cells:
            nearest = min((abs(getattr(cell, name) - value), getattr(cell, name)) for cell in cells)[1]
            cells = [cell for cell in cells if getattr(cell, name) == nearest]
    return list(cells)


def _worth_its_price(
    step_cost: StepCost, batch_size: int, trust: float, has_texts: bool, configured: tuple[int | None, float | None]
) -> ChosenBudget:
    """The budget that drafts tokens whose estimated acceptance exceeds their price, in trees of up to UNCHECKED_SIZE.

    The price is the highest over all numbers of draft tokens that a step may have. Without a pool's texts that is any
    number, as drafts may find nothing for whole texts, or one token for one text. Numbers that are not None stay.
    """
    plain_s, (max_draft_tokens, min_acceptance) = step_cost.plain_seconds(batch_size), configured
    totals = np.arange(1, UNCHECKED_SIZE * batch_size + 1)  # draft tokens of a step
    if has_texts:
        totals = totals[batch_size - 1 :: batch_size]
    added_s = step_cost.seconds(batch_size, batch_size + totals) - plain_s
    added_s = added_s + step_cost.draft_seconds(batch_size, totals / batch_size)
    price = float((added_s * batch_size / (totals * plain_s)).max())
    looking = float(step_cost.draft_seconds(batch_size, np.zeros(()))) / plain_s
    affordable = [least for least in MIN_ACCEPTANCES if least >= price / trust]
    checked = "" if trust == 1.0 else ", and no acceptance was measured yet"
    facts = f"a draft token costs up to {price:.2f} of a plainly decoded token{checked}"
    if affordable and (has_texts or looking <= MAX_LOOKUP_OVERHEAD):
        budget = Budget(UNCHECKED_SIZE, affordable[0])
    else:
        budget, facts = PLAIN, f"drafts do not repay their cost: {facts}"
        facts += _how_to_draft(max_draft_tokens) if min_acceptance is None else ""
    if budget != PLAIN or min_acceptance is not None:
        budget = budget.with_overrides(max_draft_tokens, min_acceptance)
    return ChosenBudget(budget, BudgetForecast(facts, step_cost.name, batch_size))


def _how_to_draft(max_draft_tokens: int | None) -> str:
    """The end of a reason for plain decoding if the largest tree alone is configured."""
    if max_draft_tokens is None:
        return ""
    return f"; max_draft_tokens {max_draft_tokens} is only a limit: set min_acceptance too to draft all the same"
