"""The draft budget of lists, which is measured on some of the users, since forwards cost differently by machine."""

import time
from collections.abc import Callable, Sequence
from typing import Any

TRIED_SHARES = (1.5, 4.0)  # budgets, as multiples of the length of a list: listed items, or beams of a small model
MIN_GAIN = 1.03  # drafts are used if they are this much faster than plain beam search


def tried_seconds(batches: Sequence[Any], num_items: int, run: Callable[[Any, int], object]) -> dict[int, float]:
    """Seconds of some batches of users by the draft budget; 0 is plain beam search.

    `run` makes the lists of a batch, `num_items` each, with a budget.
    """
    budgets = [0, *(round(share * num_items) for share in TRIED_SHARES)]
    seconds = dict.fromkeys(budgets, 0.0)
    for number, batch in enumerate([batches[-1], *batches]):  # the first one warms up
        for place in range(len(budgets)):
            budget = budgets[(number + place) % len(budgets)]
            start_s = time.perf_counter()
            run(batch, budget)
            seconds[budget] += (time.perf_counter() - start_s) * (number > 0)
    return seconds


def fastest(seconds: dict[int, float]) -> tuple[int, float]:
    """The budget to draft with, and the speed-up of the fastest one over plain beam search."""
    best = min(seconds, key=lambda budget: seconds[budget])
    gain = seconds[0] / seconds[best]
    return best if gain >= MIN_GAIN else 0, gain
