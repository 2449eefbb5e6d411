"""The building blocks of a page: sections of charts, tables, notes, sample texts, pairs of texts and folded texts.

Blocks are plain values; the template decides how they look and escapes their strings. Charts are bars of HTML, each
with its share as text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laserbatch.jobs.formatting import percent
from laserbatch.pipeline.storage.figures import SampleText

TONIGHT, PLAIN = "#0b4f8a", "#b4bcc6"  # safe for the colour-blind: they differ in lightness
MIN_SHARE_NAMED = 0.09  # bars narrower than this share of the whole carry no label


@dataclass(frozen=True)
class Series:
    """One colour of a chart: a value (or None) for every category."""

    name: str
    values: Sequence[float | None]
    colour: str


@dataclass(frozen=True)
class Bar:
    """A value as a bar of `width` (0 to 1, the share of its row) and as text; `tooltip` also names its series."""

    width: float
    text: str
    tooltip: str
    colour: str

    @property
    def is_dark(self) -> bool:
        """Whether the colour is so dark that text on it must be light."""
        red, green, blue = (int(self.colour[place : place + 2], 16) for place in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue < 140


@dataclass(frozen=True)
class Figure:
    """A chart of horizontal bars, one row per category; `measured` says what is counted."""

    title: str
    rows: Mapping[str, Sequence[Bar]]
    measured: str
    caption: str
    legend: Sequence[Series]


@dataclass(frozen=True)
class Table:
    """Rows of text by column, with the same columns in each row; columns in `words` are left-aligned, others right."""

    title: str
    rows: Sequence[Mapping[str, str]]
    words: Sequence[str]
    caption: str = ""
    strong_rows: Sequence[int] = ()


@dataclass(frozen=True)
class Note:
    """A plain sentence in place of missing figures."""

    text: str


@dataclass(frozen=True)
class Sample:
    """One text with the sources of its spans."""

    title: str
    facts: str
    sample: SampleText


@dataclass(frozen=True)
class SideBySide:
    """Two texts next to each other, by label; each is a list of parts (text, whether it is marked)."""

    title: str
    facts: str
    texts: Mapping[str, Sequence[tuple[str, bool]]]


@dataclass(frozen=True)
class Folded:
    """A text that is shown on a click."""

    title: str
    text: str


Block = Figure | Table | Note | Sample | SideBySide | Folded


@dataclass(frozen=True)
class Section:
    """A titled part of the page; `lead` is a sentence under its title."""

    anchor: str
    title: str
    blocks: Sequence[Block]
    lead: str = ""


def stacked_shares(
    title: str, categories: Sequence[str], series: Sequence[Series], measured: str, caption: str = ""
) -> Figure:
    """Bars of equal length, one per category, divided by each series' share of the category's total."""
    rows = {}
    for place, category in enumerate(categories):
        whole = sum(part.values[place] or 0 for part in series) or 1
        shares = [(part.values[place] or 0) / whole for part in series]
        rows[category] = [
            Bar(share, percent(share) if share > MIN_SHARE_NAMED else "", f"{part.name} {percent(share)}", part.colour)
            for part, share in zip(series, shares, strict=True)
        ]
    return Figure(title, rows, measured, caption, series)
