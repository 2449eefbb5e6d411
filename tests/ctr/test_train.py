"""Training: it learns, stops, gives back the best epoch's weights, and repeats itself."""

import dataclasses

import numpy as np
import pytest
from ctr_world import AS_OF

from laserbatch.ctr import judging
from laserbatch.ctr.compare import build_network
from laserbatch.ctr.dataset import Knowledge, build_dataset
from laserbatch.ctr.settings import CtrError, CtrSettings
from laserbatch.ctr.train import default_batch_size, fit, predict

SETTINGS = CtrSettings(max_epochs=6, learning_rate=0.02, patience=1)


@pytest.fixture(scope="module")
def data(world):
    return build_dataset(world, AS_OF, SETTINGS)


def test_the_model_ends_with_the_weights_of_its_best_epoch(data):
    network = build_network("dcnv2", data, Knowledge(), SETTINGS, seed=0)
    fitted = fit(network, data, SETTINGS, seed=0)
    auc = judging.auc(data.labels[data.validation], predict(network, data, data.validation))
    assert auc == fitted.validation_auc
    assert fitted.num_epochs in (fitted.best_epoch, fitted.best_epoch + 1)


def test_training_lowers_the_loss_on_its_own_rows(data):
    network = build_network("dcnv2", data, Knowledge(), SETTINGS, seed=0)
    before = judging.logloss(data.labels[data.train], predict(network, data, data.train))
    fit(network, data, SETTINGS, seed=0)
    assert judging.logloss(data.labels[data.train], predict(network, data, data.train)) < before - 0.02


def test_seeds_differ_and_repeat(data):
    def predictions(seed):
        network = build_network("dcnv2", data, Knowledge(), SETTINGS, seed)
        fit(network, data, SETTINGS, seed)
        return predict(network, data, data.test)

    first = predictions(0)
    assert np.array_equal(first, predictions(0)) and not np.array_equal(first, predictions(1))


def test_a_last_batch_of_one_row_is_no_harm(data):
    settings = CtrSettings(max_epochs=1, batch_size=64)
    odd = dataclasses.replace(data, train=data.train[:65])
    network = build_network("din", odd, Knowledge(), settings, seed=0)
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


def test_a_device_that_is_not_there_is_named(data):
    with pytest.raises(CtrError, match="expected auto or cpu"):
        build_network("din", data, Knowledge(), CtrSettings(device="abacus"), seed=0)
