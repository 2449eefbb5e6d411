"""What is measured of predictions, and a verdict that says equivalent only where the interval allows it."""

import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from laserbatch.ctr.compare import compare_paired
from laserbatch.ctr.metrics import gauc, measure


def test_auc_logloss_and_calibration_are_those_of_the_field():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 200), (rng.integers(0, 8, 200) + 0.5) / 8
    judged = measure(labels, scores, labels, labels == 2)
    positives, negatives = scores[labels == 1][:, None], scores[labels == 0][None, :]
    assert math.isclose(judged.auc, ((positives > negatives) + 0.5 * (positives == negatives)).mean())
    assert math.isclose(judged.logloss, -np.where(labels == 1, np.log(scores), np.log1p(-scores)).mean())
    assert (judged.mean_prediction, judged.base_rate) == (pytest.approx(scores.mean()), labels.mean())
    of_two = measure(np.array([1, 0]), np.array([0.0, 1.0]), np.zeros(2), np.zeros(2, bool))
    assert math.isclose(of_two.logloss, -math.log(1e-7))


def test_gauc_is_the_mean_of_users_aucs_by_rows_and_leaves_out_who_has_one_label():
    rng = np.random.default_rng(0)
    labels, scores, users = rng.integers(0, 2, 300), rng.integers(0, 6, 300) / 6, rng.integers(0, 20, 300)
    labels[users == 3] = 1
    among = [users == user for user in range(20) if user != 3]
    expected = np.average([roc_auc_score(labels[of], scores[of]) for of in among], weights=[of.sum() for of in among])
    assert gauc(labels, scores, users) == pytest.approx(expected)
    assert gauc(np.ones(3), np.arange(3.0), np.zeros(3)) is None


def test_cold_auc_needs_enough_rows_of_both_labels():
    labels, scores, users = np.array([0, 1] * 30), np.linspace(0, 1, 60), np.zeros(60)
    few, many = np.arange(60) < 10, np.arange(60) < 40
    assert measure(labels, scores, users, few).auc_cold is None
    assert measure(labels, scores, users, labels == 1).auc_cold is None
    assert measure(labels, scores, users, many).auc_cold == roc_auc_score(labels[:40], scores[:40])


def test_interval_is_students_over_paired_differences():
    plain, relaxed = np.array([0.70, 0.72, 0.71]), np.array([0.701, 0.7215, 0.7102])
    result = compare_paired(relaxed - plain)
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
    result = compare_paired(np.array(differences))
    assert result.verdict == verdict
    assert (result.low is None) == (result.high is None) == (len(differences) == 1)


def test_the_margin_is_the_callers():
    differences = np.array([1e-5, 0, -1e-5]) - 0.004
    assert compare_paired(differences).verdict == "worse"
    assert compare_paired(differences, margin=0.01).verdict == "equivalent"
