"""Where tonight's tokens came from: acceptance by source and by depth; and how long the texts became."""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

from laserbatch.jobs.formatting import MISSING, count, decimal, percent, ratio
from laserbatch.jobs.report.blocks import Block, Figure, LegendEntry, Note, Section, Table
from laserbatch.jobs.report.charts import FULL_WIDTH, HALF_WIDTH, Part, Series, stacked_shares
from laserbatch.jobs.report.palette import (
    DARK_COLOURS,
    OTHER,
    PLAIN,
    PREVIOUS_NIGHT,
    SIDE_COLOURS,
    SOURCE_COLOURS,
    SOURCE_LABELS,
    TONIGHT,
)
from laserbatch.jobs.report.plots import histogram, share_lines
from laserbatch.jobs.report.reading import Decoding, SideView, total

FINISH_LABELS = {"end_of_text": "ended by itself", "stop": "stop string", "length": "token limit"}


def acceptance_section(sides: list[SideView]) -> Section:
    """The section "Acceptance"."""
    sides = [side for side in sides if side.tonight]
    drafting = [side for side in sides if side.tonight.num_drafted]
    if not drafting:
        reason = "nothing was drafted" if sides else "no text was generated"
        return Section("acceptance", "Acceptance", "", [Note(f"There is no acceptance to show: {reason} tonight.")])
    blocks: list[Block] = [_origins(sides)]
    deep = [side for side in drafting if any(side.tonight.accepted_by_depth)]
    if deep:
        blocks.append(_share_by_depth(deep))
    blocks.append(_by_source(drafting))
    return Section("acceptance", "Acceptance", _lead(drafting), blocks)


def lengths_section(sides: list[SideView]) -> Section:
    """The section "Lengths of the texts"."""
    sides = [side for side in sides if side.tonight and side.tonight.lengths]
    if not sides:
        return Section(
            "lengths", "Lengths", "", [Note("No text was generated tonight, so there are no lengths to show.")]
        )
    blocks: list[Block] = [_lengths(side, wide=len(sides) == 1) for side in sides]
    blocks.append(_length_table(sides))
    everything = total(side.tonight for side in sides)
    median = _quantile(everything.lengths, 0.5)
    ended = percent(ratio(everything.finish_reasons.get("end_of_text", 0), everything.num_texts), 1)
    lead = f"A text has {decimal(median, 0)} tokens in the median; {ended} ended by themselves."
    if everything.num_rewritten:
        lead += (
            f" {count(everything.num_rewritten)} had run on to their limit under relaxed verification, and were "
            "written again as plain decoding writes them."
        )
    return Section("lengths", "Lengths", lead, blocks)


def _lead(sides: list[SideView]) -> str:
    everything = total(side.tonight for side in sides)
    return (
        f"{percent(ratio(everything.num_accepted, everything.num_tokens))} of the written tokens were drafted; "
        f"a step was offered {decimal(everything.drafted_per_step, 1)} draft tokens and took "
        f"{decimal(everything.acceptance_length)} of them."
    )


def _origins(sides: list[SideView]) -> Figure:
    rows = []
    for side in sides:
        amounts = {name: side.tonight.accepted_by_source.get(name, 0) for name in _sources(side.tonight)}
        amounts["target"] = side.tonight.target_tokens
        colours = {name: SOURCE_COLOURS.get(name, OTHER) for name in amounts}
        rows.append(
            (
                side.label,
                [
                    Part(SOURCE_LABELS.get(name, name), value, colours[name], colours[name] in DARK_COLOURS)
                    for name, value in amounts.items()
                ],
            )
        )
    names = [*dict.fromkeys(name for side in sides for name in _sources(side.tonight)), "target"]
    return Figure(
        "Where the written tokens came from",
        stacked_shares(rows, "share of the side's written tokens"),
        caption="“The model itself”: bonus tokens and corrections, one a step.",
        legend=[LegendEntry(SOURCE_LABELS.get(name, name), SOURCE_COLOURS.get(name, OTHER)) for name in names],
    )


def _by_source(sides: list[SideView]) -> Table:
    rows = []
    for side in sides:
        for name in _sources(side.tonight):
            drafted = side.tonight.drafted_by_source.get(name, 0)
            accepted = side.tonight.accepted_by_source.get(name, 0)
            shown = percent(ratio(accepted, drafted)) if drafted else MISSING
            rows.append([side.label, SOURCE_LABELS.get(name, name), count(drafted), count(accepted), shown])
    return Table(
        "Drafted and accepted by source",
        ["Side", "Source", "Drafted", "Accepted", "Accepted of drafted"],
        rows,
        caption="A draft is a tree, of which one path at most is accepted: shares are of all its tokens.",
        left=frozenset({0, 1}),
    )


def _share_by_depth(sides: list[SideView]) -> Figure:
    series = []
    for side in sides:
        shares = [ratio(value, side.tonight.num_steps) for value in side.tonight.accepted_by_depth]
        series.append(Series(side.label, shares, SIDE_COLOURS.get(side.name, OTHER)))
    return Figure(
        "How far drafts are accepted",
        share_lines(series, "depth in the draft tree", "steps that accepted at least so many tokens"),
        caption="The sum of a line's points is the acceptance length.",
        legend=[LegendEntry(item.name, item.colour, "line") for item in series],
    )


def _lengths(side: SideView, wide: bool) -> Figure:
    compared = [(side.plain, "plain decoding", "#4a5561"), (side.previous_night, "previous night", PREVIOUS_NIGHT)]
    other, name, colour = next(
        ((part.lengths, name, colour) for part, name, colour in compared if part and part.lengths), ({}, "", PLAIN)
    )
    legend = [LegendEntry("tonight", TONIGHT)]
    return Figure(
        f"Tokens per text: {side.label.lower()}",
        histogram(
            side.tonight.lengths,
            other,
            "tokens of a text",
            "texts",
            (TONIGHT, colour),
            FULL_WIDTH if wide else HALF_WIDTH,
        ),
        caption=f"The outline is {name}, scaled to the same number of texts." if other else "",
        legend=[*legend, LegendEntry(name, colour, "line")] if other else legend,
        wide=wide,
    )


def _length_table(sides: list[SideView]) -> Table:
    rows = []
    for side in sides:
        for part, name in (
            (side.tonight, "tonight"),
            (side.previous_night, "previous night"),
            (side.plain, "plain decoding"),
        ):
            if part is None or not part.lengths:
                continue
            mean = ratio(part.num_tokens, part.num_texts)
            marks = [_quantile(part.lengths, share) for share in (0, 0.5, 0.95, 1)]
            marks.insert(2, mean)
            reasons = [percent(ratio(part.finish_reasons.get(key, 0), part.num_texts), 1) for key in FINISH_LABELS]
            rows.append([side.label, name, count(part.num_texts), *[decimal(mark, 0) for mark in marks], *reasons])
    columns = ["Side", "Pass", "Texts", "Shortest", "Median", "Mean", "95 %", "Longest"]
    return Table(
        "Lengths and endings, in numbers",
        [*columns, *(label.capitalize() for label in FINISH_LABELS.values())],
        rows,
        caption="Lengths in tokens, the end token not counted; long ones are rounded by half a percent of the longest.",
        left=frozenset({0, 1}),
    )


def _sources(part: Decoding) -> list[str]:
    """Drafting sources that the pass counted anything for, in the order of the palette."""
    counted = [name for name in [*part.drafted_by_source, *part.accepted_by_source] if name != "target"]
    used = {name for name in counted if part.drafted_by_source.get(name, 0) or part.accepted_by_source.get(name, 0)}
    return [name for name in SOURCE_LABELS if name in used] + sorted(used - set(SOURCE_LABELS))


def _quantile(lengths: Mapping[float, int], share: float) -> float:
    ordered = sorted(lengths)
    ends = list(accumulate(lengths[length] for length in ordered))  # texts up to each length
    return ordered[bisect_right(ends, min(ends[-1] - 1, int(share * ends[-1])))]
