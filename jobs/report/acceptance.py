"""Where tonight's tokens came from: acceptance by source and by depth."""

from laserbatch.jobs.formatting import MISSING, SOURCE_LABELS, count, decimal, percent, ratio
from laserbatch.jobs.report.blocks import OTHER, PLAIN, SIDE_COLOURS, Figure, Note, Section, Table
from laserbatch.jobs.report.charts import Series, lines, stacked_shares
from laserbatch.jobs.report.sides import Side, total
from laserbatch.pipeline.storage.stats import DecodingStats

SOURCE_COLOURS = {"pool": "#cc79a7", "previous": "#0072b2", "prompt": "#e69f00", "output": "#009e73", "target": PLAIN}
DRAFTING = [name for name in SOURCE_LABELS if name != "target"]


def acceptance_section(sides: list[Side]) -> Section:
    """The section "Acceptance"."""
    sides = [side for side in sides if side.tonight]
    drafting = [side for side in sides if side.tonight.num_drafted]
    if not drafting:
        reason = "nothing was drafted" if sides else "no text was generated"
        return Section("acceptance", "Acceptance", "", [Note(f"There is no acceptance to show: {reason} tonight.")])
    night = total(side.tonight for side in drafting)
    lead = (
        f"{percent(ratio(night.num_accepted, night.num_tokens))} of the written tokens were drafted; a step was "
        f"offered {decimal(night.drafted_per_step, 1)} draft tokens and took "
        f"{decimal(night.acceptance_length)} of them."
    )
    return Section("acceptance", "Acceptance", lead, [_origins(sides), _by_depth(drafting), _by_source(drafting)])


def _origins(sides: list[Side]) -> Figure:
    drafted = [name for name in DRAFTING if any(_is_used(side.tonight, name) for side in sides)]
    by_source = [side.tonight.accepted_by_source for side in sides]
    series = [
        Series(SOURCE_LABELS[name], [counts.get(name, 0) for counts in by_source], SOURCE_COLOURS[name])
        for name in drafted
    ]
    own = [
        side.tonight.num_tokens - sum(counts.get(name, 0) for name in drafted)
        for side, counts in zip(sides, by_source, strict=True)
    ]
    return stacked_shares(
        "Where the written tokens came from",
        [side.label for side in sides],
        [*series, Series(SOURCE_LABELS["target"], own, SOURCE_COLOURS["target"])],
        "share of the side's written tokens",
        "“The model itself”: bonus tokens and corrections, one a step.",
    )


def _by_depth(sides: list[Side]) -> Figure:
    series = []
    for side in sides:
        shares = [number / side.tonight.num_steps for number in side.tonight.accepted_by_depth]
        series.append(Series(side.label, shares, SIDE_COLOURS.get(side.name, OTHER)))
    return lines(
        "How far drafts are accepted",
        series,
        "depth in the draft tree",
        "steps that accepted at least so many tokens",
        "The sum of a line's points is the acceptance length.",
    )


def _by_source(sides: list[Side]) -> Table:
    rows = []
    for side in sides:
        for name in DRAFTING:
            if _is_used(side.tonight, name):
                drafted = side.tonight.drafted_by_source.get(name, 0)
                accepted = side.tonight.accepted_by_source.get(name, 0)
                shown = percent(ratio(accepted, drafted)) if drafted else MISSING
                rows.append([side.label, SOURCE_LABELS[name], count(drafted), count(accepted), shown])
    return Table(
        "Drafted and accepted by source",
        ["Side", "Source", "Drafted", "Accepted", "Accepted of drafted"],
        rows,
        caption="A draft is a tree, of which one path at most is accepted: shares are of all its tokens.",
        left=frozenset({0, 1}),
    )


def _is_used(stats: DecodingStats, source: str) -> bool:
    return bool(stats.drafted_by_source.get(source) or stats.accepted_by_source.get(source))
