"""Each way of using texts, compared with slow versions of its paper's equations; and its gain where texts must help."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from laserbatch.ctr.adaptors import rlmrec, trawl
from laserbatch.ctr.adaptors.adaptor import info_nce
from laserbatch.ctr.adaptors.rlmrec import spread_back
from laserbatch.ctr.adaptors.trawl import MAX_POSITIVES, NUM_NEIGHBOURS, items_liked_together
from laserbatch.ctr.fields import Field
from laserbatch.ctr.layers import CtrBatch
from laserbatch.ctr.networks import ADAPTORS
from laserbatch.retrieval_pools.routing.lightgcn import normalised_adjacency

NUM_USERS, NUM_ITEMS, DIM = 9, 7, 6


def make(name, seed=0):
    """An adaptor of random vectors. User 3 and item 3 have no text."""
    torch.manual_seed(seed)
    vectors = [np.random.default_rng(side).normal(size=(n, DIM)).astype(np.float32) for side, n in enumerate((9, 7))]
    for of_side in vectors:
        of_side[3] = 0
    ids = [Field("id", np.arange(2, 2 + len(of_side))[:, None], 2 + len(of_side)) for of_side in vectors]
    return ADAPTORS[name](tuple(vectors), tuple(ids)).eval(), *map(torch.from_numpy, vectors)


def batch(users, items, histories=None):
    histories = [[] for _ in users] if histories is None else histories
    lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
    return CtrBatch(
        torch.tensor(users, dtype=torch.int64),
        torch.arange(7),
        torch.tensor(items, dtype=torch.int64),
        torch.zeros(len(users), 5),
        torch.tensor([item for history in histories for item in history], dtype=torch.int64),
        lengths.cumsum(0) - lengths,
        torch.repeat_interleave(lengths),
    )


def test_linear_is_a_layer_of_each_sides_vector_and_of_the_items_times_the_users_and_times_the_liked_items():
    module, users, items = make("linear")
    user, item, liked = users[5], items[2], (items[1] + items[3] + 2 * items[4]) / 4
    layers = *module.of_sides, module.of_product, module.of_liked
    inputs = user, item, user * item, liked * item
    expected = [of.weight @ v + of.bias for of, v in zip(layers, inputs, strict=True)]
    out = module(batch([8, 5], [1, 2], [[], [1, 3, 4, 4]]))
    assert torch.allclose(out[1], torch.cat(expected), atol=1e-6)
    assert torch.equal(out[0, -len(module.of_liked.bias) :], module.of_liked.bias)  # nothing liked


def test_kar_weighs_shared_and_dedicated_experts_by_a_gate_of_each_side():
    module, *sides = make("kar")

    def slow(side, number):
        r = sides[side][number]
        alpha = torch.softmax(module.gates[side](r), dim=0)
        outs = []
        for group in (module.shared, module.dedicated[side]):
            hidden = torch.relu(group.hidden(r)).view(2, -1)
            outs += [hidden[e] @ group.out_weight[e] + group.out_bias[e] for e in range(2)]
        mixed = sum(weight * out for weight, out in zip(alpha, outs, strict=True))
        return (mixed - mixed.mean()) / torch.sqrt(mixed.var(unbiased=False) + 1e-5)

    user, item = slow(0, 5), slow(1, 2)
    expected = torch.cat([user, item, user * item])
    assert torch.allclose(module(batch([5] * 12, [2] * 12))[7], expected, atol=1e-6)


def test_once_pools_liked_items_texts_by_attention_and_fuses_them_with_interests():
    module, users, items = make("once")

    def slow(user, liked):
        h = [module.of_content(items[number]) for number in liked if number != 3]  # item 3 has no text
        scores = torch.stack([module.query(torch.tanh(module.attention(texts))) for texts in h])
        pooled = (torch.softmax(scores, dim=0) * torch.stack(h)).sum(dim=0)
        return module.fusion(torch.cat([pooled, module.of_interests(users[user])]))

    user, item = slow(5, [1, 3, 4, 4, 6]), module.of_content(items[2])
    out = module(batch([8, 5], [1, 2], [[2, 0], [1, 3, 4, 4, 6]]))
    assert torch.allclose(out[1], torch.cat([user, item, user * item]), atol=1e-6)
    nothing = module.fusion(torch.cat([torch.zeros(32), module.of_interests(users[5])]))
    for history in ([], [3]):  # no liked item, or none with a text
        assert torch.allclose(module(batch([5], [2], [history]))[0, :32], nothing, atol=1e-6)


def test_trawl_pairs_items_with_those_that_most_of_their_users_liked():
    users = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    items = np.array([4, 5, 6, 4, 5, 5, 4, 6, 5, 9])  # three like 4 and 5, two of them 6, one 9
    left, right = items_liked_together(users, items)
    assert {item: right[left == item].tolist() for item in (4, 5, 6, 9)} == {
        4: [5, 6, 9], 5: [4, 6, 9], 6: [4, 5, 9], 9: [4, 5, 6],
    }  # fmt: skip
    left, right = items_liked_together(np.zeros(99, np.int64), np.arange(99))
    assert left.min() == 99 - MAX_POSITIVES  # the newest items
    assert np.bincount(left)[left.min() :].tolist() == [NUM_NEIGHBOURS] * MAX_POSITIVES


def test_info_nce_takes_the_same_item_for_no_negative():
    a, b, of_b = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([7, 8, 7, 9, 8])
    slow = 0.0
    for i in range(5):
        others = [j for j in range(5) if j == i or of_b[j] != of_b[i]]
        slow -= torch.log_softmax(torch.stack([a[i] @ b[j] / 0.5 for j in others]), dim=0)[others.index(i)] / 5
    assert torch.allclose(info_nce(a, b, of_b, 0.5), slow, atol=1e-6)


def two_tastes():
    """Interactions in which odd users like odd items; texts show it in one of six values."""
    rng = np.random.default_rng(3)
    sizes = 60, 40
    vectors = [rng.normal(size=(n, DIM)).astype(np.float32) for n in sizes]
    for of_side in vectors:
        of_side[:, 0] = np.where(np.arange(len(of_side)) % 2, 0.7, -0.7)
    users = np.repeat(np.arange(50), 6)  # the last ten users have no interactions
    items = 2 * rng.integers(0, 16, size=len(users)) + users % 2  # nor have items from 32 on
    ids = [Field("id", np.arange(2, 2 + n)[:, None], 2 + n) for n in sizes]
    for field, known in zip(ids, (50, 32), strict=True):
        field.codes[known:] = 1
    return vectors, ids, torch.from_numpy(users), torch.from_numpy(items)


@pytest.mark.parametrize("name", ["trawl", "rlmrec", "rlmrec_gen"])
def test_what_is_learned_of_behaviour_brings_tastes_together_also_of_new_entities(name, monkeypatch):
    vectors, ids, users, items = two_tastes()

    def learned(seed):
        torch.manual_seed(seed)
        module = ADAPTORS[name](tuple(vectors), tuple(ids))
        module.fit_positives(users, items)
        return module

    module = learned(0)
    of_users = module.of_entities(0, torch.arange(60)).detach()
    of_items = module.of_entities(1, torch.arange(40)).detach()
    scores = of_users @ of_items.T
    is_same = (torch.arange(60)[:, None] - torch.arange(40)) % 2 == 0
    for known, margin in ((scores[:50, :32], is_same[:50, :32]), (scores[50:, 32:], is_same[50:, 32:])):
        assert roc_auc_score(margin.flatten(), known.flatten()) > 0.75
    text = torch.from_numpy(vectors[0]) @ torch.from_numpy(vectors[1]).T
    assert roc_auc_score(is_same[50:, 32:].flatten(), text[50:, 32:].flatten()) < 0.7  # raw texts predict less
    for module in (rlmrec, trawl):
        monkeypatch.setattr(module, "NUM_STEPS", 5)
    first, again, other = (learned(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    assert not all(torch.equal(value, again[key]) for key, value in other.items())


def test_rlmrecs_gradient_of_a_step_is_that_of_the_graph_written_densely():
    """Propagation is left out of the backward pass, since it is its own gradient; autograd through it agrees."""
    users, items = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 2])
    adjacency = normalised_adjacency(users, items, 3, 3)
    layer_0, token = torch.randn(6, 4, requires_grad=True), torch.zeros(4, requires_grad=True)
    masked, targets = torch.tensor([1, 4]), torch.randn(6, 4)
    is_masked = torch.zeros(6, 1).index_fill(0, masked, 1.0)
    layer = start = layer_0 * (1 - is_masked) + token * is_masked
    total = start
    for _ in range(3):
        layer = adjacency.to_dense() @ layer
        total = total + layer
    (total / 4 * targets).sum().backward()
    of_masked, of_token = spread_back(adjacency, targets, masked)
    assert torch.allclose(of_masked, layer_0.grad, atol=1e-6) and torch.allclose(of_token, token.grad, atol=1e-6)


@pytest.mark.parametrize("name", ADAPTORS)
def test_nothing_at_all_is_no_error(name):
    none = torch.zeros(0, dtype=torch.int64)
    module, *_ = make(name)
    module.fit_positives(none, none)
    assert module(batch([3, 5], [2, 3], [[], [1]])).isfinite().all()
    assert module(batch([], [])).shape == (0, module.out_dim)
    for of_side in (module.vectors_0, module.vectors_1):
        of_side.zero_()  # no text
    module.fit_positives(torch.tensor([0, 1, 1]), torch.tensor([2, 2, 4]))
    module.train()
    out = module(batch([3, 5], [2, 3], [[], [1]]))
    out.sum().backward()
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ADAPTORS)
def test_who_has_no_text_gets_a_learned_default(name):
    module, *_ = make(name)
    with torch.no_grad():
        module.default[1] = 7.0
    if name.startswith("rlmrec"):
        module.fit_positives(torch.tensor([0, 1, 1]), torch.tensor([2, 2, 4]))  # before that, texts have no effect
    out = module(batch([5, 5], [3, 2]))
    of_item = slice(module.default.shape[1], 2 * module.default.shape[1])
    assert out.shape == (2, module.out_dim) and (out[0, of_item] == 7).all() and (out[1, of_item] != 7).all()
