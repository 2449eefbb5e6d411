"""Charts of estimates with their intervals: rows beside a reference, lines over steps. Each returns one inline SVG.

Knows labels and numbers, nothing of simulations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from laserbatch.jobs.formatting import decimal
from laserbatch.jobs.report.charts import HALF_WIDTH
from laserbatch.jobs.report.svg import Canvas, Frame, shortened, text_width, tick_text, ticks


@dataclass(frozen=True)
class EstimateRow:
    """A named value with its interval; `low` and `high` include `value`."""

    name: str
    value: float
    low: float
    high: float
    colour: str
    square: bool = False


@dataclass(frozen=True)
class EstimateLine:
    """A line: for every step of the axis a (value, low, high), or None."""

    name: str
    points: Sequence[tuple[float, float, float] | None]
    colour: str


def estimate_rows(rows: Sequence[EstimateRow], x_name: str, reference: float, width: float = HALF_WIDTH) -> Markup:
    """One row a value, with its interval, and a line where the reference is.

    Parameters
    ----------
    x_name : name and unit of the values.
    reference : what they are compared with, on the axis.
    """
    marks = ticks(min([reference, *(row.low for row in rows)]), max([reference, *(row.high for row in rows)]), 5)
    pitch, left = 22.0, min(width * 0.48, max(text_width(row.name) for row in rows) + 16)
    base, room = pitch * len(rows) + 8, width - left - 18
    canvas = Canvas(width, base + 40, f"Values with intervals: {x_name}")

    def x_of(value: float) -> float:
        return left + room * (value - marks[0]) / (marks[-1] - marks[0])

    for mark in marks:
        canvas.line(x_of(mark), 4, x_of(mark), base)
        canvas.text(x_of(mark), base + 16, tick_text(mark, marks), anchor="middle", kind="tick")
    canvas.line(x_of(reference), 0, x_of(reference), base, kind="axis")
    for place, row in enumerate(rows):
        y = pitch * place + 15
        canvas.text(left - 12, y + 4.5, shortened(row.name, left - 12), anchor="end")
        canvas.line(x_of(row.low), y, x_of(row.high), y, kind="whisker")
        canvas.mark(x_of(row.value), y, row.colour, _tip(row.name, row.value, row.low, row.high), square=row.square)
    canvas.text(left + room / 2, base + 34, x_name, anchor="middle", kind="tick")
    return canvas.markup()


def estimate_lines(
    lines: Sequence[EstimateLine], steps: Sequence[str], x_name: str, y_name: str, width: float = HALF_WIDTH
) -> Markup:
    """Lines over evenly spaced steps, each point with its interval; every second line is dashed, its marks square."""
    canvas = Canvas(width, 262, f"Line chart: {y_name} by {x_name}")
    highs = [point[2] for line in lines for point in line.points if point is not None]
    frame = Frame(canvas, 0.0, max(highs, default=1.0), y_name)
    slot = frame.width / max(1, len(steps))

    def x_of(index: int) -> float:
        return frame.left + slot * (index + 0.5)

    for index, step in enumerate(steps):
        canvas.text(x_of(index), frame.base + 16, step, anchor="middle", kind="tick")
    frame.close(x_name)
    for place, line in enumerate(lines):
        known = [(index, point) for index, point in enumerate(line.points) if point is not None]
        for index, (_, low, high) in known:
            canvas.line(x_of(index), frame.y(low), x_of(index), frame.y(high), kind="whisker")
        if len(known) > 1:
            path = [(x_of(index), frame.y(value)) for index, (value, _, _) in known]
            canvas.path(path, line.colour, dash="6 3" if place % 2 else "")
        for index, (value, low, high) in known:
            tip = _tip(f"{line.name}, {steps[index]}", value, low, high)
            canvas.mark(x_of(index), frame.y(value), line.colour, tip, square=bool(place % 2))
    return canvas.markup()


def _tip(name: str, value: float, low: float, high: float) -> str:
    return f"{name}: {decimal(value, 3)} ({decimal(low, 3)} to {decimal(high, 3)})"
