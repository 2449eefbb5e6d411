"""What a page is made of: sections, which hold figures, tables, notes, samples and folded lists.

Plain values; the template decides how they look. Strings are data and are escaped there; only an SVG is markup.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from laserbatch.pipeline.storage.manifest import SampleSpan

# Colour-blind safe: apart in lightness, or of Okabe and Ito's palette.
TONIGHT, PREVIOUS_NIGHT, PLAIN, OTHER = "#0b4f8a", "#7fb2de", "#b4bcc6", "#8b95a1"
SIDE_COLOURS = {"user": "#0b4f8a", "item": "#c4560a"}


@dataclass(frozen=True)
class LegendEntry:
    """A colour and what it stands for."""

    label: str
    colour: str


@dataclass(frozen=True)
class Figure:
    """A chart with its title; the caption says what is counted."""

    title: str
    svg: Markup
    caption: str = ""
    legend: Sequence[LegendEntry] = ()


@dataclass(frozen=True)
class Table:
    """Rows of text. Columns named in `left` are words; the others are numbers, set to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    left: frozenset[int] = frozenset({0})
    strong_rows: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Note:
    """A plain sentence in place of what is not there."""

    text: str
    wide: bool = True


@dataclass(frozen=True)
class Sample:
    """One text with the sources of its spans."""

    title: str
    facts: str
    spans: Sequence[SampleSpan]
    prompt: str
    wide: bool = False


@dataclass(frozen=True)
class SourceLegend:
    """The colours of sample texts."""


@dataclass(frozen=True)
class Folded:
    """A list of names and values that opens on a click."""

    title: str
    rows: Sequence[tuple[str, str]]


Block = Figure | Table | Note | Sample | SourceLegend | Folded


@dataclass(frozen=True)
class Section:
    """A titled part of the page; `lead` is its one-sentence result."""

    anchor: str
    title: str
    lead: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Phrase:
    """A piece of the headline; the figures in it are strong."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class KeyFigure:
    """One of the numbers at the top."""

    label: str
    value: str
    notes: Sequence[str]


@dataclass(frozen=True)
class Page:
    """Everything that a page shows."""

    title: str
    run_id: str
    status: str
    facts: Sequence[str]
    headline: Sequence[Phrase]
    key_figures: Sequence[KeyFigure]
    sections: Sequence[Section]
    made_by: str
    warnings: Sequence[str] = ()
