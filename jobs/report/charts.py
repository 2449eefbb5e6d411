"""The charts of a page, by matplotlib's SVG backend, in one style.

The same data give the same bytes. A chart's label holds all of its values, for readers who do not see it. Text stays
text: the page sets its font. A value of None is drawn as a dash, never as zero.
"""

import io
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from laserbatch.jobs.formatting import decimal, percent
from laserbatch.jobs.report.blocks import OTHER, Figure, LegendEntry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 420  # user units; the page scales a chart to its column
INK, SOFT = "#17202b", "#566272"
STYLE = Path(__file__).parent / "charts.mplstyle"
MARKERS = "osD^v"

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache otherwise


@dataclass(frozen=True)
class Series:
    """One colour of a chart.

    Attributes
    ----------
    values : a value (or None) for every category; of a line, for every place.
    places : of a line, on the horizontal axis; 1, 2, 3, ... without them.
    errors : (below, above) of every value, or None.
    """

    name: str
    values: Sequence[float | None]
    colour: str
    places: Sequence[float] = ()
    errors: Sequence[tuple[float, float] | None] = ()


def grouped_bars(
    title: str,
    categories: Sequence[str],
    series: Sequence[Series],
    y_name: str,
    show: Callable[[float | None], str],
    caption: str = "",
) -> Figure:
    """Standing bars side by side, one group a category, each with its value (>= 0) on top; `show`: value to text."""
    chart = _Chart(WIDTH, 200)
    width = 0.8 / max(1, len(series))
    for number, one in enumerate(series):
        places = [group + width * (number + 0.5 - len(series) / 2) for group in range(len(categories))]
        chart.axes.bar(places, [value or 0 for value in one.values], width * 0.94, color=one.colour)
        for place, value in zip(places, one.values, strict=True):
            chart.text(place, value or 0, show(value), (0, 4), ha="center")
    chart.axes.set_xticks(range(len(categories)), categories, color=INK, size=12)
    chart.axes.set_xlim(-0.55, len(categories) - 0.45)
    chart.axes.margins(y=0.12)
    chart.axes.grid(axis="y")
    chart.name_y(y_name)
    return chart.figure(title, y_name, categories, series, show, caption)


def lying_bars(
    title: str,
    rows: Sequence[tuple[str, float]],
    x_name: str,
    show: Callable[[float | None], str],
    colour: str,
    caption="",
) -> Figure:
    """Lying bars, one a row, each with its name before and its value (>= 0) behind."""
    names, values = [name for name, _ in rows], [value for _, value in rows]
    chart = _Chart(WIDTH, 24 * len(rows) + 34)
    chart.axes.barh(range(len(rows)), values, 0.66, color=colour)
    for row, value in enumerate(values):
        chart.text(value, row, show(value), (6, 0), va="center")
    chart.axes.set_xlim(0, 1.25 * max(values, default=1) or 1)
    chart.axes.set_xticks([])
    chart.axes.spines["left"].set_visible(True)
    chart.axes.spines["bottom"].set_visible(False)
    chart.name_rows(names)
    return chart.figure(title, x_name, names, [Series("", values, colour)], show, caption, legend=False)


def stacked_shares(
    title: str, categories: Sequence[str], series: Sequence[Series], x_name: str, caption: str = ""
) -> Figure:
    """Lying bars of equal length, one a category, cut into each series' share of the category's whole."""
    wholes = [sum(one.values[row] or 0 for one in series) or 1 for row in range(len(categories))]
    shares = [
        Series(one.name, [(value or 0) / whole for value, whole in zip(one.values, wholes, strict=True)], one.colour)
        for one in series
    ]
    chart = _Chart(WIDTH, 44 * len(categories) + 44)
    starts = [0.0] * len(categories)
    for one in shares:
        chart.axes.barh(range(len(categories)), one.values, 0.7, left=starts, color=one.colour, edgecolor="white")
        for row, share in enumerate(one.values):
            if share > 0.09:
                ink = "white" if _is_dark(one.colour) else INK
                place = starts[row] + share / 2
                chart.text(place, row, percent(share), ha="center", va="center", color=ink)
            starts[row] += share
    chart.axes.set_xlim(0, 1)
    chart.axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    chart.axes.spines["bottom"].set_visible(False)
    chart.axes.set_xlabel(x_name)
    chart.axes.grid(axis="x")
    chart.name_rows(categories)
    return chart.figure(title, x_name, categories, shares, percent, caption)


def lines(
    title: str, series: Sequence[Series], x_name: str, y_name: str, caption: str = "", diagonal: bool = False
) -> Figure:
    """Shares of one as lines through points; `diagonal`: both axes are shares, and where they are equal is drawn."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    chart = _Chart(WIDTH, 210)
    in_percent = PercentFormatter(1, symbol=" %")
    if diagonal:
        chart.axes.plot([0, 1], [0, 1], color=OTHER, linestyle=(0, (4, 4)), linewidth=1.5)
    for number, one in enumerate(series):
        chart.axes.errorbar(
            one.places or range(1, len(one.values) + 1),
            one.values,
            yerr=list(zip(*one.errors, strict=True)) or None,
            color=one.colour,
            ecolor=SOFT + "88",
            linestyle="--" if number % 2 else "-",
            marker=MARKERS[number % len(MARKERS)],
        )
    chart.axes.yaxis.set_major_formatter(in_percent)
    if diagonal:
        chart.axes.xaxis.set_major_formatter(in_percent)
    else:
        chart.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    chart.axes.set_ylim(bottom=0)
    chart.axes.grid(axis="both" if diagonal else "y")
    chart.axes.set_xlabel(x_name)
    chart.name_y(y_name)
    longest = max(series, key=lambda one: len(one.values))
    places = [f"{place:.2g}" for place in longest.places or range(1, len(longest.values) + 1)]
    return chart.figure(title, f"{y_name} by {x_name}", places, series, percent, caption)


def dots(title: str, categories: Sequence[str], series: Sequence[Series], x_name: str, caption: str = "") -> Figure:
    """Values as points with their errors to each side: a group of rows a category, in it a row a series."""
    chart = _Chart(WIDTH, (21 * len(series) + 12) * len(categories) + 50)
    height = len(series) + 0.6
    for number, one in enumerate(series):
        for group, value in enumerate(one.values):
            if value is not None:
                error = one.errors[group] if one.errors else None
                chart.axes.errorbar(
                    [value],
                    [group * height + number],
                    xerr=None if error is None else [[error[0]], [error[1]]],
                    color=one.colour,
                    ecolor=SOFT + "88",
                    marker=MARKERS[number % len(MARKERS)],
                )
    chart.name_rows(categories, [group * height + (len(series) - 1) / 2 for group in range(len(categories))])
    chart.axes.set_ylim(len(categories) * height - 0.8, -0.8)
    chart.axes.locator_params(axis="x", nbins=6)
    chart.axes.grid(axis="x")
    chart.axes.set_xlabel(x_name)
    return chart.figure(title, x_name, categories, series, lambda value: decimal(value, 4), caption)


class _Chart:
    """An empty pair of axes in our style, and its way to a figure of a page."""

    def __init__(self, width: float, height: float) -> None:
        import matplotlib.style
        from matplotlib.figure import Figure as Drawing

        with matplotlib.style.context(STYLE):
            self._drawing = Drawing(figsize=(width / 72, height / 72), layout="constrained")
            self.axes: Axes = self._drawing.subplots()

    def text(self, x: float, y: float, text: str, offset: tuple[float, float] = (0, 0), **style) -> None:
        """Text at a place of the plot, moved by points."""
        style = {"color": INK, "size": 11, "weight": "bold"} | style
        self.axes.annotate(text, (x, y), offset, textcoords="offset points", **style)

    def name_rows(self, names: Sequence[str], places: Sequence[float] = ()) -> None:
        """Names of lying rows, the first on top."""
        self.axes.set_yticks(places or range(len(names)), names, color=INK, size=12)
        self.axes.set_ylim(len(names) - 0.4, -0.6)

    def name_y(self, name: str) -> None:
        """The vertical axis's name, lying above it, where it takes no width."""
        self.axes.set_title(name, loc="left", size=11, color=SOFT, x=0)

    def figure(
        self,
        title: str,
        measured: str,
        categories: Sequence[str],
        series: Sequence[Series],
        show: Callable[[float | None], str],
        caption: str,
        legend: bool = True,
    ) -> Figure:
        """What is drawn, with its values in words and its legend."""
        groups = [
            f"{category}: "
            + ", ".join(f"{one.name} {show(one.values[place])}".strip() for one in series if place < len(one.values))
            for place, category in enumerate(categories)
        ]
        entries = [LegendEntry(one.name, one.colour) for one in series] if legend else []
        return Figure(title, self._svg(f"{title}; {measured}. {'; '.join(groups)}"), caption, entries)

    def _svg(self, label: str) -> Markup:
        import matplotlib.style

        file = io.StringIO()
        with matplotlib.style.context(STYLE):
            self._drawing.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        body = re.split(r"<svg[^>]*>", file.getvalue(), maxsplit=1)[1]
        # What is of a page of its own goes: metadata, a style for all elements, names of groups; and clipping.
        body = re.sub(r"<(metadata|style|clipPath)\b.*?</\1>", "", body, flags=re.DOTALL)
        body = re.sub(r' id="\w+_\d+"| clip-path="[^"]*"', "", body)
        width, height = self._drawing.get_size_inches() * 72
        root = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
        return Markup(root + re.sub(r">\s+<", "><", body))


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140
