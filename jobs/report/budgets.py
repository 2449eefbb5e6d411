"""How much was drafted, why, and what was forecast of it; both from the manifest."""

from laserbatch.jobs.formatting import MISSING, count, decimal, times, whole
from laserbatch.jobs.report.blocks import Block, Table
from laserbatch.jobs.report.reading import SideView, mapping


def budget_blocks(sides: list[SideView]) -> list[Block]:
    """The sides' budgets, and what their pilots tried; nothing for older manifests."""
    sides = [side for side in sides if side.tonight and mapping(side.data.get("budget"))]
    if not sides:
        return []
    tried = [side for side in sides if _trials(side)]
    return [_table(sides), *([_trials_table(tried)] if tried else [])]


def _table(sides: list[SideView]) -> Table:
    rows = []
    for side in sides:
        budget = mapping(side.data.get("budget"))
        forecast = mapping(budget.get("forecast"))
        drafts = whole(budget.get("max_draft_tokens"))
        rows.append(
            [
                side.label,
                count(drafts),
                decimal(budget.get("min_acceptance")) if drafts else MISSING,
                decimal(forecast.get("mean_drafted")),
                decimal(side.tonight.drafted_per_step),
                decimal(forecast.get("tokens_per_step")),
                decimal(side.tonight.tokens_per_step),
                times(forecast.get("speed_up")) if drafts else MISSING,
                times(forecast.get("run_speed_up")) if drafts else MISSING,
                str(forecast.get("reason", "")),
            ]
        )
    columns = [
        "Side",
        "Largest tree",
        "Threshold",
        "Drafted/step, forecast",
        "realised",
        "Tokens/step, forecast",
        "realised",
        "vs plain, full batches",
        "whole run",
        "Why",
    ]
    return Table(
        "How much was drafted",
        columns,
        rows,
        caption=(
            "Threshold: a token whose path was estimated less likely to be accepted was not drafted. Forecasts are of "
            "a pilot, or of greedy replays of the texts that the pool was calibrated with; then a relaxed verifier "
            "accepts more. Full batches: prompts, and the ends of shards, are not counted; in the whole run they are, "
            "by the prompts of the night and the lengths that its texts had before."
        ),
        left=frozenset({0, 9}),
    )


def _trials(side: SideView) -> list[dict]:
    return mapping(mapping(side.data.get("budget")).get("forecast")).get("trials") or []


def _trials_table(sides: list[SideView]) -> Table:
    rows = []
    for side in sides:
        for trial in map(mapping, _trials(side)):
            rows.append(
                [
                    side.label,
                    count(whole(trial.get("num_texts"))),
                    count(whole(trial.get("max_draft_tokens"))),
                    decimal(trial.get("min_acceptance")),
                    decimal(trial.get("mean_drafted")),
                    decimal(trial.get("tokens_per_step")),
                    times(trial.get("speed_up")),
                    decimal(trial.get("error")),
                ]
            )
    return Table(
        "What the pilot tried",
        ["Side", "Texts", "Largest tree", "Threshold", "Drafted/step", "Tokens/step", "vs plain", "±"],
        rows,
        caption=(
            "The same few texts, written under each budget before the night and not kept; more of them where some left "
            "it open which budget is the fastest. vs plain: tokens written a second by full batches, by the measured "
            "cost of a step; ± is its standard error over texts. The fastest is taken, and another threshold than that "
            "of most only where it is faster by three errors of their ratio. A budget with fewer texts than another "
            "was slower than the fastest on the texts of both, whatever it reached on its own."
        ),
    )
