"""What predictions are worth, and whether two kinds of text are as good as each other.

Of two kinds: paired differences over seeds, an interval, and a verdict. The same seed gives both the same row order, so
that what a seed does to both cancels in the difference. An interval that is wider than the margin proves nothing either
way, and the verdict says so.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats
from sklearn.metrics import log_loss, roc_auc_score

MIN_ROWS_OF_A_SUBSET = 20  # an AUC over fewer rows says nothing
EQUIVALENT, WORSE, BETTER, UNDECIDED = "equivalent", "worse", "better", "undecided"


@dataclass(frozen=True)
class Equivalence:
    """How a candidate compares with a reference.

    Attributes
    ----------
    mean_difference : candidate minus reference, mean over pairs.
    low, high : confidence interval of the mean difference (Student's t over pairs); None with fewer than two pairs.
    verdict : "equivalent": the interval lies within the margin; "worse" or "better": beyond it, on that side;
        "undecided": neither; more seeds, or more test rows, would tell.
    """

    num_pairs: int
    mean_difference: float
    low: float | None
    high: float | None
    margin: float
    confidence: float
    verdict: str


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


def compare_paired(
    reference: np.ndarray, candidate: np.ndarray, margin: float = 0.002, confidence: float = 0.95
) -> Equivalence:
    """Compare paired measurements, higher being better.

    Parameters
    ----------
    reference, candidate : (num_pairs,), at least one; the same model and seed at the same place.
    margin : a difference up to here does not matter.
    confidence : of the interval.
    """
    differences = np.asarray(candidate, np.float64) - np.asarray(reference, np.float64)
    mean, verdict = float(differences.mean()), UNDECIDED
    low = high = None
    if len(differences) >= 2:
        standard_error = differences.std(ddof=1) / math.sqrt(len(differences))
        half_width = float(stats.t.ppf((1 + confidence) / 2, len(differences) - 1) * standard_error)
        low, high = mean - half_width, mean + half_width
        if -margin <= low and high <= margin:
            verdict = EQUIVALENT
        elif high < -margin:
            verdict = WORSE
        elif low > margin:
            verdict = BETTER
    return Equivalence(len(differences), mean, low, high, margin, confidence, verdict)
