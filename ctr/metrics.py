"""How predictions are judged: by ranking over all rows and within users, by likelihood, by calibration."""

from dataclasses import dataclass

import numpy as np
from sklearn.metrics import log_loss, roc_auc_score

MIN_ROWS_OF_A_SUBSET = 20  # an AUC over fewer rows says nothing


@dataclass(frozen=True)
class Metrics:
    """One set of predictions against its labels."""

    auc: float
    logloss: float  # mean binary cross-entropy, nats
    gauc: float | None  # mean AUC of users, weighted by their rows; None where no user has both labels
    mean_prediction: float  # calibrated predictions have the mean of the labels
    base_rate: float
    auc_cold: float | None  # of cold users; None when there are too few of them, or they lack a label


def measure(labels: np.ndarray, scores: np.ndarray, users: np.ndarray, is_cold: np.ndarray) -> Metrics:
    """Judge probabilities `scores` (n,) of rows with `labels` 0/1, of `users` (numbers); `is_cold` bool (n,)."""
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
    """AUC within each user who has both labels, weighted by number of rows (Zhu et al., KDD 2017); None without any.

    By ranks: a user's AUC is (the sum of his positives' ranks - p (p + 1) / 2) / (p q); ties share their mean rank.
    """
    _, users = np.unique(users, return_inverse=True)
    order = np.lexsort((scores, users))
    users, scores, positive = users[order], scores[order], labels[order] > 0
    first_of_user = np.searchsorted(users, users)
    is_new = np.r_[True, (users[1:] != users[:-1]) | (scores[1:] != scores[:-1])]  # starts of runs of equal scores
    starts = np.flatnonzero(is_new)
    ends = np.r_[starts[1:], len(users)]
    ranks = ((starts + ends + 1) / 2)[np.cumsum(is_new) - 1] - first_of_user
    rows, positives = np.bincount(users), np.bincount(users, positive)
    negatives = rows - positives
    has_both = (positives > 0) & (negatives > 0)
    if not has_both.any():
        return None
    rank_sums = np.bincount(users, ranks * positive)
    of_user = (rank_sums - positives * (positives + 1) / 2)[has_both] / (positives * negatives)[has_both]
    return float(np.average(of_user, weights=rows[has_both]))
