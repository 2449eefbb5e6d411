"""Beta calibration: the three numbers are the most probable ones, and few estimates hardly move them."""

import numpy as np
import pytest
from scipy.optimize import minimize

from laserbatch.retrieval_pools.calibration.beta_fit import AS_IT_IS, PRIOR_PRECISION, BetaCurve
from laserbatch.retrieval_pools.calibration.curve_fit import IDENTITY


def planted(num_nodes: int, curve: BetaCurve, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Estimates, and whether each was accepted, as often as a curve says."""
    rng = np.random.default_rng(seed)
    estimates = rng.random(num_nodes) ** 2
    return estimates, rng.random(num_nodes) < curve.at(estimates)


def most_probable(estimates: np.ndarray, is_accepted: np.ndarray, counts_for: np.ndarray) -> np.ndarray:
    """The three numbers, slowly."""

    def surprise(numbers):
        share = BetaCurve(*numbers).at(estimates)
        of_nodes = np.where(is_accepted, np.log(share), np.log1p(-share))
        return (PRIOR_PRECISION / 2 * (numbers - AS_IT_IS) ** 2).sum() - (counts_for * of_nodes).sum()

    return minimize(surprise, AS_IT_IS, method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-9, "maxiter": 4000}).x


@pytest.mark.parametrize("curve", [BetaCurve(0.0, 1.0, 1.0), BetaCurve(0.7, 0.8, 1.6), BetaCurve(-1.0, 1.5, 0.5)])
def test_the_numbers_are_the_most_probable_ones(curve):
    estimates, is_accepted = planted(4_000, curve)
    counts_for = np.random.default_rng(1).choice([0.1, 1.0], len(estimates))
    found = BetaCurve.of(estimates, is_accepted, counts_for)
    expected = most_probable(estimates, is_accepted, counts_for)
    assert (found.offset, found.low, found.high) == pytest.approx(tuple(expected), abs=1e-4)


def test_many_estimates_show_what_they_are_worth():
    curve = BetaCurve(0.7, 0.8, 1.6)
    found = BetaCurve.of(*planted(100_000, curve), np.ones(100_000))
    assert np.abs(found.at(IDENTITY) - curve.at(IDENTITY)).max() < 0.02


def test_without_estimates_they_are_believed():
    nothing = np.empty(0)
    assert np.allclose(BetaCurve.of(nothing, nothing.astype(bool), nothing).at(IDENTITY[:-1]), IDENTITY[:-1])


@pytest.mark.parametrize("is_accepted", [True, False])
def test_numbers_stay_finite_where_all_came_out_alike(is_accepted):
    estimates = np.array([0.0, 1e-6, 0.3, 0.999999, 1.0] * 2_000)
    found = BetaCurve.of(estimates, np.full(len(estimates), is_accepted), np.ones(len(estimates)))
    assert np.isfinite([found.offset, found.low, found.high]).all()
    assert abs(found.at(np.array([0.3]))[0] - is_accepted) < 0.1
