from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packs import chain_tree
from reference import HeldLogits, reference_accept
from test_token_tree import trees

from laserbatch.pipeline.decoding import acceptance as acceptances
from laserbatch.pipeline.decoding.acceptance import Acceptance
from laserbatch.pipeline.decoding.plugins import RULES as NAMES
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed, verifier_from
from laserbatch.pipeline.decoding.verifiers.relaxed import NAMED, largest_beside
from laserbatch.retrieval_pools.sources import NUM_SOURCES

VOCAB = 7
END = 3
IS_END = np.arange(VOCAB) == END
RULES = [Greedy(), *(Relaxed(k, 0.0) for k in (1, 2, 4)), Relaxed(None, 0.15), Relaxed(), Relaxed(3, 0.2)]


@given(
    st.lists(trees(vocab_size=VOCAB - 1), min_size=1, max_size=4),
    st.sampled_from(RULES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.5, 2.0]),
)
def test_every_rule_agrees_with_its_plain_reference(forest, rule, seed, scale):
    require_agreement_with_reference(forest, rule, seed, scale)


def require_agreement_with_reference(forest, rule, seed, scale):
    rng = np.random.default_rng(seed)
    forest = with_sources(forest, rng)
    logits = [(rng.normal(size=(len(t) + 1, VOCAB)) * scale).astype(np.float32) for t in forest]
    starts = np.cumsum([0] + [len(part) for part in logits[:-1]])
    acceptances = verify(rule, torch.from_numpy(np.concatenate(logits)), TreeBatch.of(forest), starts, IS_END)
    for tree, part, acceptance in zip(forest, logits, acceptances, strict=True):
        expected = reference_accept(rule, part, tree, {END})
        assert acceptance.nodes.tolist() == expected.nodes.tolist()
        assert acceptance.next_token == expected.next_token


def with_sources(forest: list[TokenTree], rng: np.random.Generator) -> list[TokenTree]:
    """Make all token ids valid, and draw a random source for each."""
    return [
        replace(t, token_ids=np.abs(t.token_ids), source=rng.integers(1, NUM_SOURCES, len(t)).astype(np.uint8))
        for t in forest
    ]


def verify(rule, logits, trees, starts, is_end) -> list[Acceptance | None]:
    return acceptances.verify(rule, HeldLogits(logits), trees, starts, is_end)


def peaked(*rows) -> torch.Tensor:
    """Logits of the given probabilities."""
    return torch.log(torch.tensor(rows, dtype=torch.float32))


def test_relaxed_needs_both_rank_and_probability():
    tree = chain_tree([1])
    likely = peaked([0.6, 0.2, 0.1, 0.04, 0.02, 0.02, 0.02], [1 / 7] * 7)
    unlikely = peaked([0.9, 0.04, 0.02, 0.01, 0.01, 0.01, 0.01], [1 / 7] * 7)
    third = peaked([0.4, 0.2, 0.3, 0.04, 0.02, 0.02, 0.02], [1 / 7] * 7)
    accepted = [
        len(verify(Relaxed(), x, TreeBatch.of([tree]), np.array([0]), IS_END)[0].nodes)
        for x in (likely, unlikely, third)
    ]
    assert accepted == [1, 0, 0]


def test_nothing_is_accepted_where_the_target_wants_to_end():
    logits = peaked([0.02, 0.4, 0.02, 0.5, 0.02, 0.02, 0.02], [1 / 7] * 7)  # the end token is likeliest, then token 1
    acceptance = verify(Relaxed(), logits, TreeBatch.of([chain_tree([1])]), np.array([0]), IS_END)[0]
    assert len(acceptance.nodes) == 0 and acceptance.next_token == END


def test_end_token_is_not_accepted_as_a_second_choice():
    logits = peaked([0.02, 0.5, 0.02, 0.4, 0.02, 0.02, 0.02], [1 / 7] * 7)
    acceptance = verify(Relaxed(), logits, TreeBatch.of([chain_tree([END])]), np.array([0]), IS_END)[0]
    assert len(acceptance.nodes) == 0 and acceptance.next_token == 1


def test_longest_path_wins_then_the_more_probable():
    row = [0.3, 0.35, 0.02, 0.01, 0.3, 0.01, 0.01]
    follow = [0.05, 0.05, 0.5, 0.05, 0.05, 0.25, 0.05]
    parents = np.array([-1, -1, 0, 1], np.int32)
    tree = TokenTree(np.array([0, 1, 2, 5], np.int32), parents, np.zeros(4, np.float32), np.zeros(4, np.uint8))
    logits = peaked(row, follow, follow, [1 / 7] * 7, [1 / 7] * 7)
    acceptance = verify(Relaxed(None, 0.1), logits, TreeBatch.of([tree]), np.array([0]), IS_END)[0]
    assert acceptance.nodes.tolist() == [0, 2]  # 0.3 * 0.5 against 0.35 * 0.25


def test_logits_that_are_not_finite_are_no_acceptance():
    logits = torch.zeros(3, VOCAB)
    logits[0, 0] = float("nan")
    outcomes = verify(Greedy(), logits, TreeBatch.of([EMPTY_TREE, chain_tree([0])]), np.array([0, 1]), IS_END)
    assert outcomes[0] is None and outcomes[1] is not None
    assert verify(Greedy(), logits, TreeBatch.of([EMPTY_TREE]), np.array([0]), IS_END) == [None]


def test_nothing_is_accepted_past_a_draft_that_is_not_finite():
    """The draft token itself is not accepted either: plain decoding would have written it, and then failed."""
    tree = TokenTree(*(np.array(values) for values in ([0, 1, 0], [-1, -1, 1], [0.0] * 3, [0] * 3)))
    row = [0.5, 0.3, 0.1, 0.04, 0.02, 0.02, 0.02]
    logits = peaked(row, row, row, row)
    logits[1] = float("nan")  # after the target's own choice, token 0
    greedy, relaxed = (
        verify(rule, logits, TreeBatch.of([tree]), np.array([0]), IS_END)[0] for rule in (Greedy(), Relaxed(2, 0.0))
    )
    assert (greedy.nodes.tolist(), greedy.next_token) == ([], 0)
    assert (relaxed.nodes.tolist(), relaxed.next_token) == ([1, 2], 0)


@pytest.mark.parametrize(
    "name, rule",
    [
        ("greedy", Greedy()),
        ("top_k", Relaxed(2, 0.0)),
        ("probability", Relaxed(None, 0.2)),
        ("relaxed", Relaxed(2, 0.2)),
    ],
)
def test_settings_name_the_rules(name, rule):
    assert verifier_from(DecodingSettings(verifier=name)) == rule


def test_every_named_rule_is_an_option():
    assert set(NAMES) == set(NAMED)


class CountingRows(HeldLogits):
    """Counts the rows that were read, and the calls that read them."""

    num_asked = num_calls = 0

    def of(self, rows):
        object.__setattr__(self, "num_asked", self.num_asked + len(rows))
        object.__setattr__(self, "num_calls", self.num_calls + 1)
        return super().of(rows)


@given(
    st.lists(trees(vocab_size=VOCAB - 1), min_size=1, max_size=6),
    st.sampled_from(RULES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.5, 2.0]),
    st.sampled_from([0, VOCAB * 4]),
    st.sampled_from([1, 3, 256]),
)
def test_judging_in_rounds_and_in_chunks_says_what_judging_at_once_says(forest, rule, seed, scale, level, chunk):
    require_rounds_and_chunks_agree(forest, rule, seed, scale, level, chunk)


def require_rounds_and_chunks_agree(forest, rule, seed, scale, level, chunk):
    rng = np.random.default_rng(seed)
    forest = with_sources(forest, rng)
    order = rng.permutation(len(forest))  # trees may be in any order, with other rows between them
    sizes = np.array([len(t) + 1 for t in forest])
    starts = np.empty(len(forest), np.int64)
    starts[order] = 1 + np.cumsum([0, *(sizes[order][:-1] + 1)])
    num_rows = sizes.sum()
    logits = torch.from_numpy((rng.normal(size=(starts.max() + sizes.max(), VOCAB)) * scale).astype(np.float32))
    before = logits.clone()
    outcomes = []
    for most_logits, most_rows in ((1 << 60, 1 << 60), (level, chunk)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("laserbatch.pipeline.decoding.acceptance.ROUND_LOGITS", most_logits)
            patch.setattr("laserbatch.pipeline.decoding.acceptance.CHUNK_ROWS", {"cpu": most_rows})
            rows = CountingRows(logits)
            outcomes.append((acceptances.verify(rule, rows, TreeBatch.of(forest), starts, IS_END), rows.num_asked))
    (at_once, num_all), (by_level, num_asked) = outcomes
    assert num_all == num_rows >= num_asked
    for accepted, other in zip(at_once, by_level, strict=True):
        assert (accepted.nodes.tolist(), accepted.next_token) == (other.nodes.tolist(), other.next_token)
    assert torch.equal(logits, before)


def test_nothing_is_looked_at_behind_what_was_not_accepted(monkeypatch):
    monkeypatch.setattr("laserbatch.pipeline.decoding.acceptance.ROUND_LOGITS", 0)
    rows = CountingRows(peaked(*[[0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]] * 12))
    forest = [chain_tree([0, 0, 1, 0, 0, 0, 0]), chain_tree([1, 0, 0])]  # accepted: the first two of the first tree
    outcomes = acceptances.verify(Greedy(), rows, TreeBatch.of(forest), np.array([0, 8]), IS_END)
    assert [len(outcome.nodes) for outcome in outcomes] == [2, 0]
    assert rows.num_asked == 2 + 4  # the second round reads rows of the first tree only


@pytest.mark.parametrize("num_at_first, num_calls", [(4, 4), (0, 6)])
def test_a_long_accepted_path_takes_few_rounds(monkeypatch, num_at_first, num_calls):
    """The rounds read 4, 8, 16 and all other rows; if one row exceeds the limit, they read 1, 2, 4, 8, ..."""
    monkeypatch.setattr("laserbatch.pipeline.decoding.acceptance.ROUND_LOGITS", num_at_first * len(IS_END))
    rows = CountingRows(peaked(*[[0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]] * 41))
    [outcome] = acceptances.verify(Greedy(), rows, TreeBatch.of([chain_tree([0] * 40)]), np.array([0]), IS_END)
    assert len(outcome.nodes) == 40
    assert rows.num_asked == 41 and rows.num_calls == num_calls


def test_largest_beside_the_choice_leaves_the_logits_as_they_were():
    logits = torch.tensor([[1.0, 5.0, 5.0], [3.0, -1.0, 2.0]])
    before = logits.clone()
    largest = largest_beside(logits, torch.tensor([1, 0]))
    assert largest.tolist() == [5.0, 2.0] == largest_beside(logits.double(), torch.tensor([1, 0])).tolist()
    assert torch.equal(logits, before)
