"""Training stops early, returns the weights of the best epoch, and takes sparse steps."""

import dataclasses

import numpy as np
import pytest
import torch
from ctr_world import AS_OF, make_features, make_world
from sklearn.metrics import roc_auc_score

from laserbatch.ctr.adaptors import rlmrec, trawl
from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.feature_set import SIDES, SideVectors, fit_basis
from laserbatch.ctr.knowledge import build_knowledge
from laserbatch.ctr.layers import EntityEmbedding
from laserbatch.ctr.loop import default_batch_size, fit, predict
from laserbatch.ctr.networks import ADAPTORS
from laserbatch.ctr.settings import CtrSettings
from laserbatch.ctr.training import build_network, train_model

SETTINGS = CtrSettings(max_epochs=6, learning_rate=0.02, patience=1)


@pytest.fixture(scope="module")
def data(world):
    return build_dataset(world, AS_OF, SETTINGS)


@pytest.fixture(scope="module")
def small():
    """A world small enough for the pretended device, which is slow."""
    return make_world(num_users=60, num_items=40, num_interactions=900, num_cold=10)


@pytest.fixture(scope="module")
def small_data(small):
    return build_dataset(small, AS_OF, SETTINGS)


def test_the_model_ends_with_the_weights_of_its_best_epoch_and_no_bias(data):
    network = build_network("dcnv2", data, None, SETTINGS, seed=0)
    fitted = fit(network, data, SETTINGS, seed=0)
    labels, scores = data.labels[data.validation], predict(network, data, data.validation)
    assert roc_auc_score(labels, scores) == pytest.approx(fitted.best_auc, abs=1e-6)
    assert 1 <= fitted.best_epoch <= SETTINGS.max_epochs and scores.mean() == pytest.approx(labels.mean(), abs=1e-4)


def test_sparse_steps_learn_what_dense_ones_do_and_touch_only_the_rows_of_a_batch(data, monkeypatch):
    monkeypatch.setattr("laserbatch.ctr.layers.MIN_SPARSE_ROWS", 1)
    settings = CtrSettings(max_epochs=3, patience=3, learning_rate=0.02)
    network = build_network("dcnv2", data, None, settings, seed=0)
    before = network.inputs.user_embedding.embedding.weight.detach().clone()
    assert all(part.embedding.sparse for part in network.modules() if isinstance(part, EntityEmbedding))
    checkpoints = []
    fitted = fit(network, data, settings, seed=0, on_epoch=lambda progress: checkpoints.append(progress.epoch))
    assert fitted.best_auc > 0.6 and checkpoints == [1, 2, 3]
    trained = set(
        network.inputs.user_embedding.codes[torch.from_numpy(data.users[data.train]).long()].flatten().tolist()
    )
    still = [row for row in range(len(before)) if row not in trained]
    after = network.inputs.user_embedding.embedding.weight
    assert still and torch.equal(after[still], before[still]) and not torch.equal(after, before)


def test_a_last_batch_of_one_row_is_no_harm(data):
    settings = CtrSettings(max_epochs=1)
    odd = dataclasses.replace(data, train=data.train[:513])
    network = build_network("din", odd, None, settings, seed=0)
    fit(network, odd, settings, seed=0)
    assert np.isfinite(predict(network, odd, odd.test)).all()


def test_batches_grow_with_the_rows():
    assert [default_batch_size(rows) for rows in (100, 5_000, 20_000, 100_000, 10_000_000)] == [
        512,
        512,
        512,
        2048,
        8192,
    ]


@pytest.mark.parametrize("name", ["din", "dcnv2"])
def test_networks_are_trained_on_a_device(name, small_data, a_device):
    settings = CtrSettings(max_epochs=1)
    network = build_network(name, small_data, None, settings, seed=0)
    assert next(network.parameters()).is_cuda
    checkpoints = []
    fit(network, small_data, settings, seed=0, on_epoch=checkpoints.append)
    again = build_network(name, small_data, None, settings, seed=1)
    fit(again, small_data, settings, seed=0, start=checkpoints[-1])
    scores = [predict(each, small_data, small_data.test) for each in (network, again)]
    assert np.isfinite(scores[0]).all() and np.array_equal(*scores)


def test_din_without_fields_of_several_values_is_trained_on_a_device(small_data, a_device):
    """Under autocast its item embeddings are float32, and the weights of the history bfloat16."""
    single = tuple(field for field in small_data.item_fields if field.codes.shape[1] == 1)
    network = build_network("din", dataclasses.replace(small_data, item_fields=single), None, SETTINGS, seed=0)
    assert not network.inputs.item_embedding.has_bags
    fit(network, small_data, CtrSettings(max_epochs=1), seed=0)


@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_adaptors_are_trained_on_a_device(adaptor, small, small_data, a_device, monkeypatch):
    for module in (trawl, rlmrec):
        monkeypatch.setattr(module, "NUM_STEPS", 4)
    settings = CtrSettings(max_epochs=1, adaptor=adaptor)
    knowledge = build_knowledge(small, small_data, {"relaxed": make_features(small)}, AS_OF, settings)["relaxed"]
    training = train_model("din", small_data, knowledge, settings, seed=0)
    assert next(training.model.parameters()).is_cuda and np.isfinite(training.scores).all()


@pytest.mark.parametrize("length", [1e-30, 1e-6, 1e30, 1e37])
def test_the_length_of_vectors_does_not_matter(length):
    vectors = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)

    def reduced(of_both):
        sides = {side: SideVectors(of_both, np.zeros((40, 2), np.int32), np.ones(2, np.int64)) for side in SIDES}
        return fit_basis({"own": sides}, dict.fromkeys(SIDES, np.ones(40, bool)), 3).reduce(sides)["user"].vectors

    assert np.allclose(reduced(vectors * np.float32(length)), reduced(vectors), atol=1e-3)
    assert np.abs(reduced(np.ones_like(vectors) * np.float32(length))).max() < 1e-3  # equal vectors
    assert not reduced(vectors * 0).any()


def test_the_largest_directions_of_wide_vectors_are_computed_alone(monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(40, 12)).astype(np.float32)
    sides = {side: SideVectors(vectors, np.zeros((40, 2), np.int32), np.ones(2, np.int64)) for side in SIDES}
    expected = fit_basis({"own": sides}, dict.fromkeys(SIDES, np.ones(40, bool)), 3).directions
    monkeypatch.setattr("laserbatch.ctr.feature_set.MAX_FULL_DIM", 4)
    assert np.allclose(fit_basis({"own": sides}, dict.fromkeys(SIDES, np.ones(40, bool)), 3).directions, expected)
