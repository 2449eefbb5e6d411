"""Metrics of predictions, and a verdict of equivalence only if the interval allows it."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from laserbatch.ctr.equivalence import auc_influence, compare_paired, pair
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


def trainings(num_seeds=3, num_users=200, rows_each=10, seed=0, shift=0.0, noise=0.3):
    """Labels, users, and scores (num_seeds, n) of candidate and reference, with a shared part and noise of each."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(num_users), rows_each)
    taste = rng.normal(size=len(users)) + 0.5 * rng.normal(size=num_users)[users]
    labels = (rng.random(len(users)) < 1 / (1 + np.exp(-taste))).astype(np.float32)
    shared = taste + rng.normal(size=(num_seeds, len(users)))
    candidate, reference = (shared + noise * rng.normal(size=shared.shape) for _ in range(2))
    return labels, users, candidate - shift * (labels * 2 - 1), reference


def test_influence_gives_the_auc_of_resampled_users():
    labels, users, candidate, _ = trainings(num_seeds=1)
    auc, influence = auc_influence(labels, candidate[0])
    assert auc == pytest.approx(roc_auc_score(labels, candidate[0])) and abs(influence.sum()) < 1e-12
    of_users, rng, exact, linear = np.bincount(users, weights=influence), np.random.default_rng(1), [], []
    for _ in range(60):
        weights = np.bincount(rng.integers(200, size=200), minlength=200)
        exact.append(roc_auc_score(labels, candidate[0], sample_weight=weights[users]))
        linear.append(auc + (weights - 1) @ of_users)
    assert np.corrcoef(exact, linear)[0, 1] > 0.995
    assert np.std(exact) == pytest.approx(math.sqrt((of_users**2).sum()), rel=0.25)


def test_intervals_cover_the_truth_as_often_as_they_say():
    """In worlds without a difference, each with new users and seeds, the interval must contain 0."""
    num_covered = 0
    for seed in range(100):
        labels, users, candidate, reference = trainings(num_seeds=4, num_users=60, rows_each=6, seed=seed, noise=0.5)
        verdict = compare_paired({"DIN": pair(labels, users, candidate, reference)}, len(labels))["all"]
        num_covered += verdict.low <= 0 <= verdict.high
    assert 90 <= num_covered <= 99


def test_the_more_exact_model_counts_more():
    labels, users, candidate, reference = trainings()
    blurred = candidate + 3 * np.random.default_rng(2).normal(size=candidate.shape)
    pairs = {
        "exact": pair(labels, users, candidate, reference),
        "blurred": pair(labels, users, blurred, reference),
    }
    verdicts = compare_paired(pairs, len(labels))
    middle = (verdicts["exact"].mean_difference + verdicts["blurred"].mean_difference) / 2
    assert abs(verdicts["all"].mean_difference - verdicts["exact"].mean_difference) < abs(
        verdicts["all"].mean_difference - middle
    )


@pytest.mark.parametrize(
    ("options", "margin", "verdict"),
    [
        ({"noise": 0.02}, 0.005, "equivalent"),
        ({"noise": 0.02, "shift": 0.3}, 0.005, "worse"),
        ({"noise": 0.02, "shift": -0.3}, 0.005, "better"),
        ({"noise": 1.0}, 0.001, "undecided"),
        ({"noise": 0.0}, 0.001, "equivalent"),
        ({"num_seeds": 1}, 0.1, "undecided"),
    ],
)
def test_verdicts(options, margin, verdict):
    labels, users, candidate, reference = trainings(**options)
    result = compare_paired({"DIN": pair(labels, users, candidate, reference)}, len(labels), margin)["all"]
    assert result.verdict == verdict
    assert (result.low is None) == (result.high is None) == (options.get("num_seeds") == 1)


def test_a_handful_of_rows_whose_seeds_agree_by_chance_has_no_verdict():
    """Both seeds differ by 0.25, and the effects of users cancel out, so the estimated variance is zero."""
    labels, users = np.tile([1, 1, 0, 0], 2), np.repeat([0, 1], 4)
    reference = np.tile([4, 2, 3, 1], (2, 2))
    candidate = np.tile([4, 3, 2, 1], (2, 2))
    (result,) = {*compare_paired({"DIN": pair(labels, users, candidate, reference)}, len(labels)).values()}
    assert (result.mean_difference, result.verdict, result.high) == (0.25, "undecided", None)


def test_advice_says_what_would_have_been_enough():
    """With the advised number of rows, the power is close to the wanted one; with fewer it is not."""
    labels, users, candidate, reference = trainings(noise=0.6)
    verdict = compare_paired({"DIN": pair(labels, users, candidate, reference)}, len(labels), 0.01)["all"]
    assert verdict.power < 0.8 and verdict.rows_needed > len(labels)
    num_users = 200 * verdict.rows_needed // len(labels)
    labels, users, candidate, reference = trainings(noise=0.6, num_users=num_users, seed=1)
    assert compare_paired({"DIN": pair(labels, users, candidate, reference)}, len(labels), 0.01)["all"].power > 0.6
    assert compare_paired({}, 0) == {}
