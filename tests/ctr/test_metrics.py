"""Our AUC, LogLoss and gAUC against scikit-learn's."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from laserbatch.ctr.metrics import auc, gauc, logloss, measure


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 8)), min_size=2, max_size=60))
def test_auc_equals_scikit_learn_with_ties(pairs):
    labels, scores = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs]) / 8
    if labels.min() == labels.max():
        assert math.isnan(auc(labels, scores))
    else:
        assert abs(auc(labels, scores) - roc_auc_score(labels, scores)) < 1e-12


def test_logloss_equals_scikit_learn():
    rng = np.random.default_rng(0)
    labels, probabilities = rng.integers(0, 2, 500), rng.uniform(size=500)
    assert abs(logloss(labels, probabilities) - log_loss(labels, probabilities)) < 1e-9
    assert math.isfinite(logloss(np.array([1, 0]), np.array([0.0, 1.0])))


def test_gauc_is_the_row_weighted_mean_of_users_aucs():
    rng = np.random.default_rng(0)
    labels, scores, users = rng.integers(0, 2, 400), rng.uniform(size=400), rng.integers(0, 30, 400)
    total, weight = 0.0, 0
    for user in range(30):
        own = users == user
        if own.any() and 0 < labels[own].mean() < 1:
            total, weight = total + own.sum() * roc_auc_score(labels[own], scores[own]), weight + own.sum()
    assert abs(gauc(labels, scores, users) - total / weight) < 1e-12


def test_cold_auc_needs_enough_rows():
    labels, scores = np.array([0, 1] * 30), np.linspace(0, 1, 60)
    few, many = np.arange(60) < 10, np.arange(60) < 40
    assert math.isnan(measure(labels, scores, np.zeros(60, int), few).auc_cold)
    assert measure(labels, scores, np.zeros(60, int), many).auc_cold == auc(labels[:40], scores[:40])
