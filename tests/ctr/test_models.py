"""Each model against its paper's equations, written out slowly; and the parts that models share."""

import numpy as np
import pytest
import torch
from ctr_world import AS_OF, make_features

from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.fields import Field
from laserbatch.ctr.knowledge import build_knowledge
from laserbatch.ctr.layers import CtrBatch, Dice, EntityEmbedding
from laserbatch.ctr.loop import RowTensors, predict
from laserbatch.ctr.networks import CrossNetwork, LocalActivationUnit
from laserbatch.ctr.settings import CtrSettings
from laserbatch.ctr.training import build_network

SETTINGS = CtrSettings()


@pytest.fixture(scope="module")
def data(world):
    return build_dataset(world, AS_OF, SETTINGS)


@pytest.fixture(scope="module")
def knowledge(world, data):
    return build_knowledge(world, data, {"relaxed": make_features(world)}, AS_OF, SETTINGS)["relaxed"]


def test_cross_network_follows_equation_1():
    network = CrossNetwork(5, 3)
    x0 = torch.randn(4, 5)
    x = x0
    for layer in network.layers:
        x = x0 * (x @ layer.weight.T + layer.bias) + x
    assert torch.allclose(network(x0), x, atol=1e-6)


def test_cross_layers_that_would_take_all_memory_are_refused(data):
    with pytest.raises(CtrError, match=r"inputs of width 18005, .* at most 16384\. Give tables with fewer columns"):
        build_network("dcnv2", data, None, CtrSettings(embedding_dim=2000), 0)


def test_tables_whose_columns_make_trainings_slow_are_named(world, monkeypatch, caplog):
    monkeypatch.setattr("laserbatch.ctr.dataset.MAX_USUAL_FIELDS", 2)
    build_dataset(world, AS_OF, SETTINGS)
    assert "models read 3 columns of items: a training of din or dcnv2 may take hours" in caplog.text


def test_activation_unit_is_a_network_over_history_target_difference_and_product():
    unit = LocalActivationUnit(6)
    liked, target, rows = torch.randn(5, 6), torch.randn(3, 6), torch.tensor([0, 0, 2, 2, 2])
    w1, w4 = torch.randn(32, 6), torch.randn(32, 6)
    w2, w3 = torch.randn(32, 6), torch.randn(32, 6)
    with torch.no_grad():
        unit.of_history.weight.copy_(w1 + w3)
        unit.of_target.weight.copy_(w2 - w3)
        unit.of_product.weight.copy_(w4)
    repeated = target[rows]
    joined = torch.cat([liked, repeated, liked - repeated, liked * repeated], dim=-1)
    hidden = joined @ torch.cat([w1, w2, w3, w4], dim=1).T + unit.of_target.bias
    assert torch.allclose(unit(liked, torch.arange(5), target, rows), unit.score(unit.activation(hidden)), atol=1e-4)


def test_dice_with_alpha_one_is_the_identity_and_with_zero_gates():
    dice, s = Dice(3), torch.randn(64, 3)
    gated = dice(s)
    p = torch.sigmoid((s - s.mean(0)) / torch.sqrt(s.var(0, unbiased=False) + 1e-8))
    assert torch.allclose(gated, p * s, atol=1e-5)
    with torch.no_grad():
        dice.alpha.fill_(1.0)
    assert torch.allclose(dice(s), s, atol=1e-6)


def test_entity_embedding_is_the_mean_over_a_bag_and_zero_for_padding():
    fields = (Field("id", np.array([[2], [1]]), 3), Field("tags", np.array([[2, 3], [3, 0]]), 4))
    module = EntityEmbedding(fields, 4)
    table = module.embedding.weight
    # Rows: 0 is absent; codes 1, 2 of the first field are rows 1, 2; codes 1, 2, 3 of the second are rows 3, 4, 5.
    assert torch.allclose(module(torch.tensor([0]))[0], torch.cat([table[2], (table[4] + table[5]) / 2]))
    assert torch.allclose(module(torch.tensor([1]))[0], torch.cat([table[1], table[5]]))


def test_items_of_a_batch_are_found_among_its_distinct_ones(data):
    rows = RowTensors(data, torch.device("cpu"))
    for size in (1, 2, 4 * data.num_items):  # few rows have fewer distinct items than the catalogue, many have all
        numbers = data.train[-size:]
        batch = rows.batch(torch.from_numpy(numbers).long())
        assert batch.distinct[batch.items].tolist() == data.items[numbers].tolist()
        liked = [data.liked[data.starts[row] : data.ends[row]] for row in numbers]
        assert batch.distinct[batch.liked].tolist() == np.concatenate(liked).tolist()
        assert len(batch.distinct.unique()) == len(batch.distinct) <= data.num_items


@pytest.mark.parametrize("model", ["din", "dcnv2"])
def test_a_prediction_does_not_depend_on_its_batch(model, data, knowledge):
    network = build_network(model, data, knowledge, SETTINGS, seed=0)
    together = predict(network, data, data.test[:40])
    alone = np.concatenate([predict(network, data, data.test[n : n + 1]) for n in range(40)])
    assert np.allclose(together, alone, atol=1e-6)


def test_attention_sums_over_each_rows_own_history(data):
    """Eq. 3, row by row: v_U = sum_j a(e_j, v_A) e_j; it is 0 for a row without history."""
    network = build_network("din", data, None, SETTINGS, seed=0).eval()
    seen = {}
    network.mlp.register_forward_pre_hook(lambda module, inputs: seen.update(row=inputs[0]))
    liked, rows, offsets = torch.tensor([5, 6]), torch.tensor([0, 0]), torch.tensor([0, 2])
    items = torch.arange(data.num_items)
    network(CtrBatch(torch.tensor([1, 2]), items, torch.tensor([3, 4]), torch.zeros(2, 5), liked, offsets, rows))
    embed, unit = network.inputs.item_embedding, network.activation_unit
    target = embed(torch.tensor([3]))
    first, liked = torch.tensor([0]), [embed(torch.tensor([j])) for j in (5, 6)]
    expected = sum(unit(vector, first, target, first) * vector for vector in liked)
    interest = seen["row"][:, -network.inputs.item_dim :]
    assert torch.allclose(interest[0], expected[0], atol=1e-6) and (interest[1] == 0).all()
