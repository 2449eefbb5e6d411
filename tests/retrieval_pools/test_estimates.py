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


def tokens_per_step(counted: Tally, seed: int = 0) -> Estimate:
    return Estimate.of(Bootstrap(len(counted), seed).sums(counted).tokens_per_step)


def gain(counted: Tally, base: Tally) -> Estimate:
    bootstrap = Bootstrap(len(counted), 0)
    return Estimate.of(bootstrap.sums(counted).tokens_per_step / bootstrap.sums(base).tokens_per_step)


def test_what_is_measured_is_of_all_steps_not_a_mean_of_texts():
    counted = tally([1, 9], [9, 0])
    assert tokens_per_step(counted).value == pytest.approx(1.9)


def test_an_interval_holds_the_value_and_narrows_with_more_texts():
    rng = np.random.default_rng(0)
    widths = []
    for num_texts in (20, 2000):
        found = tokens_per_step(tally(np.full(num_texts, 10), rng.integers(0, 40, num_texts)))
        assert found.low < found.value < found.high
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 5


def test_texts_that_are_all_alike_leave_no_doubt():
    found = tokens_per_step(tally([5] * 7, [16] * 7))
    assert found == Estimate(pytest.approx(4.2), pytest.approx(4.2), pytest.approx(4.2))


def test_a_gain_is_paired_text_by_text():
    accepted = np.random.default_rng(1).integers(0, 100, 50)
    base, better = tally(np.full(50, 10), accepted), tally(np.full(50, 10), accepted + 1)
    found, apart = gain(better, base), tokens_per_step(base)
    assert found.low > 1
    assert found.high - found.low < (apart.high - apart.low) / 10
    assert gain(base, better).high < 1
    assert gain(base, base) == Estimate(1.0, 1.0, 1.0)


def test_the_same_seed_draws_the_same():
    counted = tally(range(1, 31), range(30))
    assert tokens_per_step(counted, 5) == tokens_per_step(counted, 5) != tokens_per_step(counted, 6)
