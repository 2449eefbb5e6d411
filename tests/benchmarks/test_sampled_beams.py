"""Sampled beams have the same distribution with drafts and without, and a wrong rule is caught."""

import numpy as np
import pytest
from sampled_beams import drawn, sampled_search, verified
from scipy.stats import chisquare
from test_beams import CATALOGUE, FIRST_TOKENS, PROMPTS, TARGET, TRIE, model_of

from laserbatch.research.recommending.code_trees import CodeTrees

P = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
Q = np.log([0.1, 0.2, 0.4, 0.2, 0.1])
NUM_DRAWS = 10_000


def firsts(rule) -> float:
    """The p-value for the hypothesis that a rule over drafts by q draws one path by p."""
    rng = np.random.default_rng(0)
    counts = np.bincount([rule(drawn(Q, 1, rng), rng) for _ in range(NUM_DRAWS)], minlength=len(P))
    return float(chisquare(counts, np.exp(P) * NUM_DRAWS).pvalue)


def test_one_path_is_drawn_by_the_target_whatever_drafts_and_a_wrong_rule_is_caught():
    assert firsts(lambda draft, rng: int(verified(P, Q, draft, 1, rng)[0][0])) > 1e-3
    assert firsts(lambda draft, rng: int(draft[0])) < 1e-6  # takes the draft

    def again(draft, rng):  # draws again by p, instead of by the rest of it
        accepted = np.log(rng.random()) <= P[draft[0]] - Q[draft[0]]
        return int(draft[0] if accepted else drawn(P, 1, rng)[0])

    assert firsts(again) < 1e-6


def test_several_paths_are_nearly_drawn_together_as_by_the_target():
    """Each pair of likely paths is drawn together as often as two distinct draws of the target draw it."""
    rng = np.random.default_rng(1)
    log_p, log_q = (np.log(rng.dirichlet(np.full(30, 5.0))) for _ in range(2))

    def pairs(draw) -> np.ndarray:
        counts = np.zeros((30, 30))
        for _ in range(NUM_DRAWS):
            first, second = sorted(draw().tolist())
            counts[first, second] += 1
        return counts / NUM_DRAWS

    target = pairs(lambda: drawn(log_p, 2, rng))
    again = pairs(lambda: drawn(log_p, 2, rng))  # the distance by chance alone
    relaxed = pairs(lambda: verified(log_p, log_q, drawn(log_q, 2, rng), 2, rng)[0])
    by_draft = pairs(lambda: drawn(log_q, 2, rng))
    noise, off, draft = (np.abs(target - other).sum() / 2 for other in (again, relaxed, by_draft))
    assert off < noise + 0.03 and draft > 0.3


@pytest.mark.parametrize("size", [1, 5])
def test_lists_are_items_all_different_and_the_same_again(size):
    def lists(drafts: bool):
        trees = CodeTrees(TARGET, TRIE, FIRST_TOKENS, PROMPTS)
        small = CodeTrees(model_of(1), TRIE, FIRST_TOKENS, PROMPTS) if drafts else None
        return sampled_search(trees, TRIE, size, range(len(PROMPTS)), small, 20), trees.num_forwards

    for drafts in (False, True):
        (results, num_forwards), (again, _) = lists(drafts), lists(drafts)
        for result, other in zip(results, again, strict=True):
            assert result.rows.tolist() == other.rows.tolist() and len(set(result.rows.tolist())) == size
            assert (result.rows < len(CATALOGUE)).all() and (np.diff(result.scores) <= 0).all()
    assert num_forwards < lists(False)[1]  # the target drafts for itself, so everything is accepted
