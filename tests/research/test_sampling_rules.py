"""Rules that sample according to how drafts were drawn: texts have the target's distribution."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packs import chain_tree
from sampling_toy import AFTER, MIN_P, NUM_BEFORE, TEMPERATURE, VOCAB, Without, counts_and_expected, first_tokens
from scipy.stats import chisquare

from laserbatch.pipeline.decoding.drafters.blended import blend
from laserbatch.pipeline.decoding.model.sampling import SampledLogits
from laserbatch.pipeline.decoding.plugins import verifier_plugin
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.research.drafters.model_drafter import DraftModel, GrowingTrees
from laserbatch.research.drafters.tree_shapes import Beams, Branching, Chains, StochasticBeams, truncated
from laserbatch.research.verifiers.draws import Draws, SamplingRule
from laserbatch.research.verifiers.rejection import recursive_rejection

NAMES = ("leviathan", "specinfer", "k_seq", "rsd")
LEVIATHAN, SPECINFER, K_SEQ, RSD = (verifier_plugin(name).make(DecodingSettings()) for name in NAMES)
NUM_TEXTS = 4_000
SEEDS = (4, 3)  # seeds of draft models that leave several tokens open, so that wrong rules show


@dataclass
class ToyModel(DraftModel):
    """A draft model that depends on the last token alone."""

    seed: int
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        values = np.random.default_rng(self.seed).normal(size=(VOCAB + 1, VOCAB))
        self.table = torch.tensor(values, dtype=torch.float32).log_softmax(-1)

    def log_q(self, trees: TreeBatch, tree_of: np.ndarray, places: np.ndarray) -> torch.Tensor:
        last = np.full(len(tree_of), VOCAB)
        is_node = places >= 0
        last[is_node] = trees.token_ids[(trees.starts[tree_of] + places)[is_node]]
        return self.table[torch.from_numpy(last)]


def texts_of(num_texts: int) -> list:
    return [
        SimpleNamespace(request=SimpleNamespace(seed=seed), context=np.zeros(NUM_BEFORE)) for seed in range(num_texts)
    ]


SHAPES = {
    "chain": (LEVIATHAN, Chains(1, 2), 1),
    "chains": (SPECINFER, Chains(3, 2), 1),
    "chains of two models": (SPECINFER, Chains(4, 2), 2),
    "k-seq": (K_SEQ, Chains(3, 2), 1),
    "rsd-c": (RSD, Branching((3, 2)), 1),
    "rsd-c, all tokens": (RSD, Branching((VOCAB, 1)), 1),
    "rsd-s": (RSD, StochasticBeams(4, 2), 1),
}


def drafted(shape, num_models: int, num_texts: int = NUM_TEXTS) -> TreeBatch:
    return shape.grow([ToyModel(seed) for seed in SEEDS[:num_models]], texts_of(num_texts), TEMPERATURE)


@pytest.mark.parametrize("name", SHAPES)
def test_texts_have_the_distribution_of_the_target(name):
    rule, shape, num_models = SHAPES[name]
    trees = drafted(shape, num_models)
    texts = first_tokens(trees, 2, rule.sampled)
    counts, expected = counts_and_expected(texts)
    assert chisquare(counts, expected).pvalue > MIN_P
    alone = first_tokens(drafted(shape, num_models, 40), 2, rule.sampled)
    assert np.array_equal(alone, texts[:40])  # texts do not depend on the batch


def test_texts_that_a_grammar_guides_have_the_distribution_of_the_allowed_tokens():
    """What is sampled in place of a forbidden token does not depend on the draws that led to it."""
    tokens = first_tokens(drafted(Chains(1, 1), 1), 1, LEVIATHAN.sampled, Without(0))[:, 0]
    p = torch.softmax(AFTER[VOCAB, 1:].double() / TEMPERATURE, -1).numpy()
    assert 0 not in tokens
    assert chisquare(np.bincount(tokens, minlength=VOCAB)[1:], len(tokens) * p).pvalue > MIN_P


# Wrong rules: a rejected draw stays in the residual; after draws without replacement q is not renormalised.
RESIDUAL_FORGOTTEN = SamplingRule(lambda p, draws: (recursive_rejection(p, draws)[0], p))
COUNTED_WITH_REPLACEMENT = SPECINFER


@pytest.mark.parametrize(
    ("rule", "shape"),
    [(RESIDUAL_FORGOTTEN, Chains(1, 2)), (COUNTED_WITH_REPLACEMENT, Branching((3, 2))), (K_SEQ, Branching((3, 1)))],
)
def test_a_wrong_rule_is_caught(rule, shape):
    counts, expected = counts_and_expected(first_tokens(drafted(shape, 1), 2, rule.sampled))
    assert chisquare(counts, expected).pvalue < MIN_P


def test_chosen_tokens_beside_drawn_ones_keep_the_distribution():
    """For example tokens of a pool, which count as draws from a distribution with only that token."""
    drawn = drafted(Chains(2, 1), 1)
    blended, arrays = drawn.proposals, []
    for tree in drawn:
        token = next((t for t in range(VOCAB) if t not in tree.token_ids), None)
        arrays.append(tree if token is None else with_root(tree, token))
    trees = TreeBatch.of(arrays)
    shift = trees.starts - drawn.starts
    trees.proposals = type(blended)(blended.nodes + shift[drawn.tree_of[blended.nodes]], blended.rows, blended.log_q)
    for rule in (SPECINFER, K_SEQ):
        counts, expected = counts_and_expected(first_tokens(trees, 2, rule.sampled))
        assert chisquare(counts, expected).pvalue > MIN_P


def test_draws_stay_draws_if_another_drafter_is_named_first():
    drawn, other = drafted(Chains(2, 1), 1, 5), TreeBatch.of([chain_tree([1])] * 5)
    blended = blend([other, drawn], 8)
    assert blended.proposals is not None
    assert np.array_equal(blended.token_ids[blended.proposals.nodes], drawn.token_ids[drawn.proposals.nodes])


def with_root(tree, token: int):
    """The tree with one more token below its root, as its last node."""
    root = chain_tree([token])
    columns = (np.concatenate((getattr(tree, name), getattr(root, name))) for name in vars(tree))
    return type(tree)(*columns)


def test_small_models_draft_with_the_target_s_noise_where_texts_are_sampled_greedily():
    """Texts equal those of plain sampling, and a draft model equal to the target drafts exactly these."""
    plain = first_tokens(TreeBatch.empty(200), 3, SampledLogits)
    other = Beams(2, 2).grow([ToyModel(SEEDS[0])], texts_of(200), TEMPERATURE)
    assert np.array_equal(first_tokens(other, 3, SampledLogits), plain)


# RSD, Figure 1: drafts from Ber(p), target Ber(q), two draws.
@pytest.mark.parametrize(("p", "q"), [(0.1, 0.9), (0.3, 0.6), (0.5, 0.5), (0.8, 0.15)])
def test_the_bernoulli_example(p, q):
    num = 40_000
    target, draft = (torch.tensor([[1 - probability, probability]]).repeat(num, 1) for probability in (q, p))
    rng = torch.Generator().manual_seed(3)
    pairs = torch.multinomial(draft, 2, replacement=True, generator=rng)
    first = pairs[:, :1]
    without = torch.cat((first, 1 - first), 1)
    uniform = torch.rand((num, 2), generator=rng, dtype=torch.float64)
    rows, log_q = torch.zeros_like(pairs), draft[:1].log()

    def share(rule, tokens) -> float:
        return float((rule.draw(target, Draws(tokens, rows, log_q, uniform))[0] >= 0).double().mean())

    probability = min(p, q) + min(1 - p, 1 - q)  # of accepting one draw
    left = [max(0, q - p), max(0, p - q)]
    residual = np.array(left[::-1]) / max(sum(left), 1e-12)
    again = min(1 - p, residual[0]) + min(p, residual[1])
    assert share(RSD, without) == pytest.approx(1, abs=1e-9)
    expected = probability + (1 - probability) * again if probability < 1 else 1
    assert share(SPECINFER, pairs) == pytest.approx(expected, abs=0.01)
    assert share(K_SEQ, pairs) == pytest.approx(k_seq_by_hand(p, q), abs=0.01)


def k_seq_by_hand(p: float, q: float) -> float:
    """The acceptance 1 - (1 - beta)^2 at the least rho for which it is at most rho beta, found by trying many."""
    for rho in np.linspace(1, 2, 100_001):
        beta = min(p, q / rho) + min(1 - p, (1 - q) / rho)
        if 1 - (1 - beta) ** 2 <= rho * beta:
            return 1 - (1 - beta) ** 2
    raise AssertionError


def test_truncation_is_the_paper_s_equation_and_stable():
    perturbed = torch.tensor([[2.0, 1.0, -3.0], [0.5, 0.4, 0.3]], dtype=torch.float64)
    bound = torch.tensor([[-1.0], [3.0]], dtype=torch.float64)
    plain = -torch.log(torch.exp(-bound) - torch.exp(-perturbed[:, :1]) + torch.exp(-perturbed))
    torch.testing.assert_close(truncated(bound, perturbed), plain)
    far = truncated(torch.tensor([[-800.0]], dtype=torch.float64), torch.tensor([[900.0, -700.0]], dtype=torch.float64))
    assert far.isfinite().all() and far.tolist() == [[-800.0, -800.0]]


def test_stochastic_beams_are_a_sample_without_replacement():
    """The first of the sampled two-token paths has the model's distribution, and no path is drawn twice."""
    trees = drafted(StochasticBeams(3, 2), 1)
    p = torch.softmax(ToyModel(SEEDS[0]).table.double() / TEMPERATURE, -1).numpy()
    firsts = np.zeros(VOCAB)
    for tree in trees:
        deep = tree.parents >= 0
        paths = set(zip(tree.token_ids[tree.parents[deep]].tolist(), tree.token_ids[deep].tolist(), strict=True))
        assert len(paths) == deep.sum() == 3
        firsts[tree.token_ids[0]] += 1
    assert chisquare(firsts, p[VOCAB] * NUM_TEXTS).pvalue > MIN_P


def test_growing_trees_keep_parents_before_children_in_every_tree():
    trees = GrowingTrees(3)
    first = trees.add(np.array([2, 0, 2]), np.array([-1, -1, -1]), np.array([5, 6, 7]), np.zeros(3))
    assert first.tolist() == [0, 0, 1]
    trees.add(np.array([0, 2]), np.array([0, 1]), np.array([8, 9]), np.array([-1.0, -2.0]))
    batch = trees.batch()
    assert batch.sizes.tolist() == [2, 0, 3] and batch.token_ids.tolist() == [6, 8, 5, 7, 9]
    assert batch.parents.tolist() == [-1, 0, -1, -1, 1]
