"""Training: it learns, stops, gives back the best epoch's weights, and repeats itself."""

import dataclasses

import numpy as np
import pytest
from ctr_world import AS_OF
from sklearn.metrics import log_loss, roc_auc_score

from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.networks import default_batch_size, fit, predict
from laserbatch.ctr.settings import CtrSettings
from laserbatch.ctr.training import build_network

SETTINGS = CtrSettings(max_epochs=6, learning_rate=0.02, patience=1)


@pytest.fixture(scope="module")
def data(world):
    return build_dataset(world, AS_OF, SETTINGS)


def test_the_model_ends_with_the_weights_of_its_best_epoch(data):
    network = build_network("dcnv2", data, None, SETTINGS, seed=0)
    fitted = fit(network, data, SETTINGS, seed=0)
    auc = roc_auc_score(data.labels[data.validation], predict(network, data, data.validation))
    assert auc == fitted.validation_auc and 1 <= fitted.best_epoch <= SETTINGS.max_epochs


def test_training_lowers_the_loss_on_its_own_rows(data):
    network = build_network("dcnv2", data, None, SETTINGS, seed=0)
    before = log_loss(data.labels[data.train], predict(network, data, data.train))
    fit(network, data, SETTINGS, seed=0)
    assert log_loss(data.labels[data.train], predict(network, data, data.train)) < before - 0.02


def test_seeds_differ_and_repeat(data):
    def predictions(seed):
        network = build_network("dcnv2", data, None, SETTINGS, seed)
        fit(network, data, SETTINGS, seed)
        return predict(network, data, data.test)

    first = predictions(0)
    assert np.array_equal(first, predictions(0)) and not np.array_equal(first, predictions(1))


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
