"""Charts: every label is there and escaped, shapes stay in the drawing, ticks are round; and numbers as text."""

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.jobs import formatting
from laserbatch.jobs.report.charts import Part, Series, grouped_bars, lying_bars, stacked_shares
from laserbatch.jobs.report.plots import Spread, histogram, share_lines, spreads
from laserbatch.jobs.report.svg import shortened, tick_text, ticks

NAME = '<b>"A&B"</b>'


def drawings() -> dict[str, str]:
    one, two = Series(NAME, [3.0, None, 0.0], "#111111"), Series("b", [1.0, 2.0, 0.0], "#222222")
    return {
        "grouped": grouped_bars([NAME, "x", "y"], [one, two], "y name", str),
        "lying": lying_bars([(NAME, 3.0), ("x", 0.0)], "x name", str, "#111111"),
        "stacked": stacked_shares([(NAME, [Part("a", 1, "#111111"), Part("b", 0, "#222222")]), ("none", [])], "x name"),
        "lines": share_lines(
            [Series(NAME, [0.5, None, 0.1], "#111111"), Series("b", [1.0, 0.2], "#222222")], "x name", "y name"
        ),
        "histogram": histogram({1: 2, 5: 1}, {2: 1, 3: 1}, "x name", "y name", ("#111111", "#222222")),
        "histogram of one": histogram({7: 1}, {}, "x name", "y name", ("#111111", "#222222")),
        "spreads": spreads([(NAME, [Spread("a", 0.5, 0.01, "#111111"), Spread("b", 0.5, None, "#222222")])], "x name"),
        "no bars": lying_bars([], "x name", str, "#111111"),
    }


@pytest.mark.parametrize("name", drawings())
def test_charts_are_well_formed_and_stay_in_their_frame(name):
    root = ElementTree.fromstring(drawings()[name])
    width, height = map(float, root.get("viewBox").split()[2:])
    for node in root.iter("rect"):
        x, y, w, h = (float(node.get(key)) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and w >= 0 and h >= 0 and x + w <= width + 1 and y + h <= height + 1
    assert all(math.isfinite(float(node.get("x"))) for node in root.iter("text"))


def test_bars_are_as_high_as_their_values():
    root = ElementTree.fromstring(grouped_bars(["a", "b"], [Series("s", [10.0, 5.0], "#111111")], "y", str))
    tall, short = (float(node.get("height")) for node in root.iter("rect"))
    assert tall == pytest.approx(2 * short, rel=0.01)


def test_missing_value_is_a_dash_and_no_bar():
    root = ElementTree.fromstring(grouped_bars(["a"], [Series("s", [None], "#111111")], "y", str))
    assert not list(root.iter("rect"))
    assert formatting.MISSING in [node.text for node in root.iter("text")]


def test_every_value_is_counted_in_the_histogram():
    root = ElementTree.fromstring(histogram(dict.fromkeys(range(100), 1), {}, "x", "y", ("#111111", "#222222")))
    assert sum(int(node.text.rsplit(": ", 1)[1]) for node in root.iter("title")) == 100


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-4, 1e6))
def test_ticks_cover_the_range_in_few_even_steps(low, span):
    marks = ticks(low, low + span)
    assert 2 <= len(marks) <= 8
    assert marks[0] <= low + 1e-6 * span + 1e-9 and marks[-1] >= low + span - 1e-6 * span - 1e-9


def test_ticks_of_a_point_are_a_range():
    assert len(ticks(5.0, 5.0)) >= 2


def test_tick_texts_have_the_digits_they_need():
    marks = ticks(0.7, 0.73)
    assert len({tick_text(mark, marks) for mark in marks}) == len(marks)
    assert [tick_text(mark, [0, 2500, 5000, 7500, 10000]) for mark in (0, 2500)] == ["0", "2.5k"]


def test_long_labels_are_shortened():
    assert shortened("a" * 100, 70).endswith("…") and len(shortened("a" * 100, 70)) == 10


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
        (formatting.millions(5_240_000), "5.2 M"),
    ],
)
def test_numbers_as_text(shown, expected):
    assert shown == expected


@pytest.mark.parametrize("show", ["count", "decimal", "rate", "times", "percent", "seconds", "millions"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, "7", True])
def test_what_is_no_number_is_a_dash(show, value):
    assert getattr(formatting, show)(value) == formatting.MISSING
