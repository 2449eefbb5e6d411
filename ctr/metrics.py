"""AUC, LogLoss, gAUC. Plain numpy; each readable against its definition."""

import math
from dataclasses import dataclass

import numpy as np

MIN_ROWS_OF_A_SUBSET = 20  # an AUC over fewer rows says nothing


@dataclass(frozen=True)
class Metrics:
    """How well scores order and predict labels.

    Attributes
    ----------
    auc : area under the ROC curve.
    logloss : mean binary cross-entropy, nats.
    gauc : AUC within each user, weighted by the user's rows; nan when no user has both labels.
    auc_cold : AUC over the rows of cold users; nan when there are too few of them.
    """

    auc: float
    logloss: float
    gauc: float
    auc_cold: float


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Probability that a positive is scored above a negative, ties counting half (Mann-Whitney U).

    Parameters
    ----------
    labels : (n,) of 0 and 1.
    scores : (n,) of any monotone score.

    Returns
    -------
    nan when a label is missing.
    """
    num_positive = int((labels == 1).sum())
    num_negative = len(labels) - num_positive
    if num_positive == 0 or num_negative == 0:
        return math.nan
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2  # of each distinct score; ranks from 1
    rank_sum = mean_rank[inverse][labels == 1].sum()
    return float((rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def logloss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Mean binary cross-entropy, in nats; probabilities are kept 1e-7 away from 0 and 1."""
    clipped = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-np.where(labels == 1, np.log(clipped), np.log1p(-clipped)).mean())


def gauc(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> float:
    """AUC within each group, weighted by its rows; groups of one label are left out (Zhou et al. 2018, Section 6.2)."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=groups[order][:1] - 1)) if len(groups) else []
    total, weight = 0.0, 0
    for rows in np.split(order, starts[1:] if len(starts) else []):
        value = auc(labels[rows], scores[rows])
        if not math.isnan(value):
            total += value * len(rows)
            weight += len(rows)
    return total / weight if weight else math.nan


def measure(labels: np.ndarray, probabilities: np.ndarray, users: np.ndarray, is_cold: np.ndarray) -> Metrics:
    """All metrics of one set of predictions.

    Parameters
    ----------
    labels, probabilities : (n,).
    users : (n,) integer group of each row.
    is_cold : bool (n,), rows of cold users.
    """
    cold_auc = auc(labels[is_cold], probabilities[is_cold]) if is_cold.sum() >= MIN_ROWS_OF_A_SUBSET else math.nan
    return Metrics(
        auc(labels, probabilities), logloss(labels, probabilities), gauc(labels, probabilities, users), cold_auc
    )
