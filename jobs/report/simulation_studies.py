"""The studies of a simulation's page: groupings, pool sizes, options, and every figure as a table."""

from collections.abc import Sequence

from laserbatch.jobs.formatting import count, decimal, percent
from laserbatch.jobs.report.blocks import Block, Figure, LegendEntry, Note, Section, Table
from laserbatch.jobs.report.charts import FULL_WIDTH
from laserbatch.jobs.report.estimate_charts import EstimateLine, EstimateRow, estimate_lines, estimate_rows
from laserbatch.jobs.report.palette import OTHER, SIDE_COLOURS, TONIGHT
from laserbatch.jobs.simulate_result import Simulation
from laserbatch.jobs.simulate_view import best_group_counts, group_kind, interval, pool_size_line
from laserbatch.retrieval_pools.simulating.studies import GROUPING, NUM_GROUPS, OPTION_VALUES, SOURCES_STUDY, Outcome

VERDICT_COLOURS = {"better": TONIGHT, "worse": "#c4560a", "within noise": OTHER, "configured": OTHER}
LINE_COLOURS = ("#0b4f8a", "#c4560a", "#009e73", "#cc79a7")
GAIN_NAME = "tokens per step over those of the configuration"


def grouping_section(simulation: Simulation) -> Section:
    """The section "Groupings"."""
    blocks: list[Block] = [
        _gain_figure(f"Groupings of {side.side}s", side.of(GROUPING), GAIN_NAME) for side in simulation.sides
    ]
    for side in simulation.sides:
        lines, steps = _group_count_lines(side.of(NUM_GROUPS))
        if lines:
            svg = estimate_lines(lines, steps, "groups asked for", "tokens per step")
            blocks.append(Figure(f"Number of groups, {side.side}s", svg, legend=legend_of(lines)))
    rows = [
        [f"{side.side}s", kind, count(best.trial.position), interval(best.gain, 3), best.verdict]
        for side in simulation.sides
        for kind, best in best_group_counts(side).items()
    ]
    if rows:
        columns = ["", "Groups", "Best number tried", "Over configured", "Verdict"]
        blocks.append(Table("Best number of groups", columns, rows, left=frozenset({0, 1, 4})))
    lead = (
        "Preferred: all texts are drafted from, those of the own group count group_weight times. Walls: those alone, "
        "as in the LASER paper."
    )
    return Section("groupings", "Groupings", lead, blocks)


def _group_count_lines(outcomes: Sequence[Outcome]) -> tuple[list[EstimateLine], list[str]]:
    counts = sorted({outcome.trial.position for outcome in outcomes if outcome.trial.position is not None})
    kinds = list(dict.fromkeys(group_kind(outcome) for outcome in outcomes))
    lines = []
    for kind in kinds:
        of_kind = {o.trial.position: o for o in outcomes if group_kind(o) == kind}
        points = [_point(of_kind[number]) if number in of_kind else None for number in counts]
        lines.append(EstimateLine(kind, points, LINE_COLOURS[len(lines) % len(LINE_COLOURS)]))
    return lines, [count(number) for number in counts]


def size_section(simulation: Simulation) -> Section:
    """The section "Pool size"."""
    blocks: list[Block] = []
    for side in simulation.sides:
        outcomes = side.of("pool size")
        line = EstimateLine(f"{side.side}s", points_of(outcomes), SIDE_COLOURS[side.side])
        steps = [_short(outcome.trial.position) for outcome in outcomes]
        svg = estimate_lines([line], steps, "texts in the pool, a sample of the side", "tokens per step")
        blocks.append(Figure(f"Pool size, {side.side}s", svg))
    blocks += [Note(pool_size_line(side)) for side in simulation.sides]
    lead = "What more texts bring; the last point is all that were not held back."
    return Section("sizes", "Pool size", lead, blocks)


def option_section(simulation: Simulation) -> Section:
    """The section "Options, one at a time"."""
    blocks: list[Block] = []
    for side in simulation.sides:
        outcomes = [outcome for option in OPTION_VALUES for outcome in side.of(option)]
        blocks.append(_gain_figure(f"Options, {side.side}s", outcomes, GAIN_NAME))
        for kind in side.configured:
            if outcomes := side.of(SOURCES_STUDY, kind):
                blocks.append(_gain_figure(f"Sources, {kind} {side.side}s", outcomes, GAIN_NAME))
    lead = "One thing changed, the rest as configured, on the same texts; grey is within noise."
    return Section("options", "Options, one at a time", lead, blocks)


def figures_section(simulation: Simulation) -> Section:
    """The section "All figures"."""
    tables = [
        _outcome_table(
            f"{kind.capitalize()} {side.side}s",
            [outcome for outcome in side.outcomes if outcome.trial.kind == kind],
        )
        for side in simulation.sides
        for kind in side.configured
    ]
    return Section("figures", "All figures", "Every trial, beside the configured setting on the same texts.", tables)


def points_of(outcomes: Sequence[Outcome]) -> list[tuple[float, float, float]]:
    """Tokens per step with their intervals, to draw."""
    return [_point(outcome) for outcome in outcomes]


def legend_of(lines: Sequence[EstimateLine]) -> list[LegendEntry]:
    """What the colours of lines stand for."""
    return [LegendEntry(line.name, line.colour, "line") for line in lines]


def _gain_figure(title: str, outcomes: Sequence[Outcome], x_name: str) -> Figure:
    rows = [
        EstimateRow(
            _name(outcome),
            outcome.gain.value,
            outcome.gain.low,
            outcome.gain.high,
            VERDICT_COLOURS[outcome.verdict],
            square=outcome.is_configured,
        )
        for outcome in outcomes
    ]
    legend = [LegendEntry(name, colour) for name, colour in list(VERDICT_COLOURS.items())[:3]]
    caption = "A square is the configuration itself."
    return Figure(title, estimate_rows(rows, x_name, 1.0, FULL_WIDTH), caption=caption, legend=legend, wide=True)


def _name(outcome: Outcome) -> str:
    """An option's value is a number that says nothing without its name."""
    trial = outcome.trial
    return f"{trial.study} {trial.value}" if trial.study in OPTION_VALUES else trial.value


def _outcome_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    rows = [
        [
            outcome.trial.study,
            outcome.trial.value,
            interval(outcome.tokens_per_step),
            interval(outcome.mean_accepted),
            decimal(outcome.mean_drafted, 1),
            percent(outcome.precision),
            interval(outcome.gain, 3),
            outcome.verdict,
        ]
        for outcome in outcomes
    ]
    columns = ["", "", "Tokens per step", "AAL", "Drafted", "Precision", "Over configured", "Verdict"]
    strong = frozenset(place for place, outcome in enumerate(outcomes) if outcome.is_configured)
    return Table(title, columns, rows, left=frozenset({0, 1, 7}), strong_rows=strong)


def _point(outcome: Outcome) -> tuple[float, float, float]:
    found = outcome.tokens_per_step
    return found.value, found.low, found.high


def _short(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number / 1000:g}k" if number >= 1000 else f"{number:g}"
