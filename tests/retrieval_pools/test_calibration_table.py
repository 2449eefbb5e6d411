"""The table of acceptance, curves of kinds of tokens and of paths: axes, and compiled look-ups against plain ones."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from laserbatch.retrieval_pools.drafting import calibration_table, estimate
from laserbatch.retrieval_pools.drafting.calibration_table import (
    COUNT_KNOTS,
    DEPTH_EDGES,
    IDENTITY_KINDS,
    IDENTITY_PATHS,
    IDENTITY_TABLE,
    KINDS_SHAPE,
    LENGTH_EDGES,
    NUM_BEFORE,
    NUM_KINDS,
    NUM_KNOTS,
    SEEN_EDGES,
    TABLE_SHAPE,
    conditional_acceptance,
    depth_bin,
    kind_acceptance,
    least_product,
    length_bin,
    path_acceptance,
    seen_bin,
    token_frequencies,
    token_kind,
)
from laserbatch.retrieval_pools.sources import NUM_SOURCES


@njit
def compiled(table, source, num_seen, match_length, depth, relative_count):
    return estimate.conditional_acceptance(table, source, num_seen, match_length, depth, relative_count)


@given(
    source=st.integers(0, NUM_SOURCES - 1),
    num_seen=st.integers(1, 2_000),
    match_length=st.integers(1, 200),
    depth=st.integers(1, 64),
    relative_count=st.floats(0, 1.001) | st.sampled_from(COUNT_KNOTS.tolist()),
    seed=st.integers(0, 3),
)
def test_compiled_look_up_is_the_plain_one(source, num_seen, match_length, depth, relative_count, seed):
    table = np.sort(np.random.default_rng(seed).random(TABLE_SHAPE, np.float32))
    expected = conditional_acceptance(table, source, num_seen, match_length, depth, relative_count)
    assert compiled(table, source, num_seen, match_length, depth, relative_count) == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


@given(relative_count=st.floats(1e-6, 1))
def test_identity_believes_relative_counts(relative_count):
    assert conditional_acceptance(IDENTITY_TABLE, 4, 9, 3, 2, relative_count) == pytest.approx(relative_count, rel=1e-6)


def test_bins_begin_at_their_edges():
    assert [seen_bin(edge) for edge in SEEN_EDGES] == list(range(len(SEEN_EDGES)))
    assert [length_bin(edge) for edge in LENGTH_EDGES] == list(range(len(LENGTH_EDGES)))
    assert [depth_bin(edge) for edge in DEPTH_EDGES] == list(range(len(DEPTH_EDGES)))
    assert length_bin(LENGTH_EDGES[3] - 1) == 2
    assert seen_bin(1_000_000) == len(SEEN_EDGES) - 1
    assert length_bin(10_000) == len(LENGTH_EDGES) - 1
    assert calibration_table.identity_table().shape == TABLE_SHAPE


@given(relative_count=st.floats(0, 1.001), seed=st.integers(0, 3))
def test_no_cell_gives_more_than_the_bound(relative_count, seed):
    table = np.sort(np.random.default_rng(seed).random(TABLE_SHAPE, np.float32))
    kind_curves = np.sort(np.random.default_rng(seed + 9).random(KINDS_SHAPE, np.float32))
    bound = compiled_bound(calibration_table.upper_bounds(table, kind_curves), relative_count)
    given = [
        kind_acceptance(kind_curve, conditional_acceptance(table, source, num_seen, length, 1, relative_count))
        for kind_curve in kind_curves.reshape(-1, NUM_KNOTS)[::9]
        for source in range(5)
        for num_seen in (1, 70)
        for length in (1, 9)
    ]
    assert max(given) <= bound * (1 + 1e-6)
    assert compiled_bound(COUNT_KNOTS, relative_count) <= max(1.5 * relative_count, COUNT_KNOTS[0])


def test_kinds_are_told_by_where_a_token_stands_and_how_frequent_it_is():
    least = (1, 4, 16, 64, 128, 256, 512, 1024)  # of 65,536 positions
    frequent = [token_kind(0, num_occurrences, 0, 1 << 16) for num_occurrences in (0, *least, 1 << 16)]
    assert [kind // NUM_BEFORE for kind in frequent] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert [token_kind(0, one - 1, 0, 1 << 16) for one in least] == frequent[:8]
    least_before = (16, 64, 256, 512, 1024)
    before = [token_kind(0, 0, num_before, 1 << 16) for num_before in (0, *least_before, 1 << 16)]
    assert before == [0, 1, 2, 3, 4, 5, 5]
    assert [token_kind(0, 0, one - 1, 1 << 16) for one in least_before] == [0, 1, 2, 3, 4]
    kinds = {
        token_kind(stands_in, num, num_before, 1 << 16)
        for stands_in in range(4)
        for num in (0, *least)
        for num_before in (0, *least_before)
    }
    assert kinds == set(range(NUM_KINDS))
    assert token_kind(0, 0, 0, 0) == 0  # no pool
    assert kind_acceptance(IDENTITY_KINDS[4, 7], 0.3) == pytest.approx(0.3)


@njit
def compiled_bound(bounds, relative_count):
    return estimate.most_acceptance(bounds, relative_count)


def path_curve(seed: int) -> np.ndarray:
    """A curve that never falls, flat in places and steep in others."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(rng.random(8), NUM_KNOTS)).astype(np.float32)


@given(product=st.floats(0, 1) | st.sampled_from(COUNT_KNOTS.tolist()), seed=st.integers(0, 20))
def test_compiled_curve_of_paths_is_the_plain_one(product, seed):
    curve = path_curve(seed)
    assert compiled_path(curve, product) == pytest.approx(path_acceptance(curve, product), rel=1e-9, abs=1e-12)


@given(probability=st.just(0.0) | st.floats(1e-6, 1.1), seed=st.integers(0, 20))
def test_the_least_product_is_where_a_curve_reaches_a_probability(probability, seed):
    curve = path_curve(seed)
    least = least_product(curve, probability)
    assert compiled_least(curve, probability) == least
    assert math.isinf(least) == (probability > curve[-1])
    if not math.isinf(least):
        assert path_acceptance(curve, least) >= probability * (1 - 1e-6)
        assert path_acceptance(curve, least * (1 - 1e-6)) < probability * (1 + 1e-6) or probability == 0


@given(one=st.floats(0, 1), other=st.floats(0, 1), seed=st.integers(0, 20))
def test_a_curve_keeps_the_order_of_paths(one, other, seed):
    low, high = (path_acceptance(path_curve(seed), product) for product in sorted((one, other)))
    assert low <= high


@given(product=st.floats(1e-6, 1))
def test_identity_believes_products(product):
    assert path_acceptance(IDENTITY_PATHS[0], product) == pytest.approx(product, rel=1e-6)
    assert least_product(IDENTITY_PATHS[1], product) == pytest.approx(product, rel=1e-6)


@njit
def compiled_path(curve, product):
    return estimate.on_knots(curve, product)


@njit
def compiled_least(curve, probability):
    return estimate.least_product(curve, probability)


@given(numbers=st.lists(st.integers(0, 1 << 20), max_size=20), num_positions=st.integers(0, 1 << 30))
def test_frequencies_of_many_tokens_are_those_of_each(numbers, num_positions):
    found = token_frequencies(np.array(numbers, np.int32), num_positions)
    assert found.tolist() == [token_kind(0, number, 0, num_positions) // NUM_BEFORE for number in numbers]
