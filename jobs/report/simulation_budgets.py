"""Draft budgets on a simulation's page: what they accept, and how fast that is at a step cost."""

from jobs.report.blocks import Block, Figure, Section, Table
from jobs.report.estimate_charts import EstimateLine, estimate_lines
from jobs.report.formatting import count, rate, times
from jobs.report.simulation_studies import LINE_COLOURS, legend_of, points_of
from jobs.simulate_result import KINDS, SideSimulation, Simulation
from jobs.simulate_view import interval
from retrieval_pools.studies import CONFIGURED, BudgetSpeed, Outcome, best_speed


def budget_section(simulation: Simulation) -> Section:
    """The section "Draft budget"."""
    blocks: list[Block] = []
    for study, x_name, title in (
        ("draft tokens", "draft tokens at most", "Full trees"),
        ("min_acceptance", "min_acceptance, at most 64 draft tokens", "Trees cut by estimated acceptance"),
    ):
        lines, steps = [], []
        for side, with_previous, outcomes in _by_kind(simulation, study):
            steps = [outcome.trial.value for outcome in outcomes]
            name = f"{KINDS[with_previous]} {side.side}s"
            lines.append(EstimateLine(name, points_of(outcomes), LINE_COLOURS[len(lines) % len(LINE_COLOURS)]))
        svg = estimate_lines(lines, steps, x_name, "tokens per step")
        blocks.append(Figure(title, svg, legend=legend_of(lines)))
    lead = "More draft tokens accept more, ever more slowly; what they cost is the next section's matter."
    return Section("budgets", "Draft budget", lead, blocks)


def speed_section(simulation: Simulation) -> Section:
    """The section "Speed at a step cost"."""
    blocks: list[Block] = []
    for side in simulation.sides:
        for with_previous in side.configured:
            own = [one for one in side.speeds if one.with_previous == with_previous]
            lines, steps = [], []
            for batch_size in simulation.batch_sizes:
                of_batch = [one for one in own if one.batch_size == batch_size and one.study == "min_acceptance"]
                steps = [one.value for one in of_batch]
                points = [(one.speed_up.value, one.speed_up.low, one.speed_up.high) for one in of_batch]
                colour = LINE_COLOURS[len(lines) % len(LINE_COLOURS)]
                lines.append(EstimateLine(f"batch {batch_size:,}", points, colour))
            name = f"{KINDS[with_previous]} {side.side}s"
            svg = estimate_lines(lines, steps, "min_acceptance, at most 64 draft tokens", "times plain decoding")
            blocks.append(Figure(f"Speed-up, {name}", svg, legend=legend_of(lines)))
    rows = [
        _speed_row(side, with_previous, batch_size)
        for side in simulation.sides
        for with_previous in side.configured
        for batch_size in simulation.batch_sizes
    ]
    columns = ["", "Batch", "Tokens/s", "Over plain", "Best budget", "Tokens/s", "Over plain", "Over configured"]
    caption = f"Step cost: {simulation.step_cost}. Only the steps that write are counted, not the prompts."
    left = frozenset({0, 4})
    blocks.append(Table("As configured, and the best budget of those tried", columns, rows, caption=caption, left=left))
    lead = "Verifying a wide tree is free while the step waits for memory, and dear once it does not."
    return Section("speed", "Speed at a step cost", lead, blocks)


def _speed_row(side: SideSimulation, with_previous: bool, batch_size: int) -> list[str]:
    configured = side.configured_speed(batch_size, with_previous)
    best = best_speed(side.speeds, batch_size, with_previous)
    return [
        f"{KINDS[with_previous]} {side.side}s",
        count(batch_size),
        rate(configured.tokens_per_s),
        times(configured.speed_up.value),
        best.budget,
        rate(best.tokens_per_s),
        interval(best.speed_up),
        interval(best.over_configured) + _noise(best),
    ]


def _noise(best: BudgetSpeed) -> str:
    return "" if best.over_configured.is_above_one or best.study == CONFIGURED else ", within noise"


def _by_kind(simulation: Simulation, study: str) -> list[tuple[SideSimulation, bool, list[Outcome]]]:
    return [
        (side, with_previous, side.of(study, with_previous))
        for side in simulation.sides
        for with_previous in side.configured
    ]
