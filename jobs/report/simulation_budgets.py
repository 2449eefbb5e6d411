"""Draft budgets on a simulation's page: the grid that a night chooses from, what it chooses, and what that gives."""

from collections.abc import Sequence

import numpy as np

from laserbatch.jobs.formatting import count, decimal, rate, times
from laserbatch.jobs.report.blocks import Block, Figure, Note, Section, Table
from laserbatch.jobs.report.estimate_charts import EstimateLine, estimate_lines
from laserbatch.jobs.report.simulation_studies import legend_of
from laserbatch.jobs.simulate_result import Simulation
from laserbatch.jobs.simulate_view import budget_words, interval
from laserbatch.retrieval_pools.index.budget_curve import DRAFT_TOKENS, MIN_ACCEPTANCES

TREE_COLOURS = ("#8f9bab", "#5b9bd5", "#0b4f8a", "#009e73", "#e0a100", "#c4560a", "#8a1c5c")  # small to large


def budget_section(simulation: Simulation) -> Section:
    """The section "Draft budget"."""
    blocks: list[Block] = []
    for side in simulation.sides:
        if not side.budgets.grid:
            blocks.append(Note(f"{side.side}s: too few texts to calibrate with, so nothing was replayed by budget."))
            continue
        forecasts = [budget.forecast for budget in side.budgets.grid]
        paces, speed_ups = ([getattr(one, name) for one in forecasts] for name in ("tokens_per_step", "speed_up"))
        blocks.append(_grid_figure(f"Tokens per step, {side.side}s", paces, "tokens per step"))
        name = f"Speed-up at batch {forecasts[0].batch_size:,}, {side.side}s"
        blocks.append(_grid_figure(name, speed_ups, "times plain decoding"))
    is_free = all(side.budgets.configured == side.budgets.chosen for side in simulation.sides)
    blocks += [_table(simulation, name) for name in (("chosen",) if is_free else ("configured", "chosen"))]
    lead = (
        "What a night chooses its budget from: replays of the texts that the pool is calibrated with. More draft "
        "tokens accept more, ever more slowly; verifying them is free while a step waits for memory, and dear once it "
        "does not. A relaxed night that is long enough then tries bolder budgets, too, in a pilot: replays are greedy."
    )
    return Section("budgets", "Draft budget", lead, blocks)


def _grid_figure(title: str, values: Sequence[float], y_name: str) -> Figure:
    """One line for every largest tree; `values` are in the order of the grid."""
    rows = np.reshape(values, (len(DRAFT_TOKENS), len(MIN_ACCEPTANCES))).tolist()
    lines = [
        EstimateLine(str(size), [(value, value, value) for value in row], colour)
        for size, row, colour in zip(DRAFT_TOKENS, rows, TREE_COLOURS, strict=True)
    ]
    svg = estimate_lines(lines, [f"{least:g}" for least in MIN_ACCEPTANCES], "min_acceptance", y_name)
    return Figure(title, svg, caption="Lines: the largest tree, 1 to 64 draft tokens.", legend=legend_of(lines))


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
