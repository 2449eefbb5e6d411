"""What is measured of predictions, and a verdict that says equivalent only where the interval allows it."""

import math

import numpy as np
import pytest
from scipy import stats

from laserbatch.ctr.judging import auc, compare_paired, logloss, measure


def test_auc_is_the_chance_that_a_positive_is_scored_above_a_negative_ties_counting_half():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 200), rng.integers(0, 8, 200) / 8
    positives, negatives = scores[labels == 1][:, None], scores[labels == 0][None, :]
    assert math.isclose(auc(labels, scores), ((positives > negatives) + 0.5 * (positives == negatives)).mean())


def test_logloss_is_mean_binary_cross_entropy_and_finite():
    rng = np.random.default_rng(0)
    labels, probabilities = rng.integers(0, 2, 500), rng.uniform(size=500)
    expected = -np.where(labels == 1, np.log(probabilities), np.log1p(-probabilities)).mean()
    assert math.isclose(logloss(labels, probabilities), expected)
    assert math.isclose(logloss(np.array([1, 0]), np.array([0.0, 1.0])), -math.log(1e-7))


def test_cold_auc_needs_enough_rows_of_both_labels():
    labels, scores = np.array([0, 1] * 30), np.linspace(0, 1, 60)
    few, many = np.arange(60) < 10, np.arange(60) < 40
    assert measure(labels, scores, few).auc_cold is None
    assert measure(labels, scores, labels == 1).auc_cold is None
    assert measure(labels, scores, many).auc_cold == auc(labels[:40], scores[:40])


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
