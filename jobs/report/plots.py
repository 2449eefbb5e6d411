"""The charts that are not bars: lines, a histogram, means with their spread. Each returns one inline SVG.

Knows labels and numbers, nothing of manifests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from laserbatch.jobs.formatting import count, decimal, percent
from laserbatch.jobs.report.charts import HALF_WIDTH, Series
from laserbatch.jobs.report.svg import Canvas, Frame, text_width, tick_text, ticks


@dataclass(frozen=True)
class Spread:
    """A mean with its standard deviation (None: not known)."""

    name: str
    mean: float
    std: float | None
    colour: str
    square: bool = False


def share_lines(series: Sequence[Series], x_name: str, y_name: str, width: float = HALF_WIDTH) -> Markup:
    """Shares of one at 1, 2, 3, ...; a None leaves a gap. The second line is dashed and has square marks."""
    canvas = Canvas(width, 250, f"Line chart: {y_name} by {x_name}")
    highest = max([value for item in series for value in item.values if value is not None], default=0.0)
    frame = Frame(canvas, 0.0, 100 * (highest or 1.0), f"{y_name} (%)")
    num_points = max([len(item.values) for item in series], default=1)
    slot = frame.width / max(1, num_points)
    for index in range(num_points):
        if slot >= 16 or index % 2 == 0:
            canvas.text(
                frame.left + slot * (index + 0.5), frame.base + 16, str(index + 1), anchor="middle", kind="tick"
            )
    frame.close(x_name)
    for place, item in enumerate(series):
        points = [
            (frame.left + slot * (index + 0.5), frame.y(100 * value), index, value)
            for index, value in enumerate(item.values)
            if value is not None
        ]
        if len(points) > 1:
            canvas.path([(x, y) for x, y, _, _ in points], item.colour, dash="6 3" if place else "")
        for x, y, index, value in points:
            canvas.mark(x, y, item.colour, f"{item.name}, {x_name} {index + 1}: {percent(value)}", square=bool(place))
    return canvas.markup()


def histogram(
    values: Mapping[float, int],
    others: Mapping[float, int],
    x_name: str,
    y_name: str,
    colours: tuple[str, str],
    width: float = HALF_WIDTH,
) -> Markup:
    """Counts of values in bins of a round width; `others`, scaled to the same number, as an outline over them.

    Parameters
    ----------
    values : how often each is there; at least one.
    others : what it is compared with; may be empty.
    colours : of the bars, of the outline.
    """
    everything = [*values, *others]
    marks = ticks(min(everything), max(everything), 5)
    bin_width = (marks[1] - marks[0]) / 4
    num_bins = max(1, round((marks[-1] - marks[0]) / bin_width))
    heights = _binned(values, marks[0], bin_width, num_bins)
    scale = sum(values.values()) / sum(others.values()) if others else 0.0
    outline = [height * scale for height in _binned(others, marks[0], bin_width, num_bins)]
    canvas = Canvas(width, 250, f"Histogram: {y_name} by {x_name}")
    frame = Frame(canvas, 0.0, max([*heights, *outline]) * 1.05, y_name)
    slot = frame.width / num_bins
    for index, height in enumerate(heights):
        if height:
            low, high = marks[0] + bin_width * index, marks[0] + bin_width * (index + 1)
            tip = f"{decimal(low, 0)} to {decimal(high, 0)}: {count(height)}"
            canvas.rect(
                frame.left + slot * index + 0.5,
                frame.y(height),
                slot - 1,
                frame.base - frame.y(height),
                colours[0],
                tip,
            )
    if others:
        steps = [(frame.left, frame.base)]
        for index, height in enumerate(outline):
            steps += [(frame.left + slot * index, frame.y(height)), (frame.left + slot * (index + 1), frame.y(height))]
        canvas.path([*steps, (frame.left + frame.width, frame.base)], colours[1])
    for mark in marks:
        x = frame.left + frame.width * (mark - marks[0]) / (marks[-1] - marks[0])
        canvas.text(x, frame.base + 16, tick_text(mark, marks), anchor="middle", kind="tick")
    frame.close(x_name)
    return canvas.markup()


def spreads(groups: Sequence[tuple[str, Sequence[Spread]]], x_name: str, width: float = HALF_WIDTH) -> Markup:
    """Means as points, with one standard deviation to each side, one row each, in named groups."""
    rows = [item for _, items in groups for item in items]
    low = min(item.mean - (item.std or 0.0) for item in rows)
    high = max(item.mean + (item.std or 0.0) for item in rows)
    marks = ticks(low, high, 5)
    pitch, gap = 21.0, 12.0
    left = max(text_width(name) for name, _ in groups) + max(text_width(item.name) for item in rows) + 28
    base = pitch * len(rows) + gap * len(groups)
    canvas = Canvas(width, base + 40, f"Means with spread: {x_name}")
    room = width - left - 18

    def x_of(value: float) -> float:
        return left + room * (value - marks[0]) / (marks[-1] - marks[0])

    for mark in marks:
        canvas.line(x_of(mark), 4, x_of(mark), base)
        canvas.text(x_of(mark), base + 16, tick_text(mark, marks), anchor="middle", kind="tick")
    y = gap / 2
    for name, items in groups:
        canvas.text(0, y + 15, name, kind="value")
        for item in items:
            middle = y + 10.5
            canvas.text(left - 14, middle + 4.5, item.name, anchor="end")
            if item.std:
                canvas.line(x_of(item.mean - item.std), middle, x_of(item.mean + item.std), middle, kind="whisker")
            tip = f"{name}, {item.name}: {decimal(item.mean, 4)}" + (f" ± {decimal(item.std, 4)}" if item.std else "")
            canvas.mark(x_of(item.mean), middle, item.colour, tip, square=item.square)
            y += pitch
        y += gap
    canvas.text(left + room / 2, base + 34, x_name, anchor="middle", kind="tick")
    return canvas.markup()


def _binned(values: Mapping[float, int], start: float, bin_width: float, num_bins: int) -> list[int]:
    counts = [0] * num_bins
    for value, times in values.items():
        counts[min(num_bins - 1, max(0, int((value - start) / bin_width)))] += times
    return counts
