"""A simulation on a terminal: what drafting gains, the best budgets, groups, what to change. Computes nothing."""

from rich.console import Console
from rich.table import Table

from laserbatch.jobs.formatting import MISSING, counted, decimal, percent, times
from laserbatch.jobs.simulate_result import SideSimulation, Simulation, changed_options
from laserbatch.pipeline.decoding.budget import Budget
from laserbatch.retrieval_pools.calibration.estimates import Estimate
from laserbatch.retrieval_pools.simulating.recommendation import NOTABLE_GAIN
from laserbatch.retrieval_pools.simulating.simulate import Kind
from laserbatch.retrieval_pools.simulating.studies import GROUPING, NUM_GROUPS, OPTION_VALUES, SOURCES_STUDY, Outcome


def print_simulation(console: Console, simulation: Simulation) -> None:
    """The figures that decide something; the page has all."""
    console.print(_gains_table(simulation))
    for line in (calibration_line(simulation), previous_line(simulation), *plain_lines(simulation)):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    console.print(_speeds_table(simulation))
    for side in simulation.sides:
        console.print(_studies_table(side))
        for line in (*group_count_lines(side), pool_size_line(side)):
            console.print(line, markup=False, soft_wrap=True)
        console.print()
    console.print(recommendation_line(simulation), markup=False, soft_wrap=True)
    for line in check_lines(simulation):
        console.print(line, markup=False, soft_wrap=True)


def interval(estimate: Estimate, digits: int = 2) -> str:
    """`7.22 (7.07 to 7.38)`."""
    return f"{decimal(estimate.value, digits)} ({decimal(estimate.low, digits)} to {decimal(estimate.high, digits)})"


def budget_words(budget: Budget) -> str:
    """`16 above 0.5`: at most so many draft tokens, above so much estimated acceptance."""
    return f"{budget.max_draft_tokens} above {budget.min_acceptance:g}" if budget.max_draft_tokens else "plain decoding"


def calibration_line(simulation: Simulation) -> str:
    """What the estimates of the simulated pools rest on."""
    sides = [
        f"{side.side}s on {counted(side.num_calibration_texts, 'further text')}"
        if side.num_calibration_texts
        else f"{side.side}s not at all"
        for side in simulation.sides
    ]
    return f"Pools are calibrated, as those of a night are: {', '.join(sides)}."


def previous_line(simulation: Simulation) -> str:
    """How many entities drafted from their own text of the night before, and where that is replayed."""
    sides = [
        f"{percent(side.share_changed)} of the {counted(side.num_written, side.side)} that the run wrote"
        for side in simulation.sides
    ]
    without = [f"{side.side}s" for side in simulation.sides if side.night_kind == "new"]
    if len(without) == len(simulation.sides):
        return f"A text of the night before had {' and '.join(sides)}: too few to replay, all count as new."
    left_out = f"; too few {' and '.join(without)} to replay, they count as new" if without else ""
    return f"A text of the night before had {' and '.join(sides)}: studies are replayed with it{left_out}."


def plain_lines(simulation: Simulation) -> list[str]:
    """A line for each side of which a night would draft nothing."""
    lines, batch_size = [], simulation.recommended_batch_size
    for side in simulation.sides:
        studied = side.outcomes[0].trial.setting
        if not side.budgets.configured[batch_size].budget.max_draft_tokens:
            lines.append(
                f"{side.side}s: at batch {batch_size:,} and this step cost a night drafts nothing; all else is studied "
                f"with up to {studied.max_draft_tokens} draft tokens above {studied.min_acceptance:g}."
            )
    return lines


def full_pool(side: SideSimulation, kind: Kind) -> str:
    """Tokens per step extrapolated to a pool of all texts, or a dash."""
    estimate = side.full_pool.get(kind)
    return MISSING if estimate is None else decimal(estimate.value)


def recommendation_line(simulation: Simulation) -> str:
    """What to change, and by how much it helps on texts that did not choose it."""
    found = simulation.recommendation
    where = f"at batch {simulation.recommended_batch_size:,} and this step cost"
    keep = f"Keep the configuration {where}: "
    if not found.changes:
        return keep + "nothing that was tried is better by more than noise."
    words = {key: "null" if value is None else value for key, value in changed_options(found).items()}
    changes = ", ".join(f"{key}: {value}" for key, value in words.items())
    sides = ", ".join(
        f"{interval(gain, 3)} of {side.side}s" for side, gain in zip(simulation.sides, found.gains, strict=True)
    )
    measured = (
        f"{interval(found.gain, 3)} times the configured tokens per second, on texts that did not choose it ({sides}), "
        f"drafting {decimal(found.drafted_ratio)} times as many tokens a step"
    )
    if found.holds:
        return f"Recommended {where}: {changes}; {measured}."
    return f"{keep}{changes} looked best, but it is within noise: {measured}."


def group_count_lines(side: SideSimulation) -> list[str]:
    """The best number of groups of each kind, against the configuration."""
    return [
        f"{side.side}s, {kind}: of the numbers tried {best.trial.position:.0f} groups are best, "
        f"{interval(best.gain, 3)} times as configured ({best.verdict})."
        for kind, best in best_group_counts(side).items()
    ]


def best_group_counts(side: SideSimulation) -> dict[str, Outcome]:
    """The trial with the most tokens per step of each kind of group whose number was varied."""
    best: dict[str, Outcome] = {}
    for outcome in side.of(NUM_GROUPS):
        kind = group_kind(outcome)
        if kind not in best or outcome.tokens_per_step.value > best[kind].tokens_per_step.value:
            best[kind] = outcome
    return best


def group_kind(outcome: Outcome) -> str:
    """Scheme and scope of a trial of the number of groups: `collaborative, walls`."""
    scheme = outcome.trial.setting.grouping.partition("/")[0]
    return f"{scheme}, {'walls' if outcome.trial.setting.pool.scope == 'group' else 'preferred'}"


def pool_size_line(side: SideSimulation) -> str:
    """The smallest pool that is as good as all texts, or what the last step to all texts brings."""
    smaller = side.of("pool size")[:-1]
    enough = next((o for o in smaller if not o.gain.is_below_one and o.gain.value > 1 / NOTABLE_GAIN), None)
    if enough is not None:
        return (
            f"{side.side}s: {enough.trial.value} texts are as good as all {side.num_pool_texts:,}, within noise: "
            f"{interval(enough.gain, 3)} times their tokens a step."
        )
    if not smaller:
        return f"{side.side}s: {side.num_pool_texts:,} texts are too few to try smaller pools."
    last = smaller[-1]
    return (
        f"{side.side}s: keep all texts in the pool: {last.trial.value} of the {side.num_pool_texts:,} give "
        f"{interval(last.gain, 3)} times their tokens a step."
    )


def check_lines(simulation: Simulation) -> list[str]:
    """Predictions beside what a night realised, the largest error first."""
    if simulation.check.refused is not None:
        return [f"not checked: {simulation.check.refused.rstrip('.')}."]
    if not simulation.check.predictions:
        return [
            "not checked: no finished run of this workspace drafted from the pools of another one that is still there, "
            "with enough texts of one kind; after the next night this command compares the two."
        ]
    checks = sorted(simulation.check.predictions, key=lambda check: -abs(check.error))
    return [
        f"check, {counted(check.num_texts, f'{check.kind} {check.side}')} of run {check.run_after} "
        f"({check.verifier}): predicted {interval(check.predicted)} tokens a step from run {check.run_before}, "
        f"realised {interval(check.realised)}: error {percent(check.error, 1)}"
        for check in checks
    ]


def _gains_table(simulation: Simulation) -> Table:
    table = _table(f"Predicted from run {simulation.run_id}, as configured", ("side", "tomorrow's"))
    for name in ("texts", "tokens/step", "with all texts", "accepted/step (AAL)", "drafted/step", "precision"):
        table.add_column(name, justify="right")
    for side in simulation.sides:
        for kind, outcome in side.configured.items():
            table.add_row(
                side.side,
                kind,
                f"{outcome.num_texts:,}",
                interval(outcome.tokens_per_step),
                full_pool(side, kind),
                interval(outcome.mean_accepted),
                decimal(outcome.mean_drafted, 1),
                percent(outcome.precision),
            )
    return table


def _speeds_table(simulation: Simulation) -> Table:
    table = _table(f"Budgets; step cost: {simulation.step_cost.name}", ("side",))
    for name in ("batch", "configured", "over plain", "whole run", "chosen by a night", "over plain", "whole run"):
        table.add_column(name, justify="right")
    for side in simulation.sides:
        for batch_size in simulation.batch_sizes:
            pair = [side.budgets.configured[batch_size], side.budgets.chosen[batch_size]]
            cells = [
                word
                for one in pair
                for word in (
                    budget_words(one.budget),
                    times(one.speed_up.value),
                    times(one.run_speed_up),
                )
            ]
            table.add_row(side.side, f"{batch_size:,}", *cells)
    return table


def _studies_table(side: SideSimulation) -> Table:
    table = _table(f"{side.side}s: groups and options", ("study", "value"))
    for name in ("tokens/step", "drafted/step", "over configured", "verdict"):
        table.add_column(name, justify="right")
    for study in (GROUPING, SOURCES_STUDY, *OPTION_VALUES):
        for outcome in side.of(study, "new" if study == SOURCES_STUDY else None):
            table.add_row(
                study,
                outcome.trial.value,
                decimal(outcome.tokens_per_step.value),
                decimal(outcome.mean_drafted, 1),
                interval(outcome.gain, 3),
                outcome.verdict,
            )
    return table


def _table(title: str, words: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for word in words:
        table.add_column(word)
    return table
