"""Are two kinds of text as good as each other? Paired differences over seeds, an interval, and a verdict.

The same seed gives both variants the same row order, so that what a seed does to both cancels in the difference. An
interval that is wider than the margin proves nothing either way, and the verdict says so.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

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
