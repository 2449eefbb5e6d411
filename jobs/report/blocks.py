"""What a page is made of: sections of charts, tables, notes, samples, pairs of texts and folded ones.

Plain values; the template decides how they look. Strings are data and are escaped there; only an SVG is markup. Charts
are made by matplotlib's SVG backend: the same data give the same bytes, a chart's label holds all of its values for
readers who do not see it, and a value of None is a dash, never zero.
"""

import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup, escape

from laserbatch.jobs.formatting import percent
from laserbatch.pipeline.storage.manifest import SampleText

# Colour-blind safe: apart in lightness, or of Okabe and Ito's palette.
TONIGHT, PREVIOUS_NIGHT, PLAIN = "#0b4f8a", "#7fb2de", "#b4bcc6"
INK = "#17202b"
WIDTH = 420  # user units; the page scales a chart to its column
STYLE = Path(__file__).parent / "charts.mplstyle"

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache otherwise


@dataclass(frozen=True)
class Series:
    """One colour of a chart: a value (or None) for every category."""

    name: str
    values: Sequence[float | None]
    colour: str


@dataclass(frozen=True)
class Figure:
    """A chart with its title and legend; the caption says what is counted."""

    title: str
    svg: Markup
    caption: str
    legend: Sequence[Series]


@dataclass(frozen=True)
class Table:
    """Rows of text by column, the same columns in each; those in `words` are set to the left, numbers to the right."""

    title: str
    rows: Sequence[Mapping[str, str]]
    words: Sequence[str]
    caption: str = ""
    strong_rows: Sequence[int] = ()


@dataclass(frozen=True)
class Note:
    """A plain sentence in place of what is not there."""

    text: str


@dataclass(frozen=True)
class Sample:
    """One text with the sources of its spans."""

    title: str
    facts: str
    sample: SampleText


@dataclass(frozen=True)
class Beside:
    """Two texts side by side, by what they are; each as parts, of which some are marked."""

    title: str
    facts: str
    texts: Mapping[str, Sequence[tuple[str, bool]]]


@dataclass(frozen=True)
class Folded:
    """A text that opens on a click."""

    title: str
    text: str


Block = Figure | Table | Note | Sample | Beside | Folded


@dataclass(frozen=True)
class Section:
    """A titled part of the page; `lead` is a sentence under its title."""

    anchor: str
    title: str
    blocks: Sequence[Block]
    lead: str = ""


def bars(
    title: str,
    categories: Sequence[str],
    series: Sequence[Series],
    measured: str,
    show: Callable[[float | None], str],
    caption: str = "",
) -> Figure:
    """Lying bars, a group a category, each with its value (>= 0) behind it; `show`: value to text."""
    group = len(series) + (0.7 if len(series) > 1 else 0)
    chart = _Chart(22 * group * len(categories) + 12)
    for number, one in enumerate(series):
        rows = [group * place + number for place in range(len(categories))]
        chart.axes.barh(rows, [value or 0 for value in one.values], 0.82, color=one.colour)
        for row, value in zip(rows, one.values, strict=True):
            chart.text(value or 0, row, show(value), (6, 0), va="center")
    most = max((value or 0 for one in series for value in one.values), default=0)
    chart.axes.set_xlim(0, 1.25 * most or 1)
    chart.axes.set_xticks([])
    chart.axes.spines["left"].set_visible(True)
    chart.name_rows(categories, group, len(series))
    return chart.figure(title, measured, categories, series, show, caption)


def stacked_shares(
    title: str, categories: Sequence[str], series: Sequence[Series], measured: str, caption: str = ""
) -> Figure:
    """Lying bars of equal length, one a category, cut into each series' share of the category's whole."""
    wholes = [sum(one.values[row] or 0 for one in series) or 1 for row in range(len(categories))]
    shares = [
        Series(one.name, [(value or 0) / whole for value, whole in zip(one.values, wholes, strict=True)], one.colour)
        for one in series
    ]
    chart = _Chart(44 * len(categories) + 44)
    starts = [0.0] * len(categories)
    for one in shares:
        chart.axes.barh(range(len(categories)), one.values, 0.7, left=starts, color=one.colour, edgecolor="white")
        for row, share in enumerate(one.values):
            if share > 0.09:
                ink = "white" if _is_dark(one.colour) else INK
                chart.text(starts[row] + share / 2, row, percent(share), ha="center", va="center", color=ink)
            starts[row] += share
    chart.axes.set_xlim(0, 1)
    chart.axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    chart.axes.set_xlabel(measured)
    chart.axes.grid(axis="x")
    chart.name_rows(categories)
    return chart.figure(title, measured, categories, shares, percent, caption)


class _Chart:
    """An empty pair of axes in our style, and its way to a figure of a page."""

    def __init__(self, height: float) -> None:
        import matplotlib.style
        from matplotlib.figure import Figure as Drawing

        with matplotlib.style.context(STYLE):
            self._drawing = Drawing(figsize=(WIDTH / 72, height / 72), layout="constrained")
            self.axes = self._drawing.subplots()

    def text(self, x: float, y: float, text: str, offset: tuple[float, float] = (0, 0), **style) -> None:
        """Text at a place of the plot, moved by points."""
        style = {"color": INK, "size": 11, "weight": "bold"} | style
        self.axes.annotate(text, (x, y), offset, textcoords="offset points", **style)

    def name_rows(self, names: Sequence[str], group: float = 1, num_bars: int = 1) -> None:
        """Names of lying groups, the first on top, which are so far apart and have so many bars."""
        places = [group * place + (num_bars - 1) / 2 for place in range(len(names))]
        self.axes.set_yticks(places, names, color=INK, size=12)
        self.axes.set_ylim(group * len(names) - 0.4 - (group - num_bars), -0.6)

    def figure(
        self,
        title: str,
        measured: str,
        categories: Sequence[str],
        series: Sequence[Series],
        show: Callable[[float | None], str],
        caption: str,
    ) -> Figure:
        """What is drawn, with its values in words, and a legend of the series that have names."""
        groups = [
            f"{category}: " + ", ".join(f"{one.name} {show(one.values[place])}" for one in series)
            for place, category in enumerate(categories)
        ]
        svg = self._svg(f"{title}; {measured}. {'; '.join(groups)}")
        return Figure(title, svg, caption, [one for one in series if one.name])

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
