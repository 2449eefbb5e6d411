"""AUC and LogLoss of a set of predictions, by scikit-learn."""

from dataclasses import dataclass

import numpy as np
from sklearn.metrics import log_loss, roc_auc_score

MIN_ROWS_OF_A_SUBSET = 20  # an AUC over fewer rows says nothing


@dataclass(frozen=True)
class Metrics:
    """How well scores order and predict labels.

    Attributes
    ----------
    auc : area under the ROC curve.
    logloss : mean binary cross-entropy, nats.
    auc_cold : AUC over the rows of cold users; None when there are too few of them, or they lack a label.
    """

    auc: float
    logloss: float
    auc_cold: float | None


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve; labels are 0 and 1, and both are there."""
    return float(roc_auc_score(labels, scores))


def logloss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Mean binary cross-entropy, in nats; probabilities are kept 1e-7 away from 0 and 1."""
    return float(log_loss(labels, np.clip(probabilities, 1e-7, 1 - 1e-7), labels=[0, 1]))


def measure(labels: np.ndarray, probabilities: np.ndarray, is_cold: np.ndarray) -> Metrics:
    """All metrics of one set of predictions; `is_cold` bool (n,), rows of cold users."""
    says_something = is_cold.sum() >= MIN_ROWS_OF_A_SUBSET and len(np.unique(labels[is_cold])) == 2
    cold_auc = auc(labels[is_cold], probabilities[is_cold]) if says_something else None
    return Metrics(auc(labels, probabilities), logloss(labels, probabilities), cold_auc)
