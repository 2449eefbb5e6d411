"""How much to draft for lists: what is fastest on some of the users, since a forward's price is the machine's."""

import time
from collections.abc import Callable, Sequence
from typing import Any

TRIED_SHARES = (1.5, 4.0)  # of the length of a list: how many listed items, or how wide a small model's beams
MIN_GAIN = 1.03  # over plain beams, for anything to be drafted


def tried_seconds(batches: Sequence[Any], num_items: int, run: Callable[[Any, int], object]) -> dict[int, float]:
    """Seconds of some batches of users, by how much was drafted for a user of them; 0 is plain beams.

    `run` makes the lists of a batch, `num_items` each, by how much is drafted.
    """
    budgets = [0, *(round(share * num_items) for share in TRIED_SHARES)]
    seconds = dict.fromkeys(budgets, 0.0)
    for number, batch in enumerate([batches[-1], *batches]):  # the last once more, first, which warms up
        for place in range(len(budgets)):
            budget = budgets[(number + place) % len(budgets)]
            start_s = time.perf_counter()
            run(batch, budget)
            seconds[budget] += (time.perf_counter() - start_s) * (number > 0)
    return seconds


def fastest(seconds: dict[int, float]) -> tuple[int, float]:
    """How much to draft, and by how much the best that was tried is faster than plain beams."""
    best = min(seconds, key=seconds.get)
    gain = seconds[0] / seconds[best]
    return best if gain >= MIN_GAIN else 0, gain
