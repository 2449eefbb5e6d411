"""Reliability: estimated acceptance of drafts against what replays of held-back texts accepted, side by side.

Owns the diagram and the table beside it; both come from the pools that the run built.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from laserbatch.jobs.formatting import count, decimal, finite, percent, seconds, whole
from laserbatch.jobs.report.blocks import Block, Figure, LegendEntry, Note, Table
from laserbatch.jobs.report.charts import HALF_WIDTH
from laserbatch.jobs.report.palette import OTHER, SIDE_COLOURS
from laserbatch.jobs.report.reading import mapping, sequence, side_label
from laserbatch.jobs.report.svg import Canvas, Frame, tick_text, ticks

WILSON_Z = 1.96  # 95 %


@dataclass(frozen=True)
class ReliabilityPoint:
    """Drafted tokens of about the same estimate: its mean, the share accepted, and how many they are."""

    estimate: float
    accepted: float
    num_nodes: int


@dataclass(frozen=True)
class ReliabilityLine:
    """The points of one pool."""

    name: str
    points: Sequence[ReliabilityPoint]
    colour: str
    square: bool = False


def calibration_blocks(built: Mapping) -> list[Block]:
    """The reliability diagram of the pools that were built, and its figures; a sentence where none is calibrated."""
    known = [(name, found) for name in built if (found := mapping(mapping(built[name]).get("calibration")))]
    lines = [line for name, found in known if (line := _line(name, found)).points]
    if not lines:
        note = Note("The pools built tonight are not calibrated: too few texts, or no replays wanted.")
        return [note] if any(mapping(pool) for pool in built.values()) else []
    return [_figure(lines), _table(known)]


def _line(name: str, calibration: Mapping) -> ReliabilityLine:
    points = []
    for item in map(mapping, sequence(mapping(calibration.get("reliability")).get("bins"))):
        estimate, accepted = finite(item.get("mean_estimate")), finite(item.get("share_accepted"))
        if estimate is not None and accepted is not None and whole(item.get("num_nodes")):
            points.append(ReliabilityPoint(estimate, accepted, whole(item.get("num_nodes"))))
    return ReliabilityLine(side_label(name), points, SIDE_COLOURS.get(name, OTHER), square=name != "user")


def _figure(lines: Sequence[ReliabilityLine]) -> Figure:
    return Figure(
        "Estimated and realised acceptance",
        reliability_diagram(lines),
        caption="Drafted tokens of held-back texts by the estimated acceptance of their path; bars: 95 % intervals, "
        "tokens taken as independent. On the line, estimates are right. Replays are greedy; a relaxed verifier accepts "
        "more.",
        legend=[LegendEntry(line.name, line.colour, "line") for line in lines],
    )


def _table(known: Sequence[tuple[str, Mapping]]) -> Table:
    rows = []
    for name, calibration in known:
        checked, before = mapping(calibration.get("reliability")), mapping(calibration.get("uncalibrated"))
        rows.append(
            [
                side_label(name),
                count(calibration.get("num_texts")),
                count(checked.get("num_nodes")),
                decimal(before.get("expected_calibration_error"), 3),
                decimal(checked.get("expected_calibration_error"), 3),
                decimal(checked.get("error_by_chance"), 3),
                seconds(calibration.get("calibration_s")),
            ]
        )
    return Table(
        "Calibration of the pools built tonight",
        ["Side", "Texts replayed", "Tokens checked", "Error before", "Error", "By chance", "Time"],
        rows,
        caption="Error: expected calibration error, the mean distance between estimated and realised acceptance. One "
        "half of the texts is fitted to, the other checked; few are checked both ways. By chance: what that would be "
        "on average if estimates were right, with so few texts.",
    )


def reliability_diagram(lines: Sequence[ReliabilityLine], width: float = HALF_WIDTH) -> Markup:
    """Realised over estimated acceptance, both in per cent, with the diagonal on which they are equal."""
    canvas = Canvas(width, 320, "Reliability diagram: accepted share by estimated acceptance")
    frame = Frame(canvas, 0.0, 100.0, "accepted (%)")
    marks = ticks(0.0, 100.0, 5)

    def x_of(share: float) -> float:
        return frame.left + frame.width * share

    for mark in marks:
        canvas.line(x_of(mark / 100), frame.top, x_of(mark / 100), frame.base)
        canvas.text(x_of(mark / 100), frame.base + 16, tick_text(mark, marks), anchor="middle", kind="tick")
    canvas.path([(x_of(0.0), frame.y(0.0)), (x_of(1.0), frame.y(100.0))], OTHER, dash="4 4")
    frame.close("estimated acceptance (%)")
    for line in lines:
        for point in line.points:
            low, high = wilson_interval(point.accepted, point.num_nodes)
            x = x_of(point.estimate)
            canvas.line(x, frame.y(100 * low), x, frame.y(100 * high), kind="whisker")
        canvas.path([(x_of(point.estimate), frame.y(100 * point.accepted)) for point in line.points], line.colour)
        for point in line.points:
            tip = (
                f"{line.name}: estimated {percent(point.estimate, 1)}, accepted {percent(point.accepted, 1)} "
                f"of {count(point.num_nodes)}"
            )
            canvas.mark(x_of(point.estimate), frame.y(100 * point.accepted), line.colour, tip, square=line.square)
    return canvas.markup()


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """95 % interval of a share of `num` independent trials (Wilson 1927)."""
    z2 = WILSON_Z**2 / num
    middle = (share + z2 / 2) / (1 + z2)
    half = WILSON_Z * math.sqrt(share * (1 - share) / num + z2 / (4 * num)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)
