"""Rules that depend on the uncertainty of the target."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packs import chain_tree
from reference import reference_rule
from test_token_tree import trees
from test_verifiers import (
    IS_END,
    VOCAB,
    peaked,
    require_agreement_with_reference,
    require_rounds_and_chunks_agree,
    verify,
)

from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers import verifier_from
from laserbatch.research.verifiers.unsure import AASD, FLy, Typical
from laserbatch.retrieval_pools.sources import SOURCE_NAMES, SOURCE_OUTPUT, SOURCE_POOL

RULES = [Typical(), Typical(0.3), AASD(), AASD(0.05, 0.02), FLy(0.5, 1), FLy(0.0, 2)]


def entropy_of(log_probs: np.ndarray) -> float:
    probabilities = np.exp(log_probs.astype(np.float64))
    return -sum(p * np.log(p) for p in probabilities if p > 0)


@reference_rule.register
def _(rule: Typical, logits, log_probs, token, source) -> bool:
    least = min(rule.epsilon, np.sqrt(rule.epsilon) * np.exp(-entropy_of(log_probs)))
    return bool(np.exp(np.float64(log_probs[token])) > least)


@reference_rule.register
def _(rule: AASD, logits, log_probs, token, source) -> bool:
    probabilities = np.exp(log_probs.astype(np.float64))
    least = min(rule.alpha * entropy_of(log_probs) + rule.beta, probabilities.max())
    return bool(probabilities[token] >= least) and SOURCE_NAMES[source] != "output"


@reference_rule.register
def _(rule: FLy, logits, log_probs, token, source) -> bool:
    return bool(entropy_of(log_probs) / np.log(len(logits)) >= rule.min_entropy)


@given(
    st.lists(trees(vocab_size=VOCAB - 1), min_size=1, max_size=4),
    st.sampled_from(RULES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.5, 2.0]),
)
def test_every_rule_of_uncertainty_agrees_with_its_plain_reference(forest, rule, seed, scale):
    require_agreement_with_reference(forest, rule, seed, scale)


@given(
    st.lists(trees(vocab_size=VOCAB - 1), min_size=1, max_size=6),
    st.sampled_from(RULES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.5, 2.0]),
    st.sampled_from([0, VOCAB * 4]),
    st.sampled_from([1, 3, 256]),
)
def test_rounds_and_chunks_of_rules_of_uncertainty_agree(forest, rule, seed, scale, level, chunk):
    require_rounds_and_chunks_agree(forest, rule, seed, scale, level, chunk)


@pytest.mark.parametrize(("name", "rule"), [("typical", Typical(0.2)), ("aasd", AASD(0.1, 0.2)), ("fly", FLy(0.3, 6))])
def test_settings_name_them(name, rule):
    assert verifier_from(DecodingSettings(verifier=name)) == rule


def num_accepted(rule, tree, *rows) -> int:
    [acceptance] = verify(rule, peaked(*rows), TreeBatch.of([tree]), np.array([0]), IS_END)
    return len(acceptance.nodes)


SURE = [0.88, 0.06, 0.02, 0.01, 0.01, 0.01, 0.01]
UNSURE = [0.25, 0.15, 0.2, 0.01, 0.13, 0.13, 0.13]


def test_typical_acceptance_asks_less_where_the_target_is_unsure():
    rule = Typical(0.2)  # the threshold is sqrt(0.2) exp(-1.8) = 0.075 at UNSURE, and 0.2 at SURE
    assert num_accepted(rule, chain_tree([1]), UNSURE, UNSURE) == 1
    assert num_accepted(rule, chain_tree([1]), SURE, UNSURE) == 0


def test_conditional_verification_asks_more_where_the_target_is_unsure():
    rule = AASD(0.1, 0.05)
    assert num_accepted(rule, chain_tree([1]), SURE, UNSURE) == 0  # 0.06 < 0.1 * 0.52 + 0.05
    assert num_accepted(AASD(0.1, 0.0), chain_tree([1]), SURE, UNSURE) == 1
    assert num_accepted(rule, chain_tree([1]), UNSURE, UNSURE) == 0  # 0.15 < 0.1 * 1.8 + 0.05
    assert num_accepted(rule, chain_tree([0]), UNSURE, UNSURE) == 1  # never more than the likeliest has


def test_conditional_verification_is_strict_with_what_the_text_itself_said():
    rule = AASD(0.0, 0.05)
    counts = []
    for source in (SOURCE_POOL, SOURCE_OUTPUT):
        tree = chain_tree([1])
        counts.append(num_accepted(rule, replace(tree, source=np.array([source], np.uint8)), SURE, UNSURE))
    assert counts == [1, 0]


def test_a_loose_token_stands_where_enough_of_the_targets_choices_follow_it():
    rule = FLy(0.5, 2)
    follow = [[0.9, 0.05, 0.01, 0.01, 0.01, 0.01, 0.01]] * 4
    assert num_accepted(rule, chain_tree([2, 0, 0]), UNSURE, *follow[:3]) == 3
    assert num_accepted(rule, chain_tree([2, 0]), UNSURE, *follow[:2]) == 0  # the draft is too short
    assert num_accepted(rule, chain_tree([2, 0, 1]), UNSURE, *follow[:3]) == 0  # the target disagrees at the last
    assert num_accepted(rule, chain_tree([2, 0, 0]), SURE, *follow[:3]) == 0  # the target is sure
    assert num_accepted(rule, chain_tree([0, 2, 0, 0]), SURE, UNSURE, *follow[:3]) == 4
