"""The benchmark of our engine beside vLLM: turns, ratios within a round, and what is asked of whom."""

import pytest
from common import Spread
from peers import GREEDY, PLAIN, RELAXED, VLLM, VLLM_OURS, Scale, figures_of, measure
from systems import Pass
from tasks import Task


class Writes:
    """A system that takes so many seconds for each of a round's two prompts, and writes what it is told."""

    def __init__(self, seconds, text, num_steps):
        warm_up, rounds = [1.0], [duration / 2 for duration in seconds for _ in range(2)]
        self._seconds, self._text, self._num_steps = iter(warm_up + rounds), text, num_steps

    def run(self, prompts, batch, max_new_tokens):
        texts = (self._text,) * len(prompts)
        return Pass(next(self._seconds), 4 * len(prompts), self._num_steps * len(prompts), texts)


def test_ratios_are_within_a_round_and_texts_compared_with_the_same_engine():
    systems = {
        VLLM: Writes([2, 4, 8], (1, 2, 3, 9), 4),
        VLLM_OURS: Writes([1, 1, 8], (1, 2, 3, 9), 2),
        PLAIN: Writes([2, 2, 2], (1, 2, 3), 4),
        GREEDY: Writes([1, 1, 1], (1, 2, 4), 1),
    }
    task = Task("reki", "user", ([0], [1], [2]), (), 100, True)
    rows = {row["system"]: row for row in measure(systems, task, 1, Scale((), num_rounds=3))}
    assert list(rows) == list(systems)
    assert rows[VLLM]["tokens_per_s"] == 2 and rows[VLLM]["tokens_per_s_range"] == [1, 4]
    assert (rows[VLLM_OURS]["ratio_to_vllm"], rows[VLLM_OURS]["tokens_per_step"]) == (Spread(2, 1, 4), 2)
    assert rows[PLAIN]["ratio_to_vllm"] == Spread(2, 1, 4)
    assert [row["num_texts_as_undrafted"] for row in rows.values()] == [2, 2, 2, 0]


@pytest.mark.parametrize(("task", "least_relaxed"), [("reki", 2.0), ("goodreads-items", 1.2)])
def test_figures_are_of_ours_over_vllm_plain(task, least_relaxed):
    row = {"task": task, "ratio_to_vllm": Spread.of([1.5]), "num_texts": 4, "num_texts_as_undrafted": 4}
    rows = [row | {"system": system, "batch": batch}
            for system in (VLLM, VLLM_OURS, PLAIN, GREEDY, RELAXED) for batch in (1, 16)]  # fmt: skip
    verdicts = [(figure.wanted, figure.met) for figure in figures_of(rows)]
    expected = [(2.0, False) if task == "reki" else (0.98, True), (1.0, True), (0.98, True), (1.0, True)]
    assert verdicts == [*expected, (1.0, True), (1.0, True), (least_relaxed, least_relaxed < 1.5)]
