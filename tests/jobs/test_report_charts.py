"""Charts: every label and value is there and escaped, shapes stand where their values say; and numbers as text."""

import math
import re
from xml.etree import ElementTree

import pytest
from manifest_fixture import manifest_of, night_manifest

from laserbatch.jobs import formatting
from laserbatch.jobs.report.blocks import Figure, Series, bars, stacked_shares
from laserbatch.jobs.report.page import write_report

NAME = '<b>"A&B" $x_</b>'


def drawings() -> dict[str, Figure]:
    one, two = Series(NAME, [3.0, None, 0.0], "#111111"), Series("b", [1.0, 2.0, 0.0], "#222222")
    return {
        "grouped": bars("title", [NAME, "x", "y"], [one, two], "axis", str),
        "one series": bars("title", [NAME, "x"], [Series("", [3.0, 0.0], "#111111")], "axis", str),
        "stacked": stacked_shares("title", [NAME, "none"], [Series("a", [1, 0], "#111111")], "axis"),
    }


@pytest.mark.parametrize("name", drawings())
def test_charts_are_well_formed_small_and_say_their_values(name):
    svg = drawings()[name].svg
    root = ElementTree.fromstring(svg.replace("xlink:href", "href"))
    assert root.get("role") == "img" and root.get("aria-label").startswith("title; ")
    assert NAME in root.get("aria-label")
    assert "axis" in "".join(root.itertext()) + root.get("aria-label")
    assert "<b>" not in svg and "<metadata" not in svg and "<style" not in svg
    assert len(svg) < 20_000


def test_the_same_values_give_the_same_bytes():
    assert {name: figure.svg for name, figure in drawings().items()} == {
        name: figure.svg for name, figure in drawings().items()
    }


def test_a_page_is_one_file_that_asks_for_nothing_and_the_same_for_the_same_run(tmp_path):
    for name in ("once", "twice"):
        write_report(manifest_of(night_manifest()), tmp_path / name / "report.html")
    html = (tmp_path / "once" / "report.html").read_text(encoding="utf-8")
    assert html == (tmp_path / "twice" / "report.html").read_text(encoding="utf-8")
    assert list((tmp_path / "once").iterdir()) == [tmp_path / "once" / "report.html"]
    assert "http://" not in html and "https://" not in html
    assert "<script" not in html and "@import" not in html and "url(" not in html
    assert "default-src 'none'" in html
    drawn = re.sub(r'aria-label="[^"]*"', "", html)
    assert ">share of the side's entities" in drawn and ">1,496<" in drawn


def rectangles(figure: Figure, colour: str) -> list[tuple[float, float]]:
    """Widths and heights of the drawn rectangles of a colour."""
    sizes = []
    for path in re.findall(rf'<path d="([^"]*)"[^>]*fill: {colour}', figure.svg):
        numbers = [float(text) for text in re.findall(r"-?[\d.]+", path)]
        sizes.append((max(numbers[::2]) - min(numbers[::2]), max(numbers[1::2]) - min(numbers[1::2])))
    return sizes


def test_bars_are_as_long_as_their_values():
    figure = bars("title", ["a", "b"], [Series("s", [10.0, 5.0], "#111111")], "y", str)
    (long, _), (short, _) = rectangles(figure, "#111111")
    assert long == pytest.approx(2 * short, rel=0.01)


def test_shares_are_of_the_categorys_whole():
    parts = [Series("a", [30, 1], "#111111"), Series("b", [10, 1], "#222222")]
    figure = stacked_shares("title", ["x", "y"], parts, "axis")
    (most, _), (half, _) = rectangles(figure, "#111111")
    assert most == pytest.approx(1.5 * half, rel=0.01)
    assert "x: a 75 %, b 25 %; y: a 50 %, b 50 %" in figure.svg


def test_missing_value_is_a_dash():
    figure = bars("title", ["a"], [Series("s", [None], "#111111")], "y", formatting.count)
    texts = [node.text for node in ElementTree.fromstring(figure.svg).iter("text")]
    assert formatting.MISSING in texts


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (formatting.count(12345), "12,345"),
        (formatting.counted(1, "entity", "entities"), "1 entity"),
        (formatting.counted(0, "entity", "entities"), "0 entities"),
        (formatting.decimal(-0.00004, 4, signed=True), "+0.0000"),
        (formatting.decimal(-0.0004, 4), "−0.0004"),
        (formatting.seconds(0.341), "0.34 s"),
        (formatting.seconds(59.96), "60.0 s"),
        (formatting.seconds(200), "3 min 20 s"),
        (formatting.seconds(7500), "2 h 05 min"),
        (formatting.percent(0.004), "0.4 %"),
        (formatting.percent(0.87), "87 %"),
        (formatting.times(3.24), "3.2×"),
        (formatting.times(0.97), "0.97×"),
        (formatting.rate(8.4), "8.40"),
        (formatting.rate(1234.5), "1,234"),
    ],
)
def test_numbers_as_text(shown, expected):
    assert shown == expected


@pytest.mark.parametrize("show", ["count", "decimal", "rate", "times", "percent", "seconds"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_no_number_is_a_dash(show, value):
    assert getattr(formatting, show)(value) == formatting.MISSING
