"""The reliability diagram: every bin is drawn where it belongs, and what is missing is said."""

from xml.etree import ElementTree

import pytest
from manifest_fixture import night_manifest
from scipy.stats import binomtest

from laserbatch.jobs.report.blocks import Note
from laserbatch.jobs.report.calibration import (
    ReliabilityLine,
    ReliabilityPoint,
    calibration_blocks,
    reliability_diagram,
    wilson_interval,
)


def test_points_on_the_diagonal_lie_on_the_drawn_one():
    points = [ReliabilityPoint(0.25, 0.25, 100), ReliabilityPoint(0.75, 0.75, 100)]
    root = ElementTree.fromstring(reliability_diagram([ReliabilityLine("Users", points, "#000")]))
    diagonal, line = (node.get("d") for node in root.iter("path"))
    (x1, y1), (x2, y2) = (map(float, part.split()) for part in diagonal.removeprefix("M").split(" L"))
    for part in line.removeprefix("M").split(" L"):
        x, y = map(float, part.split())
        assert (y - y1) / (y2 - y1) == pytest.approx((x - x1) / (x2 - x1), abs=0.01)
    assert len(list(root.iter("circle"))) == 2
    assert "accepted 25.0 % of 100" in "".join(root.itertext())


@pytest.mark.parametrize(("num_accepted", "num"), [(0, 5), (5, 5), (3, 10), (999, 1_000)])
def test_intervals_are_wilsons(num_accepted, num):
    expected = binomtest(num_accepted, num).proportion_ci(0.95, "wilson")
    assert wilson_interval(num_accepted / num, num) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_both_sides_share_a_diagram_with_their_errors_beside_it():
    built = night_manifest()["pools_built"]
    figure, table = calibration_blocks(built)
    assert [entry.label for entry in figure.legend] == ["Users", "Items"]
    assert [row[0] for row in table.rows] == ["Users", "Items"]
    for row, side in zip(table.rows, ("user", "item"), strict=True):
        assert row[4] == f"{built[side]['calibration']['reliability']['expected_calibration_error']:.3f}"
        assert row[5] == "0.011"


def test_pools_that_are_not_calibrated_say_so():
    built = {"item": night_manifest()["pools_built"]["item"] | {"calibration": None}}
    (note,) = calibration_blocks(built)
    assert isinstance(note, Note) and "not calibrated" in note.text
    assert calibration_blocks({}) == []


@pytest.mark.parametrize("bad", [None, "x", [], {"reliability": None}, {"reliability": {"bins": [None, {}]}}])
def test_a_calibration_that_lacks_anything_is_no_error(bad):
    built = night_manifest()["pools_built"]
    built["user"]["calibration"] = bad
    assert calibration_blocks(built)
