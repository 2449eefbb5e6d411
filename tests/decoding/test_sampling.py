"""Texts at a temperature: samples of the model's own distribution, the same whatever is drafted."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packs import chain_tree
from reference import HeldLogits
from scipy.stats import chisquare
from tiny_models import NonsenseDrafter, OracleDrafter, requests_for, tiny_model, tiny_prompts

from laserbatch.pipeline.decoding.acceptance import verify
from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.model.sampling import SampledLogits, gumbel_noise
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy

VOCAB, TEMPERATURE, NUM_TEXTS, LEAST_P = 4, 0.7, 20_000, 1e-3
AFTER = torch.tensor(np.random.default_rng(5).normal(size=(VOCAB + 1, VOCAB)) * 1.5, dtype=torch.float32)  # a toy
NO_END = np.zeros(VOCAB, bool)


def test_noise_is_gumbel_noise():
    noise = gumbel_noise(torch.arange(300), torch.arange(300) % 7, 500).double().flatten().numpy()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    counts, _ = np.histogram(np.exp(-np.exp(-noise)), bins=50, range=(0, 1))
    assert chisquare(counts).pvalue > LEAST_P


def test_noise_is_a_text_s_and_a_position_s_own():
    seeds, positions = torch.tensor([3, 3, -9]), torch.tensor([10, 11, 10])
    together = gumbel_noise(seeds, positions, 6)
    for row in range(3):
        torch.testing.assert_close(gumbel_noise(seeds[[row]], positions[[row]], 6)[0], together[row], rtol=0, atol=0)
    assert len(set(together.flatten().tolist())) == 18
    noise = gumbel_noise(torch.arange(2000).repeat(2), torch.arange(2).repeat_interleave(2000), 2)
    first, second = noise[:2000], noise[2000:]
    for one, other in ((first[:, 0], second[:, 0]), (first[:, 0], first[:, 1]), (first[:-1, 0], first[1:, 0])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.08


def first_tokens(tree: TokenTree, num_tokens: int) -> np.ndarray:
    """The first tokens of many texts of the toy, which the same tree is drafted for: int64 (NUM_TEXTS, num_tokens)."""
    trees = TreeBatch.of([tree] * NUM_TEXTS)
    before = np.concatenate([[VOCAB], tree.token_ids])  # of each row, the last token: the toy looks at no other
    logits = AFTER[torch.from_numpy(np.tile(before, NUM_TEXTS).astype(np.int64))]
    rows = SampledLogits(TEMPERATURE, HeldLogits(logits), range(NUM_TEXTS), [9] * NUM_TEXTS, trees)
    found = verify(Greedy(), rows, trees, np.arange(NUM_TEXTS) * len(before), NO_END)
    texts = [[*tree.token_ids[one.nodes].tolist(), one.next_token] for one in found]
    while short := [number for number, text in enumerate(texts) if len(text) < num_tokens]:  # go on without drafts
        none = TreeBatch.empty(len(short))
        held = HeldLogits(AFTER[torch.tensor([texts[number][-1] for number in short])])
        rows = SampledLogits(TEMPERATURE, held, short, [9 + len(texts[number]) for number in short], none)
        for number, one in zip(short, verify(Greedy(), rows, none, np.arange(len(short)), NO_END), strict=True):
            texts[number].append(one.next_token)
    return np.array([text[:num_tokens] for text in texts])


def counts_and_expected(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair of first tokens came, and how often it should by the toy's own distribution."""
    p = torch.softmax(AFTER.double() / TEMPERATURE, -1).numpy()
    joint = p[VOCAB][:, None] * p[:VOCAB]
    return np.bincount(texts[:, 0] * VOCAB + texts[:, 1], minlength=VOCAB**2), joint.flatten() * len(texts)


@given(st.integers(0, 2**31))
def test_texts_are_the_same_whatever_is_drafted(seed):
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 12))
    parents = np.array([rng.integers(-1, node) for node in range(num_nodes)], np.int32)
    tokens = rng.integers(VOCAB, size=num_nodes).astype(np.int32)
    tree = TokenTree(tokens, parents, np.zeros(num_nodes, np.float32), np.zeros(num_nodes, np.uint8))
    drafted, plain = (texts_of_few(one) for one in (tree, chain_tree([])))
    assert np.array_equal(drafted, plain)


def texts_of_few(tree: TokenTree) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "NUM_TEXTS", 20)
        return first_tokens(tree, 5)


@pytest.mark.parametrize("drafted", [[], [0, 0], [2, 1]])
def test_pairs_of_tokens_come_as_often_as_the_model_says(drafted):
    found, expected = counts_and_expected(first_tokens(chain_tree(drafted), 2))
    assert chisquare(found, expected).pvalue > LEAST_P


def test_a_wrong_rule_is_caught():
    """Accept a drafted token by its probability, else draw from the whole distribution, not from what is left."""
    p, rng = torch.softmax(AFTER.double() / TEMPERATURE, -1).numpy(), np.random.default_rng(0)
    texts = np.empty((NUM_TEXTS, 2), np.int64)
    for text in texts:
        text[0] = 0 if rng.random() < p[VOCAB, 0] else rng.choice(VOCAB, p=p[VOCAB])
        text[1] = rng.choice(VOCAB, p=p[text[0]])
    found, expected = counts_and_expected(texts)
    assert chisquare(found, expected).pvalue < LEAST_P


def test_sampled_texts_depend_on_their_seed_alone():
    loaded, prompts = prepare_model(tiny_model("llama")), tiny_prompts()[:6]
    settings = DecodingSettings(verifier="greedy", temperature=1.3)
    written = {}
    for batch_size, shift in ((1, 0), (4, 0), (4, 100)):
        engine = Engine(loaded, settings.model_copy(update={"batch_size": batch_size}))
        for draft in (NoDrafter, NonsenseDrafter, lambda: OracleDrafter(written["first"])):
            drafter = draft()
            asked = [
                type(one)(one.request_id, one.prompt_ids, max_new_tokens=12, seed=int(one.request_id) + shift)
                for one in requests_for(prompts, 12)
            ]
            results = {int(one.request_id): one for one in engine.generate(asked, drafter)}
            found = [results[number].token_ids.tolist() for number in range(6)]
            expected = written.setdefault("first" if shift == 0 else "others", found)
            assert found == expected, (batch_size, shift, type(drafter).__name__)
            if isinstance(drafter, OracleDrafter) and shift == 0:  # it drafts the very samples
                assert sum(one.num_accepted for one in results.values()) > 10
    assert written["first"] != written["others"]


def test_a_relaxed_rule_cannot_be_sampled_with():
    with pytest.raises(ValueError, match=r"temperature 0\.8 samples, which verifier relaxed would distort: say"):
        DecodingSettings(temperature=0.8)
