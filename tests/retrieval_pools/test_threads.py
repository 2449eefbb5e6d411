"""Threads return results in the order of the items, run no further ahead than the limit, and raise errors in order."""

import threading
import time

import pytest

from laserbatch.retrieval_pools.index.arrays import NUM_THREADS, in_threads


@pytest.mark.parametrize("num_items", [0, 1, 2, 40])
def test_results_come_in_the_order_of_the_items(num_items):
    def slow_when_even(number):
        time.sleep(0.003 * (number % 2 == 0))
        return number * number

    assert list(in_threads(slow_when_even, range(num_items))) == [k * k for k in range(num_items)]


def test_no_more_items_are_taken_than_one_a_thread_ahead():
    started = []

    def items():
        for number in range(30):
            started.append(number)
            yield number

    for number, _ in enumerate(in_threads(str, items())):
        assert len(started) - (number + 1) <= NUM_THREADS


def test_several_are_worked_on_at_once():
    meet = threading.Barrier(2, timeout=10)
    assert len(list(in_threads(lambda _: meet.wait(), range(4)))) == 4


def test_an_error_is_raised_in_the_place_of_its_result():
    results = in_threads(lambda number: 6 // number, [3, 2, 0, 1])
    assert (next(results), next(results)) == (2, 3)
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_who_stops_reading_leaves_no_thread_behind():
    before = threading.active_count()
    results = in_threads(abs, range(100))
    next(results)
    results.close()
    assert threading.active_count() == before
