"""The bar charts of the report: grouped, lying, stacked to the whole. Each returns one inline SVG.

Knows labels and numbers, nothing of manifests. A value of None is drawn as a dash, never as zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from laserbatch.jobs.formatting import MISSING, count, percent
from laserbatch.jobs.report.svg import Canvas, Frame, shortened, text_width

HALF_WIDTH, FULL_WIDTH = 480.0, 1010.0


@dataclass(frozen=True)
class Series:
    """One colour of a chart: a value (or None) for every category."""

    name: str
    values: Sequence[float | None]
    colour: str


@dataclass(frozen=True)
class Part:
    """One piece of a stacked bar."""

    name: str
    value: float
    colour: str
    dark: bool = True  # whether light text is readable on the colour


def grouped_bars(
    categories: Sequence[str],
    series: Sequence[Series],
    y_name: str,
    show: Callable[[object], str],
    width: float = HALF_WIDTH,
) -> Markup:
    """Standing bars side by side, one group a category, each with its value on top.

    Parameters
    ----------
    categories : names of the groups.
    series : one bar a group each; values >= 0.
    y_name : name and unit of the vertical axis.
    show : value to text.
    """
    canvas = Canvas(width, 232, f"Bar chart: {y_name} by {', '.join(item.name for item in series)}")
    frame = Frame(canvas, 0.0, _maximum(series) * 1.05, y_name, bottom=28.0)
    group = frame.width / max(1, len(categories))
    bar = min(58.0, group * 0.8 / max(1, len(series)))
    for index, category in enumerate(categories):
        centre = frame.left + group * (index + 0.5)
        for place, item in enumerate(series):
            x = centre + bar * (place - len(series) / 2)
            value = item.values[index]
            if value is not None:
                tip = f"{category}, {item.name}: {show(value)}"
                canvas.rect(x + 2, frame.y(value), bar - 4, frame.base - frame.y(value), item.colour, tip)
            top = frame.base if value is None else frame.y(value)
            canvas.text(x + bar / 2, top - 5, MISSING if value is None else show(value), anchor="middle", kind="value")
        canvas.text(centre, frame.base + 18, category, anchor="middle")
    frame.close()
    return canvas.markup()


def lying_bars(
    rows: Sequence[tuple[str, float]],
    x_name: str,
    show: Callable[[object], str],
    colour: str,
    width: float = HALF_WIDTH,
) -> Markup:
    """Lying bars, one a row, each with its name before and its value behind.

    Parameters
    ----------
    rows : (name, value >= 0), in the order of drawing.
    x_name : name and unit of the values.
    """
    pitch, left = 28.0, min(width * 0.42, max([text_width(name) for name, _ in rows], default=0) + 12)
    canvas = Canvas(width, pitch * len(rows) + 30, f"Bar chart: {x_name}")
    room = width - left - max([text_width(show(value)) for _, value in rows], default=0) - 12
    largest = max([value for _, value in rows], default=0) or 1.0
    for index, (name, value) in enumerate(rows):
        y = pitch * index + 6
        canvas.text(left - 10, y + 14, shortened(name, left - 10), anchor="end")
        canvas.rect(left, y, max(1.5, room * value / largest), pitch - 9, colour, f"{name}: {show(value)}")
        canvas.text(left + max(1.5, room * value / largest) + 7, y + 14, show(value), kind="value")
    canvas.line(left, 0, left, pitch * len(rows) + 2, kind="axis")
    canvas.text(left, canvas.height - 6, x_name, kind="tick")
    return canvas.markup()


def stacked_shares(rows: Sequence[tuple[str, Sequence[Part]]], x_name: str, width: float = HALF_WIDTH) -> Markup:
    """Lying bars of equal length, cut into shares of the row's whole.

    Parameters
    ----------
    rows : (name, its parts); parts of value 0 are left out.
    x_name : what the whole is.
    """
    pitch, left = 50.0, max([text_width(name) for name, _ in rows], default=0) + 14
    canvas = Canvas(width, pitch * len(rows) + 36, f"Shares of {x_name}")
    room, base = width - left - 14, pitch * len(rows) + 4
    for mark in (0.0, 0.25, 0.5, 0.75, 1.0):
        canvas.line(left + room * mark, 4, left + room * mark, base)
        canvas.text(left + room * mark, base + 14, f"{mark:.0%}".replace("%", " %"), anchor="middle", kind="tick")
    for index, (name, parts) in enumerate(rows):
        y, x = pitch * index + 10, left
        whole = sum(part.value for part in parts) or 1.0
        canvas.text(left - 12, y + 22, name, anchor="end")
        for part in parts:
            length, share = room * part.value / whole, percent(part.value / whole)
            if part.value <= 0:
                continue
            canvas.rect(
                x, y, max(length - 1, 0.6), 34, part.colour, f"{part.name}: {count(part.value)} ({share})", round_px=1
            )
            if length > text_width(share) + 6:
                canvas.text(
                    x + length / 2, y + 22, share, anchor="middle", kind="inside light" if part.dark else "inside"
                )
            x += length
    canvas.text(left + room / 2, base + 29, x_name, anchor="middle", kind="tick")
    return canvas.markup()


def _maximum(series: Sequence[Series]) -> float:
    return max([value for item in series for value in item.values if value is not None], default=0.0) or 1.0
