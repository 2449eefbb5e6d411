"""What is measured of predictions, and of which rows."""

import math

import numpy as np

from laserbatch.ctr.metrics import auc, logloss, measure


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
