"""The metrics of predictions: ranking over all rows and within users, likelihood, calibration."""

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata
from sklearn.metrics import log_loss, roc_auc_score

MIN_ROWS_OF_A_SUBSET = 20  # an AUC over fewer rows is not reported


@dataclass(frozen=True)
class Metrics:
    """The metrics of a set of predictions."""

    auc: float
    logloss: float  # mean binary cross-entropy, nats
    gauc: float | None  # mean AUC of users, weighted by their rows; None if no user has both labels
    mean_prediction: float  # equal to `base_rate` if predictions are calibrated
    base_rate: float
    auc_cold: float | None  # AUC of cold users; None if they have too few rows, or rows of only one label


def measure(labels: np.ndarray, scores: np.ndarray, users: np.ndarray, is_cold: np.ndarray) -> Metrics:
    """Judge probabilities `scores` (n,) of rows with `labels` (0 or 1), `users` (numbers) and `is_cold` (bool)."""
    scores = scores.astype(np.float64)
    says_something = is_cold.sum() >= MIN_ROWS_OF_A_SUBSET and len(np.unique(labels[is_cold])) == 2
    return Metrics(
        auc=float(roc_auc_score(labels, scores)),
        logloss=float(log_loss(labels, np.clip(scores, 1e-7, 1 - 1e-7), labels=[0, 1])),
        gauc=gauc(labels, scores, users),
        mean_prediction=float(scores.mean()),
        base_rate=float(labels.mean(dtype=np.float64)),
        auc_cold=float(roc_auc_score(labels[is_cold], scores[is_cold])) if says_something else None,
    )


def gauc(labels: np.ndarray, scores: np.ndarray, users: np.ndarray) -> float | None:
    """The mean AUC of users who have both labels, weighted by number of rows (Zhu et al., KDD 2017); None without any.

    With p positives and q negatives an AUC is (sum of the positives' ranks - p (p + 1) / 2) / (p q); ties share a rank.
    """
    users, levels = (np.unique(of_row, return_inverse=True)[1] for of_row in (users, scores))
    ranks, positive = rankdata(users * (levels.max() + 1) + levels), labels > 0  # over all users, one after another
    rows, positives = np.bincount(users), np.bincount(users, positive)
    negatives, num_before = rows - positives, np.cumsum(rows) - rows
    has_both = (positives > 0) & (negatives > 0)
    if not has_both.any():
        return None
    rank_sums = np.bincount(users, ranks * positive) - positives * num_before
    of_user = (rank_sums - positives * (positives + 1) / 2)[has_both] / (positives * negatives)[has_both]
    return float(np.average(of_user, weights=rows[has_both]))
