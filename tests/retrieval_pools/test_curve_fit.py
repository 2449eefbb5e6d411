"""Fitting curves: factors of odds are the most probable ones, curves are read and raised as said, and never fall."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from sklearn.isotonic import isotonic_regression

from laserbatch.retrieval_pools.calibration.curve_fit import (
    IDENTITY,
    LEAST_ACCEPTANCE,
    MOST_ACCEPTANCE,
    log_factors,
    nondecreasing,
    on_curves,
    raised,
)
from laserbatch.retrieval_pools.drafting.calibration_table import COUNT_KNOTS, kind_acceptance


@pytest.mark.parametrize("num_knots", [1, 2, 7, 21])
def test_what_never_falls_is_as_an_isotonic_regression_has_it(num_knots):
    rng = np.random.default_rng(num_knots)
    values, weights = rng.random((200, num_knots)), rng.random((200, num_knots)) + 1e-3
    values[:20] = np.sort(values[:20], axis=1)
    expected = [isotonic_regression(v, sample_weight=w) for v, w in zip(values, weights, strict=True)]
    assert np.allclose(nondecreasing(values, weights), expected, atol=1e-12)


def most_probable(estimates, is_accepted, counts_for, centre: float, prior_precision: float) -> float:
    """The logarithm of one cell's factor, slowly."""

    def surprise(log_factor):
        expected = raised(estimates, np.array(log_factor))
        of_nodes = np.where(is_accepted, np.log(expected), np.log1p(-expected))
        return prior_precision / 2 * (log_factor - centre) ** 2 - (counts_for * of_nodes).sum()

    return minimize_scalar(surprise, bounds=(centre - 12, centre + 12), method="bounded", options={"xatol": 1e-9}).x


@pytest.mark.parametrize("prior_precision", [0.5, 5.0, 50.0])
def test_factors_are_the_most_probable_ones(prior_precision):
    rng = np.random.default_rng(7)
    cell = rng.integers(0, 6, 3_000)
    cell = np.where(cell == 5, 0, cell)  # the last has no nodes
    estimates = rng.uniform(LEAST_ACCEPTANCE, MOST_ACCEPTANCE, len(cell))
    share = raised(estimates[:, None], np.array([-2.0, -0.5, 0.0, 0.7, 3.0, 0.0])[cell])[:, 0]
    is_accepted = rng.random(len(cell)) < share
    counts_for, centres = rng.choice([0.1, 1.0], len(cell)), np.linspace(-0.5, 0.5, 6)
    found = log_factors(estimates, is_accepted, counts_for, cell, centres, prior_precision)
    assert found[5] == centres[5]
    for one in range(5):
        of_cell = cell == one
        expected = most_probable(
            estimates[of_cell], is_accepted[of_cell], counts_for[of_cell], centres[one], prior_precision
        )
        assert found[one] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("estimate", "is_accepted"), [(LEAST_ACCEPTANCE, True), (MOST_ACCEPTANCE, False)])
def test_a_factor_does_not_overshoot_where_what_seemed_impossible_happened(estimate, is_accepted):
    estimates, accepted, ones = np.full(40, estimate), np.full(40, is_accepted), np.ones(40)
    found = log_factors(estimates, accepted, ones, np.zeros(40, np.int64), np.zeros(1), 5.0)[0]
    assert found == pytest.approx(most_probable(estimates, accepted, ones, 0.0, 5.0), abs=1e-3)


def test_raising_multiplies_odds():
    curves = np.array([[0.2, 0.5, 0.9], [0.2, 0.5, 0.9]])
    changed = raised(curves, np.log([1.0, 3.0]))
    assert np.allclose(changed[0], curves[0])
    assert np.allclose(changed[1] / (1 - changed[1]), 3 * curves[1] / (1 - curves[1]))


def test_a_curve_is_read_as_a_draft_reads_it():
    rng = np.random.default_rng(3)
    x = np.concatenate([COUNT_KNOTS, rng.random(500), rng.random(100) * 2 * float(COUNT_KNOTS[0]), [1.0]])
    curves = np.sort(rng.random((len(x), len(IDENTITY))).astype(np.float32), axis=1)
    expected = [kind_acceptance(curve, one) for curve, one in zip(curves, x, strict=True)]
    assert np.allclose(on_curves(curves.astype(np.float64), np.arange(len(x)), x), expected, rtol=1e-6)
