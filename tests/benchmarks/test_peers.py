"""The benchmark of our engine against vLLM: turns, ratios within a round, and the goals of each system."""

from types import SimpleNamespace

import pytest
from common import Spread
from peers import (
    GREEDY,
    PLAIN,
    RELAXED,
    VLLM,
    VLLM_NGRAM,
    VLLM_OURS,
    VLLM_SUFFIX,
    Scale,
    figures_beside_best,
    figures_of,
    measure,
)
from peers_worker import Learned
from systems import Pass
from tasks import Task


class Writes:
    """Writes given texts; each of a round's two prompts takes the given number of seconds."""

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
    verdicts = [(figure.wanted, figure.met) for figure in figures_of(rows, "float32")]
    expected = [(2.0, False) if task == "reki" else (0.98, True), (1.0, True), (0.98, True), (1.0, True)]
    assert verdicts == [*expected, (1.0, True), (1.0, True), (least_relaxed, least_relaxed < 1.5)]
    assert len(list(figures_of(rows, "bfloat16"))) == len(verdicts) - 2


def test_our_drafts_stand_beside_the_best_of_vllms_own_ways():
    over = {VLLM: 1.0, VLLM_NGRAM: 0.8, VLLM_SUFFIX: 1.5, VLLM_OURS: 9.0, PLAIN: 9.0, GREEDY: 2.0, RELAXED: 3.0}
    rows = [
        {"task": "movielens-users", "batch": batch, "system": name, "ratio_to_vllm": Spread.of([ratio * batch])}
        for name, ratio in over.items()
        for batch in (1, 16)
    ]
    assert [(figure.measured, figure.wanted) for figure in figures_beside_best(rows)] == [(2.0, 2.0)]


def test_a_pass_leaves_no_text_that_the_next_one_is_drafted_from():
    class Cache:
        active_requests, cached_requests = {"3"}, {"1", "2", "3"}

        def stop_request(self, request):
            self.active_requests = self.active_requests - {request}

        def evict_cached_response(self, request):
            self.cached_requests = self.cached_requests - {request}

    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=None)))
    learned = Learned(llm)
    learned.end_pass(True)  # a vLLM without suffix drafts has no cache
    learned._cache = cache = Cache()
    learned.end_pass(True)
    assert cache.cached_requests == {"1", "2", "3"} and not cache.active_requests
    cache.cached_requests |= {"4"}
    learned.end_pass(False)
    assert cache.cached_requests == {"1", "2", "3"}
    cache.cached_requests |= {"5"}
    learned.end_pass(True)
    assert cache.cached_requests == {"5"}
