"""The verdict says equivalent only where the interval allows it, and undecided where it says nothing."""

import numpy as np
import pytest
from scipy import stats

from laserbatch.ctr.equivalence import compare_paired


def test_interval_is_students_over_paired_differences():
    plain, relaxed = np.array([0.70, 0.72, 0.71]), np.array([0.701, 0.7215, 0.7102])
    result = compare_paired(plain, relaxed)
    low, high = stats.t.interval(0.95, 2, loc=(relaxed - plain).mean(), scale=stats.sem(relaxed - plain))
    assert (result.low, result.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.0001, -0.0002, 0.0003], "equivalent"),
        ([-0.0100, -0.0101, -0.0099], "worse"),
        ([0.0100, 0.0101, 0.0099], "better"),
        ([0.0100, -0.0101, 0.0050], "undecided"),
        ([0.0001], "undecided"),
        ([0.0, 0.0, 0.0], "equivalent"),
    ],
)
def test_verdicts(differences, verdict):
    plain = np.full(len(differences), 0.7)
    result = compare_paired(plain, plain + differences)
    assert result.verdict == verdict
    assert (result.low is None) == (result.high is None) == (len(differences) == 1)


def test_the_margin_is_the_callers():
    plain = np.array([0.70, 0.71, 0.72])
    assert compare_paired(plain, plain - 0.004 + np.array([1e-5, 0, -1e-5])).verdict == "worse"
    assert compare_paired(plain, plain - 0.004 + np.array([1e-5, 0, -1e-5]), margin=0.01).verdict == "equivalent"
