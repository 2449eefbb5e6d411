"""Draft budgets on a simulation's page: the grid that a night chooses from, what it chooses, and what that gives."""

from collections.abc import Callable
from functools import partial

import numpy as np

from jobs.report.blocks import Block, Figure, Note, Section, Table
from jobs.report.estimate_charts import EstimateLine, estimate_lines
from jobs.report.formatting import count, decimal, rate, times
from jobs.report.simulation_studies import legend_of
from jobs.simulate_result import SideSimulation, Simulation
from jobs.simulate_view import budget_words, interval
from pipeline.decoding.budget import measured_batch_size, predicted_speed_ups
from retrieval_pools.budget_curve import DRAFT_TOKENS, MIN_ACCEPTANCES, BudgetCurve, ReplayedBudgets

TREE_COLOURS = ("#8f9bab", "#5b9bd5", "#0b4f8a", "#009e73", "#e0a100", "#c4560a", "#8a1c5c")  # small to large


def budget_section(simulation: Simulation) -> Section:
    """The section "Draft budget"."""
    blocks: list[Block] = []
    batch_size = measured_batch_size(simulation.step_cost, simulation.recommended_batch_size)
    speed_ups = partial(predicted_speed_ups, simulation.step_cost, batch_size)
    for side in simulation.sides:
        if side.budgets.curve is None:
            blocks.append(Note(f"{side.side}s: too few texts to calibrate with, so nothing was replayed by budget."))
            continue
        blocks.append(_grid_figure(f"Tokens per step, {side.side}s", side, _paces, "tokens per step"))
        name = f"Speed-up at batch {batch_size:,}, {side.side}s"
        blocks.append(_grid_figure(name, side, speed_ups, "times plain decoding"))
    is_free = all(side.budgets.configured == side.budgets.chosen for side in simulation.sides)
    blocks += [_table(simulation, name) for name in (("chosen",) if is_free else ("configured", "chosen"))]
    lead = (
        "What a night chooses its budget from: replays of the texts that the pool is calibrated with. More draft "
        "tokens accept more, ever more slowly; verifying them is free while a step waits for memory, and dear once it "
        "does not."
    )
    return Section("budgets", "Draft budget", lead, blocks)


def _grid_figure(
    title: str, side: SideSimulation, of_cells: Callable[[ReplayedBudgets], np.ndarray], y_name: str
) -> Figure:
    """One line for every largest tree."""
    values = _mixed(side.budgets.curve, side.share_changed, of_cells).reshape(len(DRAFT_TOKENS), len(MIN_ACCEPTANCES))
    lines = [
        EstimateLine(str(size), [(value, value, value) for value in row.tolist()], colour)
        for size, row, colour in zip(DRAFT_TOKENS, values, TREE_COLOURS, strict=True)
    ]
    svg = estimate_lines(lines, [f"{least:g}" for least in MIN_ACCEPTANCES], "min_acceptance", y_name)
    caption = "Lines: the largest tree, 1 to 64 draft tokens."
    return Figure(title, svg, caption=caption, legend=legend_of(lines))


def _mixed(curve: BudgetCurve, share_changed: float, of_cells: Callable[[ReplayedBudgets], np.ndarray]) -> np.ndarray:
    """Rates of new and changed texts, by the time that their tokens take: float64[num_cells]."""
    new = of_cells(curve.new)
    if curve.changed is None:
        return new
    return 1 / ((1 - share_changed) / new + share_changed / of_cells(curve.changed))


def _paces(kind: ReplayedBudgets) -> np.ndarray:
    return np.array([cell.tokens_per_step for cell in kind.cells])


def _table(simulation: Simulation, name: str) -> Table:
    rows = [
        [
            f"{side.side}s",
            count(batch_size),
            budget_words(found.budget),
            decimal(None if found.budget.forecast is None else found.budget.forecast.tokens_per_step),
            interval(found.tokens_per_step),
            decimal(found.mean_drafted, 1),
            rate(found.tokens_per_s),
            interval(found.speed_up),
            times(found.run_speed_up),
            interval(found.over_configured),
        ]
        for side in simulation.sides
        for batch_size, found in getattr(side.budgets, name).items()
    ]
    columns = [
        "",
        "Batch",
        "Budget",
        "Tokens/step, forecast",
        "on other texts",
        "Drafted",
        "Tokens/s",
        "Over plain",
        "Whole run",
        "Over configured",
    ]
    caption = (
        f"Step cost: {simulation.step_cost.name}. Tokens a second and Over plain are of full batches whose prompts are "
        "there. Whole run: the same of as many texts as the run wrote, with their prompts, and the ends of shards, "
        "at which few texts are left."
    )
    title = "As configured" if name == "configured" else "Chosen by a night whose configuration leaves the choice"
    return Table(title, columns, rows, caption=caption, left=frozenset({0, 2}))
