"""The page of a simulation: tables and plots of what was predicted, and how right an earlier prediction was.

Draws what it is given; reads no run.
"""

from laserbatch.jobs.formatting import count, counted, decimal, percent, times
from laserbatch.jobs.report.blocks import KeyFigure, Note, Page, Phrase, Section, Table
from laserbatch.jobs.report.simulation_budgets import budget_section
from laserbatch.jobs.report.simulation_studies import figures_section, grouping_section, option_section, size_section
from laserbatch.jobs.simulate_result import Simulation
from laserbatch.jobs.simulate_view import (
    calibration_line,
    check_lines,
    full_pool,
    interval,
    plain_lines,
    previous_line,
    recommendation_line,
)

KIND_NAMES = {"new": "as new", "changed": "as changed", "mixed": "as the night mixed them"}


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
            budget_section(simulation),
            grouping_section(simulation),
            size_section(simulation),
            option_section(simulation),
            _check_section(simulation),
            figures_section(simulation),
        ],
        made_by=f"{made_by} from the texts of run {simulation.run_id}",
    )


def _headline(simulation: Simulation) -> list[Phrase]:
    phrases = [Phrase("Drafting is predicted to write ")]
    for place, side in enumerate(simulation.sides):
        new, changed = side.configured["new"], side.configured.get("changed")
        phrases.append(Phrase(f"{' and ' if place else ''}{side.side}s at "))
        phrases.append(Phrase(f"{decimal(new.tokens_per_step.value, 1)} tokens a step", True))
        if changed is not None:
            phrases += [Phrase(", "), Phrase(decimal(changed.tokens_per_step.value, 1), True), Phrase(" where changed")]
    return phrases


def _key_figures(simulation: Simulation) -> list[KeyFigure]:
    cards, batch_size = [], simulation.recommended_batch_size
    for side in simulation.sides:
        outcome = side.configured[side.night_kind]
        notes = [
            f"{decimal(outcome.tokens_per_step.low)} to {decimal(outcome.tokens_per_step.high)}",
            f"{counted(outcome.num_texts, 'text')} replayed, {KIND_NAMES[side.night_kind]}",
        ]
        cards.append(KeyFigure(f"tokens per step, {side.side}s", decimal(outcome.tokens_per_step.value), notes))
    for side in simulation.sides:
        speed = side.budgets.configured[batch_size]
        name = f"whole run at batch {batch_size:,}, {side.side}s"
        notes = [f"{times(speed.speed_up.value)} without prompts and shards' ends", "step cost: see below"]
        cards.append(KeyFigure(name, f"{times(speed.run_speed_up)} plain", notes))
    return cards[:4]


def _gain_section(simulation: Simulation) -> Section:
    rows = [
        [
            f"{side.side}s, {KIND_NAMES[kind]}",
            count(side.num_pool_texts),
            count(outcome.num_texts),
            interval(outcome.tokens_per_step),
            full_pool(side, kind),
            interval(outcome.mean_accepted),
            decimal(outcome.mean_drafted, 1),
            percent(outcome.precision),
        ]
        for side in simulation.sides
        for kind, outcome in side.configured.items()
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
        caption="New entities have no text of the night before; changed ones have, and draft from it too; mixed are "
        "both, in the shares of the texts that the run wrote. AAL is the mean number of accepted draft tokens of a "
        "step, the bonus token not counted; tokens per step count it. With all texts: the pool of the next night holds "
        "the held-back texts too, extrapolated by what the last doubling of the pool brought. Intervals hold 95 % of "
        "what resampled texts gave.",
    )
    lead = "Texts of the night were held back and replayed against pools of the rest, as greedy verification accepts."
    lines = [calibration_line(simulation), previous_line(simulation), *plain_lines(simulation)]
    notes = [Note(line) for line in (*lines, recommendation_line(simulation))]
    return Section("gain", "What drafting gains", lead, [table, *notes])


def _check_section(simulation: Simulation) -> Section:
    if not simulation.check.predictions:
        return Section("check", "Checked on a night", "", [Note(line) for line in check_lines(simulation)])
    rows = [
        [
            f"{check.kind} {check.side}s",
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
        for check in simulation.check.predictions
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
