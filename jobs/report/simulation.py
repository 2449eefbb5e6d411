"""The page of a simulation: tables and plots of what was predicted, and how right an earlier prediction was.

Draws what it is given; reads no run.
"""

from collections.abc import Sequence

from jobs.report.blocks import Block, Figure, KeyFigure, LegendEntry, Note, Page, Phrase, Section, Table
from jobs.report.charts import FULL_WIDTH
from jobs.report.estimate_charts import EstimateLine, EstimateRow, estimate_lines, estimate_rows
from jobs.report.formatting import count, counted, decimal, percent, rate, times
from jobs.report.palette import OTHER, SIDE_COLOURS, TONIGHT
from jobs.simulate_result import KINDS, SideSimulation, Simulation
from jobs.simulate_view import (
    best_group_counts,
    check_lines,
    full_pool,
    group_kind,
    interval,
    pool_size_line,
    recommendation_line,
)
from retrieval_pools.estimates import Estimate
from retrieval_pools.studies import (
    CONFIGURED,
    GROUPING,
    NUM_GROUPS,
    OPTION_VALUES,
    SOURCES_STUDY,
    BudgetSpeed,
    Outcome,
    best_speed,
)

BETTER, WORSE, UNDECIDED = TONIGHT, "#c4560a", OTHER
VERDICT_COLOURS = {"better": BETTER, "worse": WORSE, "within noise": UNDECIDED, "configured": UNDECIDED}
LINE_COLOURS = ("#0b4f8a", "#c4560a", "#009e73", "#cc79a7")
GAIN_NAME = "tokens per step over those of the configuration"


def simulation_page(simulation: Simulation, made_by: str) -> Page:
    """Everything that the page of a simulation shows."""
    return Page(
        title=f"Simulation of the night after {simulation.date}",
        run_id=simulation.run_id,
        status="",
        facts=[
            "predicted from texts, no model was run",
            f"verification configured: {simulation.verifier}; a replay counts what greedy verification accepts",
        ],
        headline=_headline(simulation),
        key_figures=_key_figures(simulation),
        sections=[
            _gain_section(simulation),
            _budget_section(simulation),
            _speed_section(simulation),
            _grouping_section(simulation),
            _size_section(simulation),
            _option_section(simulation),
            _check_section(simulation),
            _figures_section(simulation),
        ],
        made_by=f"{made_by} from the texts of run {simulation.run_id}",
    )


def _headline(simulation: Simulation) -> list[Phrase]:
    phrases = [Phrase("Drafting is predicted to write ")]
    for place, side in enumerate(simulation.sides):
        new, changed = side.configured[False], side.configured.get(True)
        phrases.append(Phrase(f"{' and ' if place else ''}{side.side}s at "))
        phrases.append(Phrase(f"{decimal(new.tokens_per_step.value, 1)} tokens a step", True))
        if changed is not None:
            phrases += [Phrase(", "), Phrase(decimal(changed.tokens_per_step.value, 1), True), Phrase(" where changed")]
    return phrases


def _key_figures(simulation: Simulation) -> list[KeyFigure]:
    cards = []
    for side in simulation.sides:
        for with_previous, outcome in side.configured.items():
            notes = [
                f"{decimal(outcome.tokens_per_step.low)} to {decimal(outcome.tokens_per_step.high)}",
                f"{counted(outcome.num_texts, 'text')} replayed",
            ]
            name = f"tokens per step, {KINDS[with_previous]} {side.side}s"
            cards.append(KeyFigure(name, decimal(outcome.tokens_per_step.value), notes))
    batch_size = simulation.batch_sizes[len(simulation.batch_sizes) // 2]
    for side in simulation.sides:
        speed_up = side.configured_speed(batch_size, False).speed_up
        notes = [f"{decimal(speed_up.low)} to {decimal(speed_up.high)} times", "step cost: see below"]
        cards.append(
            KeyFigure(f"speed at batch {batch_size:,}, new {side.side}s", f"{times(speed_up.value)} plain", notes)
        )
    return cards[:4]


def _gain_section(simulation: Simulation) -> Section:
    rows = [
        [
            f"{KINDS[with_previous]} {side.side}s",
            count(side.num_pool_texts),
            count(outcome.num_texts),
            interval(outcome.tokens_per_step),
            full_pool(side, with_previous),
            interval(outcome.mean_accepted),
            decimal(outcome.mean_drafted, 1),
            percent(outcome.precision),
        ]
        for side in simulation.sides
        for with_previous, outcome in side.configured.items()
    ]
    columns = [
        "",
        "Texts in the pool",
        "Replayed",
        "Tokens per step",
        "With all texts",
        "AAL",
        "Drafted per step",
        "Precision",
    ]
    table = Table(
        "As configured",
        columns,
        rows,
        caption="New entities have no text of the night before; changed ones have, and draft from it too. AAL is the "
        "mean number of accepted draft tokens of a step, the bonus token not counted; tokens per step count it. "
        "With all texts: the pool of the next night holds the held-back texts too, extrapolated by what the last "
        "doubling of the pool brought. "
        "Intervals hold 95 % of what resampled texts gave.",
    )
    lead = "Texts of the night were held back and replayed against pools of the rest, as greedy verification accepts."
    return Section("gain", "What drafting gains", lead, [table, Note(recommendation_line(simulation))])


def _budget_section(simulation: Simulation) -> Section:
    blocks: list[Block] = []
    for study, x_name, title in (
        ("draft tokens", "draft tokens at most", "Full trees"),
        ("min_acceptance", "min_acceptance, at most 64 draft tokens", "Trees cut by estimated acceptance"),
    ):
        lines, steps = [], []
        for side, with_previous, outcomes in _by_kind(simulation, study):
            steps = [outcome.trial.value for outcome in outcomes]
            name = f"{KINDS[with_previous]} {side.side}s"
            lines.append(EstimateLine(name, _points(outcomes), LINE_COLOURS[len(lines) % len(LINE_COLOURS)]))
        svg = estimate_lines(lines, steps, x_name, "tokens per step")
        blocks.append(Figure(title, svg, legend=_legend(lines)))
    lead = "More draft tokens accept more, ever more slowly; what they cost is the next section's matter."
    return Section("budgets", "Draft budget", lead, blocks)


def _speed_section(simulation: Simulation) -> Section:
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
            blocks.append(Figure(f"Speed-up, {name}", svg, legend=_legend(lines)))
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


def _grouping_section(simulation: Simulation) -> Section:
    blocks: list[Block] = [
        _gain_figure(f"Groupings of {side.side}s", side.of(GROUPING), GAIN_NAME) for side in simulation.sides
    ]
    for side in simulation.sides:
        lines, steps = _group_count_lines(side.of(NUM_GROUPS))
        if lines:
            svg = estimate_lines(lines, steps, "groups asked for", "tokens per step")
            blocks.append(Figure(f"Number of groups, {side.side}s", svg, legend=_legend(lines)))
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


def _size_section(simulation: Simulation) -> Section:
    blocks: list[Block] = []
    for side in simulation.sides:
        outcomes = side.of("pool size")
        line = EstimateLine(f"{side.side}s", _points(outcomes), SIDE_COLOURS[side.side])
        steps = [_short(outcome.trial.position) for outcome in outcomes]
        svg = estimate_lines([line], steps, "texts in the pool, a sample of the side", "tokens per step")
        blocks.append(Figure(f"Pool size, {side.side}s", svg))
    blocks += [Note(pool_size_line(side)) for side in simulation.sides]
    lead = "What more texts bring; the last point is all that were not held back."
    return Section("sizes", "Pool size", lead, blocks)


def _option_section(simulation: Simulation) -> Section:
    blocks: list[Block] = []
    for side in simulation.sides:
        outcomes = [outcome for option in (SOURCES_STUDY, *OPTION_VALUES) for outcome in side.of(option)]
        blocks.append(_gain_figure(f"Options, {side.side}s", outcomes, GAIN_NAME))
    lead = "One thing changed, the rest as configured, on the same texts; grey is within noise."
    return Section("options", "Options, one at a time", lead, blocks)


def _check_section(simulation: Simulation) -> Section:
    if not simulation.checks:
        return Section("check", "Checked on a night", "", [Note(line) for line in check_lines(simulation)])
    rows = [
        [
            f"{KINDS[check.with_previous]} {check.side}s",
            check.run_before,
            check.run_after,
            check.verifier,
            count(check.num_replayed),
            interval(check.replayed),
            interval(check.predicted),
            count(check.num_texts),
            interval(check.realised),
            percent(check.error, 1),
        ]
        for check in simulation.checks
    ]
    columns = [
        "",
        "Simulated",
        "Night after",
        "Verifier",
        "Texts",
        "Replayed",
        "Predicted",
        "Written",
        "Realised",
        "Error",
    ]
    table = Table(
        "Predicted and realised tokens per step",
        columns,
        rows,
        caption="Predicted: what was replayed, extrapolated to the pool of all texts that the night after had. Relaxed "
        "verification also accepts what a replay cannot see, so a relaxed night does better than is predicted.",
        left=frozenset({0, 1, 2, 3}),
    )
    return Section("check", "Checked on a night", "What was predicted for a night, and what it did.", [table])


def _figures_section(simulation: Simulation) -> Section:
    tables = [
        _outcome_table(
            f"{KINDS[with_previous].capitalize()} {side.side}s",
            [outcome for outcome in side.outcomes if outcome.trial.with_previous == with_previous],
        )
        for side in simulation.sides
        for with_previous in side.configured
    ]
    return Section("figures", "All figures", "Every trial, beside the configured setting on the same texts.", tables)


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


def _by_kind(simulation: Simulation, study: str) -> list[tuple[SideSimulation, bool, list[Outcome]]]:
    return [
        (side, with_previous, side.of(study, with_previous))
        for side in simulation.sides
        for with_previous in side.configured
    ]


def _points(outcomes: Sequence[Outcome]) -> list[tuple[float, float, float]]:
    return [_point(outcome) for outcome in outcomes]


def _point(outcome: Outcome) -> tuple[float, float, float]:
    found: Estimate = outcome.tokens_per_step
    return found.value, found.low, found.high


def _legend(lines: Sequence[EstimateLine]) -> list[LegendEntry]:
    return [LegendEntry(line.name, line.colour, "line") for line in lines]


def _short(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number / 1000:g}k" if number >= 1000 else f"{number:g}"
