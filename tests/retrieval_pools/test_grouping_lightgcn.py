"""LightGCN finds planted communities, and depends on its arguments alone."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from laserbatch.retrieval_pools.routing import lightgcn
from laserbatch.retrieval_pools.routing.collaborative import cluster_embeddings
from laserbatch.retrieval_pools.routing.lightgcn import DIM, bpr_loss, normalised_adjacency, propagate, train_lightgcn

NUM_USERS, NUM_ITEMS, NUM_COMMUNITIES = 300, 200, 6


@pytest.fixture(scope="module")
def world():
    """User and item ids (12 interactions a user, 80 % inside the own community), and both sides' communities."""
    rng = np.random.default_rng(7)
    user_communities = rng.integers(0, NUM_COMMUNITIES, NUM_USERS)
    item_communities = rng.integers(0, NUM_COMMUNITIES, NUM_ITEMS)
    users = np.repeat(np.arange(NUM_USERS), 12)
    inside = rng.random(len(users)) < 0.8
    items = [
        rng.choice(np.flatnonzero(item_communities == user_communities[user])) if own else rng.integers(NUM_ITEMS)
        for user, own in zip(users, inside, strict=True)
    ]
    return users, np.array(items), user_communities, item_communities


def _string_ids(prefix, numbers):
    return pa.array([f"{prefix}{number:04d}" for number in numbers])


def _pairs(user_ids, item_ids):
    return pa.table({"user_id": user_ids, "item_id": item_ids})


def test_planted_communities_are_recovered_on_both_sides(world):
    users, items, user_communities, item_communities = world
    trained = train_lightgcn(_pairs(_string_ids("u", users), _string_ids("i", items)))
    for embeddings, communities in ((trained["user"], user_communities), (trained["item"], item_communities)):
        assert embeddings.vectors.dtype == np.float32
        assert embeddings.vectors.shape == (len(embeddings.ids), DIM)
        groups = cluster_embeddings(embeddings.vectors, NUM_COMMUNITIES, seed=0)
        planted = [communities[int(entity_id[1:])] for entity_id in embeddings.ids.to_pylist()]
        assert adjusted_rand_score(planted, groups) > 0.8


def test_losses_fall_and_training_stops_at_the_plateau(world, monkeypatch):
    users, items, _, _ = world
    seen, is_over = [], lightgcn._on_plateau
    monkeypatch.setattr(lightgcn, "_on_plateau", lambda losses: seen.append(losses) or is_over(losses))
    monkeypatch.setattr(lightgcn, "MAX_STEPS", 500)
    train_lightgcn(_pairs(pa.array(users), pa.array(items)))
    losses = seen[-1]
    assert losses[-1] < 0.75 * losses[0]
    assert len(losses) < 500


def test_equal_arguments_give_equal_vectors_whatever_the_global_state_and_the_order(world):
    users, items, _, _ = world
    first = train_lightgcn(_pairs(pa.array(users), pa.array(items)), seed=3)
    torch.manual_seed(99)
    drawn_next = torch.rand(3)
    torch.manual_seed(99)
    np.random.seed(99)
    order = np.random.default_rng(1).permutation(np.r_[np.arange(len(users)), np.arange(50)])  # shuffled, with repeats
    second = train_lightgcn(_pairs(pa.array(users[order]), pa.array(items[order])), seed=3)
    assert torch.equal(torch.rand(3), drawn_next)  # training leaves the global random state unchanged
    for side in ("user", "item"):
        assert first[side].ids == second[side].ids
        np.testing.assert_array_equal(first[side].vectors, second[side].vectors)
    other = train_lightgcn(_pairs(pa.array(users), pa.array(items)), seed=4)
    assert not np.array_equal(first["user"].vectors, other["user"].vectors)


def test_propagation_equals_the_dense_formula_and_its_gradient_is_the_propagated_gradient():
    torch.manual_seed(0)
    users, items = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 1, 0, 2])
    interactions = torch.zeros(3, 3)
    interactions[users, items] = 1
    dense = torch.zeros(6, 6)  # Eq. 6
    dense[:3, 3:], dense[3:, :3] = interactions, interactions.T
    scale = torch.diag(dense.sum(dim=1).rsqrt())
    dense = scale @ dense @ scale
    layer_0 = torch.randn(6, 4, requires_grad=True)
    expected = (layer_0 + dense @ layer_0 + dense @ dense @ layer_0) / 3
    adjacency = normalised_adjacency(users, items, 3, 3)
    torch.testing.assert_close(propagate(adjacency, layer_0.detach(), num_layers=2), expected.detach())

    batch = users, items + 3, torch.tensor([2, 2, 0, 1, 1]) + 3
    bpr_loss(expected, *batch).backward()
    final = expected.detach().clone().requires_grad_()
    bpr_loss(final, *batch).backward()
    torch.testing.assert_close(propagate(adjacency, final.grad, num_layers=2), layer_0.grad)


def test_large_graphs_train_on_sampled_pairs(world, monkeypatch):
    monkeypatch.setattr("laserbatch.retrieval_pools.routing.lightgcn.MAX_PAIRS_PER_STEP", 500)
    users, items, user_communities, _ = world
    trained = train_lightgcn(_pairs(pa.array(users), pa.array(items)))
    groups = cluster_embeddings(trained["user"].vectors, NUM_COMMUNITIES, seed=0)
    assert adjusted_rand_score(user_communities, groups) > 0.8


def test_no_interactions_give_no_vectors():
    trained = train_lightgcn(_pairs(pa.array([], pa.string()), pa.array([], pa.string())))
    assert trained["user"].vectors.shape == (0, DIM)
    assert len(trained["item"].ids) == 0


def test_one_interaction_is_enough_to_run():
    trained = train_lightgcn(_pairs(pa.array([5]), pa.array([9])))
    assert trained["user"].ids.to_pylist() == [5]
    assert np.isfinite(trained["user"].vectors).all()


def test_users_beyond_the_training_are_folded_into_the_communities_of_the_others(world, monkeypatch):
    users, items, user_communities, item_communities = world
    monkeypatch.setattr(lightgcn, "MAX_INTERACTIONS", len(users) // 5)
    trained = train_lightgcn(_pairs(pa.array(users), pa.array(items)))
    assert trained["user"].ids.to_pylist() == sorted(set(users.tolist()))
    for embeddings, communities in ((trained["user"], user_communities), (trained["item"], item_communities)):
        groups = cluster_embeddings(embeddings.vectors, NUM_COMMUNITIES, seed=0)
        assert adjusted_rand_score(communities[embeddings.ids.to_numpy()], groups) > 0.7


@pytest.mark.parametrize("num_items", [NUM_ITEMS, NUM_ITEMS * 3 // 4])
def test_a_folded_user_has_the_vector_of_a_node_whose_own_embedding_is_zero(world, monkeypatch, num_items):
    users, items, _, _ = world
    user_index, item_index = users.astype(np.int32), items.astype(np.int32)
    has_user, has_item = np.arange(NUM_USERS) < NUM_USERS // 30, np.arange(NUM_ITEMS) < num_items
    monkeypatch.setattr(lightgcn, "FOLDED_AT_ONCE", 40)  # interactions
    graph = lightgcn._Graph.of(user_index, item_index, has_user, has_item)
    layer_0 = torch.randn(graph.num_users + num_items, DIM, generator=torch.Generator().manual_seed(0))
    of_users, of_items = lightgcn._folded_in(graph, layer_0, user_index, item_index, has_user, has_item)

    expected = propagate(graph.adjacency, layer_0, lightgcn.NUM_LAYERS).numpy()
    np.testing.assert_allclose(of_users[has_user], expected[: graph.num_users], rtol=1e-5)
    degrees = np.zeros(NUM_ITEMS, np.int64)
    degrees[:num_items] = np.bincount(graph.items.numpy(), minlength=num_items)
    is_known = degrees > 0
    of_graph = expected[graph.num_users :][is_known[:num_items]]
    np.testing.assert_allclose(of_items[is_known], of_graph, rtol=1e-5)
    assert (~is_known).any()
    layers = [layer_0]
    for _ in range(lightgcn.NUM_LAYERS - 1):
        layers.append(graph.adjacency @ layers[-1])
    below = np.zeros((NUM_ITEMS, DIM), np.float32)  # layers 0 to K - 1 of the items
    below[:num_items] = sum(layers).numpy()[graph.num_users :]
    for user in np.flatnonzero(~has_user)[::37]:
        own = np.unique(items[(users == user) & has_item[items]])
        weights = 1 / np.sqrt(len(own) * np.maximum(degrees[own], 1)) * (degrees[own] > 0)
        vector = (weights[:, None] * below[own]).sum(axis=0) / (lightgcn.NUM_LAYERS + 1)
        np.testing.assert_allclose(of_users[user], vector, rtol=1e-4, atol=1e-6)
    for item in np.flatnonzero(~is_known):
        own = np.unique(users[items == item])
        np.testing.assert_allclose(of_items[item], of_users[own].sum(axis=0) / np.sqrt(len(own)), rtol=1e-4, atol=1e-6)


def test_nobody_is_left_out_of_a_world_with_more_users_and_items_than_are_trained_of(world, monkeypatch):
    users, items, user_communities, item_communities = world
    monkeypatch.setattr(lightgcn, "MAX_NODES", NUM_ITEMS * 3 // 4)
    trained = train_lightgcn(_pairs(pa.array(users), pa.array(items)))
    for embeddings, communities in ((trained["user"], user_communities), (trained["item"], item_communities)):
        groups = cluster_embeddings(embeddings.vectors, NUM_COMMUNITIES, seed=0)
        assert adjusted_rand_score(communities[embeddings.ids.to_numpy()], groups) > 0.7
