"""Each way of using texts against its paper's equations, written out slowly; and that it helps where it must."""

import numpy as np
import pytest
import torch

from laserbatch.ctr.fields import Field
from laserbatch.ctr.inputs import ADAPTORS
from laserbatch.ctr.layers import Batch

NUM_USERS, NUM_ITEMS, DIM = 9, 7, 6


def make(name, seed=0):
    """An adaptor of random vectors; user 3 and item 3 have no text."""
    torch.manual_seed(seed)
    vectors = [np.random.default_rng(side).normal(size=(n, DIM)).astype(np.float32) for side, n in enumerate((9, 7))]
    for of_side in vectors:
        of_side[3] = 0
    ids = [Field("id", np.arange(2, 2 + len(of_side))[:, None], 2 + len(of_side)) for of_side in vectors]
    return ADAPTORS[name](tuple(vectors), tuple(ids)).eval(), *map(torch.from_numpy, vectors)


def batch(users, items, histories=None):
    histories = [[] for _ in users] if histories is None else histories
    lengths = torch.tensor([len(one) for one in histories])
    return Batch(
        torch.tensor(users),
        torch.tensor(items),
        torch.zeros(len(users), 5),
        torch.tensor([item for one in histories for item in one], dtype=torch.int64),
        lengths.cumsum(0) - lengths,
        torch.repeat_interleave(lengths),
    )


def test_linear_is_a_layer_of_each_sides_vector_and_of_their_product():
    module, users, items = make("linear")
    user, item = users[5], items[2]
    layers = *module.of_sides, module.of_product
    expected = [of.weight @ v + of.bias for of, v in zip(layers, (user, item, user * item), strict=True)]
    assert torch.allclose(module(batch([5], [2]))[0], torch.cat(expected), atol=1e-6)


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


@pytest.mark.parametrize("name", ["linear", "kar"])
def test_who_has_no_text_gets_a_learned_default(name):
    module, *_ = make(name)
    with torch.no_grad():
        module.default[0] = 7.0
    out = module(batch([3, 5], [2, 2]))
    size = module.default.shape[1]
    assert out.shape == (2, module.out_dim) and (out[0, :size] == 7).all() and (out[1, :size] != 7).all()
