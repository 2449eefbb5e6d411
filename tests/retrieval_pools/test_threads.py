"""Threads: results in the order of the items, no further ahead than said, errors in their place."""

import threading
import time
from unittest.mock import patch

import pytest

from laserbatch.retrieval_pools.index.arrays import MAX_THREADS, in_threads

CORES = "laserbatch.retrieval_pools.index.arrays._num_usable_cores"


@pytest.mark.parametrize("num_cores", [1, 2, 3, 64])
@pytest.mark.parametrize("num_items", [0, 1, 2, 40])
def test_results_come_in_the_order_of_the_items(num_cores, num_items):
    def slow_when_even(number):
        time.sleep(0.003 * (number % 2 == 0))
        return number * number

    with patch(CORES, lambda: num_cores):
        assert list(in_threads(slow_when_even, range(num_items))) == [k * k for k in range(num_items)]


@pytest.mark.parametrize(("num_cores", "most_ahead"), [(1, 0), (2, 2), (64, MAX_THREADS)])
def test_no_more_items_are_taken_than_one_a_thread_ahead(num_cores, most_ahead):
    taken = []

    def items():
        for number in range(30):
            taken.append(number)
            yield number

    with patch(CORES, lambda: num_cores):
        for number, _ in enumerate(in_threads(str, items())):
            assert len(taken) - (number + 1) <= most_ahead


def test_several_are_worked_on_at_once():
    meet = threading.Barrier(2, timeout=10)
    with patch(CORES, lambda: 2):
        assert len(list(in_threads(lambda _: meet.wait(), range(4)))) == 4


@pytest.mark.parametrize("num_cores", [1, 2])
def test_an_error_is_raised_in_the_place_of_its_result(num_cores):
    with patch(CORES, lambda: num_cores):
        results = in_threads(lambda number: 6 // number, [3, 2, 0, 1])
        assert (next(results), next(results)) == (2, 3)
        with pytest.raises(ZeroDivisionError):
            next(results)


def test_who_stops_reading_leaves_no_thread_behind():
    before = threading.active_count()
    with patch(CORES, lambda: 2):
        results = in_threads(abs, range(100))
        next(results)
        results.close()
    assert threading.active_count() == before
