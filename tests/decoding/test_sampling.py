"""Texts at a temperature are samples of the model's own distribution, and do not depend on drafts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packs import chain_tree
from sampling_toy import AFTER, MIN_P, TEMPERATURE, VOCAB, counts_and_expected, first_tokens
from scipy.stats import chisquare
from tiny_models import NonsenseDrafter, OracleDrafter, requests_for, tiny_model, tiny_prompts

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model import sampling
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.model.sampling import SampledLogits, gumbel_noise
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch

NUM_TEXTS = 8_000


def test_noise_is_gumbel_noise():
    noise = gumbel_noise(torch.arange(300), torch.arange(300) % 7, 500).double().flatten().numpy()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    counts, _ = np.histogram(np.exp(-np.exp(-noise)), bins=50, range=(0, 1))
    assert chisquare(counts).pvalue > MIN_P


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7])
def test_noise_in_parts_is_that_of_all_rows_at_once(monkeypatch, num_rows):
    seeds, positions = torch.arange(7)[:num_rows] * 3 - 5, torch.arange(7)[:num_rows] % 3
    at_once = -torch.log(-torch.log(sampling.uniform(seeds, positions, torch.arange(1, 301)))).float()
    assert torch.equal(gumbel_noise(seeds, positions, 300), at_once)
    sizes = []
    uniform = sampling.uniform

    def watched(*arguments):
        numbers = uniform(*arguments)
        sizes.append(numbers.numel() * numbers.element_size())
        return numbers

    monkeypatch.setattr(sampling, "uniform", watched)
    monkeypatch.setattr(sampling, "MAX_NOISE_BYTES", 2 * 300 * 8)
    assert torch.equal(gumbel_noise(seeds, positions, 300), at_once)
    assert len(sizes) == (num_rows + 1) // 2 and max(sizes, default=0) <= 2 * 300 * 8


def test_noise_is_a_text_s_and_a_position_s_own():
    seeds, positions = torch.tensor([3, 3, -9]), torch.tensor([10, 11, 10])
    together = gumbel_noise(seeds, positions, 6)
    for row in range(3):
        torch.testing.assert_close(gumbel_noise(seeds[[row]], positions[[row]], 6)[0], together[row], rtol=0, atol=0)
    assert len(set(together.flatten().tolist())) == 18
    noise = gumbel_noise(torch.arange(2000).repeat(2), torch.arange(2).repeat_interleave(2000), 2)
    first, second = noise[:2000], noise[2000:]
    for pair in ((first[:, 0], second[:, 0]), (first[:, 0], first[:, 1]), (first[:-1, 0], first[1:, 0])):
        assert abs(np.corrcoef(*pair)[0, 1]) < 0.08


@given(st.integers(0, 2**31))
def test_texts_are_the_same_whatever_is_drafted(seed):
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 12))
    parents = np.array([rng.integers(-1, node) for node in range(num_nodes)], np.int32)
    tokens = rng.integers(VOCAB, size=num_nodes).astype(np.int32)
    tree = TokenTree(tokens, parents, np.zeros(num_nodes, np.float32), np.zeros(num_nodes, np.uint8))
    drafted, plain = (first_tokens(TreeBatch.of([shape] * 20), 5, SampledLogits) for shape in (tree, chain_tree([])))
    assert np.array_equal(drafted, plain)


@pytest.mark.parametrize("drafted", [[], [0, 0], [2, 1]])
def test_pairs_of_tokens_come_as_often_as_the_model_says(drafted):
    counts, expected = counts_and_expected(
        first_tokens(TreeBatch.of([chain_tree(drafted)] * NUM_TEXTS), 2, SampledLogits)
    )
    assert chisquare(counts, expected).pvalue > MIN_P


def test_a_wrong_rule_is_caught():
    """The wrong rule accepts a drafted token by its probability, and otherwise draws from the whole distribution."""
    p, rng = torch.softmax(AFTER.double() / TEMPERATURE, -1).numpy(), np.random.default_rng(0)
    texts = np.empty((NUM_TEXTS, 2), np.int64)
    for text in texts:
        text[0] = 0 if rng.random() < p[VOCAB, 0] else rng.choice(VOCAB, p=p[VOCAB])
        text[1] = rng.choice(VOCAB, p=p[text[0]])
    counts, expected = counts_and_expected(texts)
    assert chisquare(counts, expected).pvalue < MIN_P


def test_sampled_texts_depend_on_their_seed_alone():
    loaded, prompts = prepare_model(tiny_model("llama")), tiny_prompts()[:6]
    settings = DecodingSettings(verifier="greedy", temperature=1.3)
    written = {}
    for batch_size, shift in ((1, 0), (4, 0), (4, 100)):
        engine = Engine(loaded, settings.model_copy(update={"batch_size": batch_size}))
        for draft in (NoDrafter, NonsenseDrafter, lambda: OracleDrafter(written["first"])):
            drafter = draft()
            requests = [
                replace(request, max_new_tokens=12, seed=int(request.request_id) + shift)
                for request in requests_for(prompts, 12)
            ]
            results = {int(result.request_id): result for result in engine.generate(requests, drafter)}
            texts = [results[number].token_ids.tolist() for number in range(6)]
            expected = written.setdefault("first" if shift == 0 else "others", texts)
            assert texts == expected, (batch_size, shift, type(drafter).__name__)
            if isinstance(drafter, OracleDrafter) and shift == 0:  # it drafts the same samples
                assert sum(result.num_accepted for result in results.values()) > 10
    assert written["first"] != written["others"]


def test_a_relaxed_rule_cannot_be_sampled_with():
    with pytest.raises(ValueError, match=r"temperature 0\.8 samples, and verifier relaxed would distort samples: set"):
        DecodingSettings(temperature=0.8)
