"""The verdict on texts that are equal, by simulation."""

import pytest
from verdicts import simulated


@pytest.mark.parametrize("with_users", [True, False])
def test_intervals_cover_the_truth_and_five_seeds_are_enough(with_users):
    outcome = simulated(5, with_users, 150)
    assert 0.9 <= outcome["coverage"] <= 0.99
    assert outcome["equal_called_equivalent"] >= 0.8 or not with_users
