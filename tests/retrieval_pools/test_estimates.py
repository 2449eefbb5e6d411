"""Counts of replays and their bootstrap: what is measured, how wide, and paired."""

import numpy as np
import pytest

from laserbatch.retrieval_pools.calibration.estimates import Bootstrap, Estimate, Tally
from laserbatch.retrieval_pools.calibration.replay import Replay


def tally(num_steps, num_accepted, num_drafted=None) -> Tally:
    drafted = num_accepted if num_drafted is None else num_drafted
    return Tally(*(np.array(counts, float) for counts in (num_steps, drafted, num_accepted)))


def test_a_tally_counts_each_replay():
    replays = [Replay([4, 4], [3, 0], [1.0, 1.0]), Replay([2], [2], [1.0])]
    counted = Tally.of(replays)
    assert [counts.tolist() for counts in vars(counted).values()] == [[2, 1], [8, 2], [3, 2]]


def test_what_is_measured_is_of_all_steps_not_a_mean_of_texts():
    bootstrap, counted = Bootstrap(2, seed=0), tally([1, 9], [9, 0])
    assert bootstrap.mean_accepted(counted).value == pytest.approx(0.9)
    assert bootstrap.tokens_per_step(counted).value == pytest.approx(1.9)


def test_an_interval_holds_the_value_and_narrows_with_more_texts():
    rng = np.random.default_rng(0)
    widths = []
    for num_texts in (20, 2000):
        found = Bootstrap(num_texts, 0).mean_accepted(tally(np.full(num_texts, 10), rng.integers(0, 40, num_texts)))
        assert found.low < found.value < found.high
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 5


def test_texts_that_are_all_alike_leave_no_doubt():
    found = Bootstrap(7, 0).tokens_per_step(tally([5] * 7, [16] * 7))
    assert found == Estimate(pytest.approx(4.2), pytest.approx(4.2), pytest.approx(4.2))


def test_a_gain_is_paired_text_by_text():
    rng = np.random.default_rng(1)
    accepted = rng.integers(0, 100, 50)
    base, better = tally(np.full(50, 10), accepted), tally(np.full(50, 10), accepted + 1)
    gain = Bootstrap(50, 0).gain(better, base)
    assert gain.is_above_one and not gain.is_below_one
    apart = Bootstrap(50, 0).tokens_per_step(base)
    assert gain.high - gain.low < (apart.high - apart.low) / 10
    assert Bootstrap(50, 0).gain(base, better).is_below_one
    assert Bootstrap(50, 0).gain(base, base) == Estimate(1.0, 1.0, 1.0)


def test_the_same_seed_draws_the_same():
    counted = tally(range(1, 31), range(30))
    assert Bootstrap(30, 5).tokens_per_step(counted) == Bootstrap(30, 5).tokens_per_step(counted)
    assert Bootstrap(30, 5).tokens_per_step(counted) != Bootstrap(30, 6).tokens_per_step(counted)
