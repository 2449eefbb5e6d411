"""Beta calibration: three numbers that make estimates right on the whole, which takes less data than a curve.

Knows neither what is estimated nor what leans on it.
"""

from dataclasses import dataclass

import numpy as np

LEAST = 1e-5  # nearest that an estimate counts as to 0 and to 1
NUM_NEWTON_STEPS = 25
LONGEST_STEP = 1.0  # of each number: beyond, Newton's method may overshoot
# How surely estimates are thought to be right before any node was seen: the inverse variance of each number. `low` is
# the surest: a few unlikely nodes that were accepted all the same would else raise whatever is less likely still.
PRIOR_PRECISION = np.array([20.0, 100.0, 5.0])
AS_IT_IS = (0.0, 1.0, 1.0)


@dataclass(frozen=True)
class BetaCurve:
    """What estimates are worth: the log odds of acceptance are offset + low * log(x) - high * log(1 - x).

    Kull, Silva Filho and Flach 2017, section 4. Where `low` and `high` are one number it is Platt's scaling.
    """

    offset: float
    low: float
    high: float

    @classmethod
    def of(cls, estimates: np.ndarray, is_accepted: np.ndarray, counts_for: np.ndarray) -> "BetaCurve":
        """The most probable curve, by Newton's method; without estimates they are believed as they are.

        Parameters
        ----------
        estimates : float64[n] in 0 to 1.
        is_accepted : bool[n].
        counts_for : float64[n], how much each counts.
        """
        features = _features(estimates)
        numbers = np.array(AS_IT_IS)
        for _ in range(NUM_NEWTON_STEPS):
            expected = _share(features @ numbers)
            slope = features.T @ (counts_for * (is_accepted - expected)) - PRIOR_PRECISION * (numbers - AS_IT_IS)
            weights = counts_for * expected * (1 - expected)
            curvature = (features * weights[:, None]).T @ features + np.diag(PRIOR_PRECISION)
            step = np.linalg.solve(curvature, slope)
            numbers = numbers + step / max(1.0, np.abs(step).max() / LONGEST_STEP)
        return cls(*numbers.tolist())

    def at(self, estimates: np.ndarray) -> np.ndarray:
        """Acceptance at estimates, float64[n]; nothing makes it rise where `low` or `high` is below 0."""
        return _share(_features(estimates) @ (self.offset, self.low, self.high))


def _features(estimates: np.ndarray) -> np.ndarray:
    inside = np.clip(estimates, LEAST, 1 - LEAST)
    return np.stack([np.ones_like(inside), np.log(inside), -np.log1p(-inside)], axis=-1)  # (n, 3)


def _share(log_odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-log_odds))
