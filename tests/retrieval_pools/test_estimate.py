"""Curves of acceptance and kinds of tokens: compiled code against the slow reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from slow_drafts import acceptance, node_kind, token_kind

from laserbatch.retrieval_pools.drafting import estimate
from laserbatch.retrieval_pools.drafting.estimate import (
    COUNT_KNOTS,
    CURVES_SHAPE,
    IDENTITY_CURVES,
    NUM_KINDS,
    NUM_KNOTS,
    NUM_PLACES,
    NUM_TOKEN_KINDS,
    token_frequencies,
    upper_bounds,
)


@njit
def compiled(curve, relative_count):
    return estimate.acceptance(curve, relative_count)


@njit
def compiled_bound(bounds, relative_count):
    return estimate.most_acceptance(bounds, relative_count)


@given(relative_count=st.floats(0, 1.001) | st.sampled_from(COUNT_KNOTS.tolist()), seed=st.integers(0, 3))
def test_compiled_look_up_is_the_plain_one(relative_count, seed):
    curve = np.sort(np.random.default_rng(seed).random(NUM_KNOTS, np.float32))
    assert compiled(curve, relative_count) == pytest.approx(acceptance(curve, relative_count), rel=1e-9, abs=1e-12)


@given(relative_count=st.floats(1e-6, 1))
def test_identity_believes_relative_counts(relative_count):
    assert acceptance(IDENTITY_CURVES[4, 7], relative_count) == pytest.approx(relative_count, rel=1e-6)


@given(relative_count=st.floats(0, 1.001), seed=st.integers(0, 3))
def test_no_curve_gives_more_than_the_bound(relative_count, seed):
    curves = np.sort(np.random.default_rng(seed).random(CURVES_SHAPE, np.float32))
    bound = compiled_bound(upper_bounds(curves), relative_count)
    assert max(acceptance(curve, relative_count) for curve in curves.reshape(-1, NUM_KNOTS)[::9]) <= bound
    assert compiled_bound(COUNT_KNOTS, relative_count) <= max(1.5 * relative_count, COUNT_KNOTS[0])


def test_kinds_are_told_by_where_a_token_stands_and_how_frequent_it_is():
    least = (1, 4, 16, 64, 128, 256, 512, 1024)  # of 65,536 positions
    frequent = [token_kind(0, num_occurrences, 1 << 16) for num_occurrences in (0, *least, 1 << 16)]
    assert frequent == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert [token_kind(0, count - 1, 1 << 16) for count in least] == frequent[:8]
    kinds = {token_kind(stands_in, num, 1 << 16) for stands_in in range(4) for num in (0, *least)}
    assert kinds == set(range(NUM_TOKEN_KINDS))
    places = {node_kind(0, num_seen, depth) for num_seen in (1, 3, 20, 40) for depth in (0, 1, 2, 5, 20)}
    assert places == set(range(NUM_PLACES)) and NUM_KINDS == NUM_TOKEN_KINDS * NUM_PLACES
    assert token_kind(0, 0, 0) == 0  # without a pool


@given(numbers=st.lists(st.integers(0, 1 << 20), max_size=20), num_positions=st.integers(0, 1 << 30))
def test_frequencies_of_many_tokens_are_those_of_each(numbers, num_positions):
    frequencies = token_frequencies(np.array(numbers, np.int32), num_positions)
    assert frequencies.tolist() == [token_kind(0, number, num_positions) for number in numbers]
