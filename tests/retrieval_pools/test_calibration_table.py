"""The table of acceptance: its axes, and the compiled look-up against the plain one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from retrieval_pools import calibration_table
from retrieval_pools.calibration_table import (
    COUNT_KNOTS,
    DEPTH_EDGES,
    IDENTITY_TABLE,
    LENGTH_EDGES,
    TABLE_SHAPE,
    conditional_acceptance,
    depth_bin,
    length_bin,
)
from retrieval_pools.drafting import estimate
from retrieval_pools.sources import NUM_SOURCES


@njit
def compiled(table, source, match_length, depth, relative_count):
    return estimate.conditional_acceptance(table, source, match_length, depth, relative_count)


@given(
    source=st.integers(0, NUM_SOURCES - 1),
    match_length=st.integers(1, 200),
    depth=st.integers(1, 64),
    relative_count=st.floats(0, 1.001) | st.sampled_from(COUNT_KNOTS.tolist()),
    seed=st.integers(0, 3),
)
def test_compiled_look_up_is_the_plain_one(source, match_length, depth, relative_count, seed):
    table = np.sort(np.random.default_rng(seed).random(TABLE_SHAPE, np.float32))
    expected = conditional_acceptance(table, source, match_length, depth, relative_count)
    assert compiled(table, source, match_length, depth, relative_count) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(relative_count=st.floats(1e-6, 1))
def test_identity_believes_relative_counts(relative_count):
    assert conditional_acceptance(IDENTITY_TABLE, 4, 3, 2, relative_count) == pytest.approx(relative_count, rel=1e-6)


def test_bins_begin_at_their_edges():
    assert [length_bin(edge) for edge in LENGTH_EDGES] == list(range(len(LENGTH_EDGES)))
    assert [depth_bin(edge) for edge in DEPTH_EDGES] == list(range(len(DEPTH_EDGES)))
    assert length_bin(LENGTH_EDGES[3] - 1) == 2
    assert length_bin(10_000) == len(LENGTH_EDGES) - 1
    assert calibration_table.identity_table().shape == TABLE_SHAPE


@given(relative_count=st.floats(0, 1.001), seed=st.integers(0, 3))
def test_no_cell_gives_more_than_the_bound(relative_count, seed):
    table = np.sort(np.random.default_rng(seed).random(TABLE_SHAPE, np.float32))
    bound = compiled_bound(calibration_table.upper_bounds(table), relative_count)
    given = [
        conditional_acceptance(table, source, length, 1, relative_count) for source in range(5) for length in (1, 9)
    ]
    assert max(given) <= bound * (1 + 1e-6)
    assert compiled_bound(COUNT_KNOTS, relative_count) <= max(1.5 * relative_count, COUNT_KNOTS[0])


@njit
def compiled_bound(bounds, relative_count):
    return estimate.most_acceptance(bounds, relative_count)
