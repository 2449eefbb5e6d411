"""Histories equal the slow, obvious ones, and never see the row's own moment."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from laserbatch.ctr.dataset import histories


def slow_histories(users, items, times_us, labels, max_history):
    result = np.full((len(users), max_history), -1)
    for row in range(len(users)):
        liked = [other for other in range(len(users)) if users[other] == users[row] and labels[other] == 1]
        earlier = sorted(
            (other for other in liked if times_us[other] < times_us[row]), key=lambda other: times_us[other]
        )
        newest_first = [items[other] for other in reversed(earlier)][:max_history]
        result[row, : len(newest_first)] = newest_first
    return result


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 6), st.integers(0, 1)), min_size=1, max_size=40
    ),
    st.integers(1, 4),
)
def test_histories_equal_the_obvious_ones(rows, max_history):
    rows.sort(key=lambda row: row[2])
    users, items, times_us, labels = (np.array(column) for column in zip(*rows, strict=True))
    fast = histories(users, items, times_us, labels, max_history, padding=-1)
    assert np.array_equal(fast, slow_histories(users, items, times_us, labels, max_history))


def test_a_row_sees_neither_itself_nor_its_moment():
    users, items, times_us = np.zeros(3, int), np.array([7, 8, 9]), np.array([10, 10, 11])
    assert histories(users, items, times_us, np.ones(3), 2, -1).tolist() == [[-1, -1], [-1, -1], [8, 7]]
