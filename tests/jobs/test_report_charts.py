"""Charts: bars have the lengths of their shares, the page is one file, and numbers as text."""

import math

import pytest
from manifest_fixture import manifest_of, night_manifest

from laserbatch.jobs import formatting
from laserbatch.jobs.report.blocks import Series, stacked_shares
from laserbatch.jobs.report.page import write_report


def test_a_page_is_one_file_that_asks_for_nothing_and_the_same_for_the_same_run(tmp_path):
    for name in ("once", "twice"):
        write_report(manifest_of(night_manifest()), tmp_path / name / "report.html")
    html = (tmp_path / "once" / "report.html").read_text(encoding="utf-8")
    assert html == (tmp_path / "twice" / "report.html").read_text(encoding="utf-8")
    assert list((tmp_path / "once").iterdir()) == [tmp_path / "once" / "report.html"]
    assert "http://" not in html and "https://" not in html
    assert "<script" not in html and "@import" not in html and "url(" not in html
    assert "default-src 'none'" in html
    assert "share of the side&#39;s entities" in html and ">1,496<" in html


def test_shares_are_of_the_categorys_whole():
    parts = [Series("a", [30, 0], "#111111"), Series("b", [10, 0], "#eeeeee")]
    rows = stacked_shares("title", ["x", "none"], parts, "axis").rows
    assert [(bar.width, bar.text, bar.is_dark) for bar in rows["x"]] == [(0.75, "75 %", True), (0.25, "25 %", False)]
    assert [(bar.width, bar.text) for bar in rows["none"]] == [(0, "")] * 2


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (formatting.count(12345), "12,345"),
        (formatting.counted(1, "text"), "1 text"),
        (formatting.counted(0, "text"), "0 texts"),
        (formatting.decimal(-0.00004, 4, signed=True), "+0.0000"),
        (formatting.decimal(-0.0004, 4), "−0.0004"),
        (formatting.significant(12345.6), "12,350"),
        (formatting.significant(0.0000123456), "0.00001235"),
        (formatting.seconds(0.341), "0.34 s"),
        (formatting.seconds(9.994), "9.99 s"),
        (formatting.seconds(9.996), "10.0 s"),
        (formatting.seconds(59.94), "59.9 s"),
        (formatting.seconds(59.97), "1 min 00 s"),
        (formatting.seconds(119.6), "2 min 00 s"),
        (formatting.seconds(3599.4), "59 min 59 s"),
        (formatting.seconds(3599.6), "1 h 00 min"),
        (formatting.seconds(7199), "2 h 00 min"),
        (formatting.seconds(200), "3 min 20 s"),
        (formatting.seconds(7500), "2 h 05 min"),
        (formatting.percent(0.004), "0.4 %"),
        (formatting.percent(0.87), "87 %"),
        (formatting.percent(0), "0 %"),
        (formatting.percent(0.0004), "under 0.1 %"),
        (formatting.percent(0.996), "over 99 %"),
        (formatting.percent(0.9997, 1), "over 99.9 %"),
        (formatting.percent(0.9994, 1), "99.9 %"),
        (formatting.percent(1, 1), "100.0 %"),
        (formatting.percent(1.0004, 1), "100.0 %"),
        (formatting.times(1.097), "1.1×"),
        (formatting.times(99.97), "100×"),
        (formatting.rate(9.997), "10.0"),
        (formatting.rate(99.97), "100"),
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
