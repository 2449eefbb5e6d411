"""How far off estimates seem when they are right, and when they are not."""

import numpy as np
import pytest

from laserbatch.retrieval_pools.calibration.calibrate import error_by_chance, reliability_bins

NUM_NODES = 60


def drawn(num_texts, seed, shift=0.0, together=False):
    """Estimates, and outcomes of which `shift` more are accepted; `together`: one draw decides for a whole text."""
    rng = np.random.default_rng(seed)
    estimates = [rng.uniform(0.2, 0.8, NUM_NODES) for _ in range(num_texts)]
    draws = [np.full(NUM_NODES, rng.random()) if together else rng.random(NUM_NODES) for _ in range(num_texts)]
    return estimates, [draw < one + shift for draw, one in zip(draws, estimates, strict=True)]


def shown_error(estimates, is_accepted):
    bins = reliability_bins(np.concatenate(estimates), np.concatenate(is_accepted))
    num_nodes = sum(one.num_nodes for one in bins)
    return sum(abs(one.mean_estimate - one.share_accepted) * one.num_nodes for one in bins) / num_nodes


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("num_texts", [6, 40, 200])
def test_right_estimates_show_the_error_of_chance_on_average(num_texts, together):
    cases = [drawn(num_texts, seed, together=together) for seed in range(60)]
    shown = np.mean([shown_error(*case) for case in cases])
    assert np.mean([error_by_chance(*case) for case in cases]) == pytest.approx(shown, rel=0.15)


def test_wrong_estimates_show_more_than_chance():
    cases = [drawn(40, seed, shift=0.1) for seed in range(10)]
    assert all(shown_error(*case) > 2 * error_by_chance(*case) for case in cases)


def test_one_text_tells_nothing_of_chance_and_texts_without_drafts_have_none():
    assert error_by_chance(*drawn(1, 0)) is None
    nothing = np.empty(0)
    assert error_by_chance([nothing, nothing], [nothing.astype(bool)] * 2) == 0.0
