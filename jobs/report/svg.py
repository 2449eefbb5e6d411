"""Drawing: a canvas that writes inline SVG, and a vertical axis. Knows pixels and strings, nothing of what is plotted.

Text goes through an XML writer, so that whatever a label holds is escaped. Colours of ink and lines come from the
page's style sheet by class; bars carry their own fill.
"""

import math
from xml.etree import ElementTree

from markupsafe import Markup

FONT_PX = 13
TOP, BOTTOM = 34.0, 46.0  # of a Frame: room for the vertical axis's name, and for labels and name of the horizontal one
CHARACTER_PX = 6.9  # mean width of a character at FONT_PX, measured on the page's fonts


class Canvas:
    """One SVG drawing.

    Parameters
    ----------
    width, height : size in user units; the page scales the drawing to its column.
    label : what the drawing shows, for readers who do not see it.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self._root = ElementTree.Element(
            "svg", {"viewBox": f"0 0 {_px(width)} {_px(height)}", "role": "img", "aria-label": label}
        )

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", kind: str = "label") -> None:
        """Text with its baseline at y; `kind` is its class in the style sheet: label, tick, value, inside."""
        node = self._add("text", x=_px(x), y=_px(y), **{"text-anchor": anchor, "class": kind})
        node.text = text

    def line(self, x1: float, y1: float, x2: float, y2: float, *, kind: str = "grid") -> None:
        """A line; `kind` is its class: grid, axis, whisker."""
        self._add("line", x1=_px(x1), y1=_px(y1), x2=_px(x2), y2=_px(y2), **{"class": kind})

    def rect(self, x: float, y: float, width: float, height: float, fill: str, tip: str = "", *, round_px: float = 2):
        """A filled rectangle; `tip` is shown on hovering."""
        node = self._add("rect", x=_px(x), y=_px(y), width=_px(max(width, 0)), height=_px(max(height, 0)), fill=fill)
        if round_px:
            node.set("rx", _px(min(round_px, max(width, 0) / 2)))
        self._tip(node, tip)

    def path(self, points: list[tuple[float, float]], stroke: str, *, dash: str = "") -> None:
        """A line through points."""
        steps = " L".join(f"{_px(x)} {_px(y)}" for x, y in points)
        node = self._add("path", d=f"M{steps}", fill="none", stroke=stroke, **{"stroke-width": "2"})
        node.set("stroke-linejoin", "round")
        if dash:
            node.set("stroke-dasharray", dash)

    def mark(self, x: float, y: float, fill: str, tip: str = "", *, square: bool = False) -> None:
        """A point: a disc, or a square."""
        if square:
            node = self._add("rect", x=_px(x - 3.5), y=_px(y - 3.5), width="7", height="7", fill=fill)
        else:
            node = self._add("circle", cx=_px(x), cy=_px(y), r="4", fill=fill)
        self._tip(node, tip)

    def markup(self) -> Markup:
        """The drawing, safe to place in a page."""
        return Markup(ElementTree.tostring(self._root, encoding="unicode"))

    def _add(self, tag: str, **attributes: str) -> ElementTree.Element:
        return ElementTree.SubElement(self._root, tag, attributes)

    @staticmethod
    def _tip(node: ElementTree.Element, tip: str) -> None:
        if tip:
            ElementTree.SubElement(node, "title").text = tip


class Frame:
    """A vertical axis with its grid, on a canvas.

    Attributes
    ----------
    left, width : of the plot's area.
    top, base : where the axis ends and begins, in user units from the canvas's top.
    """

    def __init__(self, canvas: Canvas, low: float, high: float, y_name: str, *, bottom: float = BOTTOM) -> None:
        marks = ticks(low, high)
        texts = [tick_text(mark, marks) for mark in marks]
        self._canvas, self._low, self._high = canvas, marks[0], marks[-1]
        self.left = max(text_width(text) for text in texts) + 12
        self.width = canvas.width - self.left - 6
        self.top, self.base = TOP, canvas.height - bottom
        canvas.text(0, FONT_PX, y_name, kind="tick")
        for mark, text in zip(marks, texts, strict=True):
            canvas.line(self.left, self.y(mark), canvas.width - 6, self.y(mark))
            canvas.text(self.left - 8, self.y(mark) + 4.5, text, anchor="end", kind="tick")

    def y(self, value: float) -> float:
        """Height of a value on the canvas."""
        return self.base - (self.base - self.top) * (value - self._low) / (self._high - self._low)

    def close(self, x_name: str = "") -> None:
        """Draw what lies over the bars: the base line; and the name of the horizontal axis."""
        self._canvas.line(self.left, self.base, self._canvas.width - 6, self.base, kind="axis")
        if x_name:
            middle = self.left + self.width / 2
            self._canvas.text(middle, self._canvas.height - 8, x_name, anchor="middle", kind="tick")


def text_width(text: str) -> float:
    """Estimated width of a label in user units."""
    return CHARACTER_PX * len(text)


def shortened(text: str, max_px: float) -> str:
    """The text, cut with an ellipsis where it would be wider than `max_px`."""
    room = max(1, int(max_px / CHARACTER_PX))
    return text if len(text) <= room else text[: room - 1] + "…"


def ticks(low: float, high: float, num_steps: int = 4) -> list[float]:
    """Round numbers that cover `[low, high]` in about `num_steps` steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not high > low:
        high = low + 1.0
    rough = (high - low) / num_steps
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_text(value: float, all_ticks: list[float]) -> str:
    """A tick's label, with as many digits as its neighbours need."""
    step = all_ticks[1] - all_ticks[0] if len(all_ticks) > 1 else 1.0
    if step >= 1000 and all_ticks[-1] >= 10_000:
        whole = all(tick % 1000 == 0 for tick in all_ticks)
        return f"{value / 1000:,.{0 if whole else 1}f}k" if value else "0"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step, digits) != round(step, 6):
        digits += 1
    return f"{value:,.{digits}f}"


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
