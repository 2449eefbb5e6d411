"""Trains any of the models: fits it on the training rows, stops by validation, and scores the test rows."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from laserbatch.ctr.adaptors.adaptor import Adaptor
from laserbatch.ctr.dataset import CtrData, ModelRows
from laserbatch.ctr.gbdt import GbdtColumns, fit_gbdt, predict_gbdt
from laserbatch.ctr.knowledge import Knowledge
from laserbatch.ctr.loop import Progress, fit, predict
from laserbatch.ctr.networks import DIN, DCNv2, RowInputs
from laserbatch.ctr.settings import CtrSettings, ModelName

MODEL_TITLES: dict[ModelName, str] = {"din": "DIN", "dcnv2": "DCNv2", "gbdt": "LightGBM"}
NETWORKS: dict[ModelName, type[DIN] | type[DCNv2]] = {"din": DIN, "dcnv2": DCNv2}


@dataclass(frozen=True)
class Training:
    """A fitted model, and its predictions for the test rows, `data.test`."""

    model: Any  # a network, or a LightGBM booster
    best_epoch: int  # the epoch (for trees, the round) that validation chose
    validation_auc: float
    train_s: float
    scores: np.ndarray  # float32 (len(data.test),) probabilities


def train_model(
    name: ModelName,
    data: CtrData,
    knowledge: Knowledge | None,
    settings: CtrSettings,
    seed: int,
    start: Progress | None = None,
    on_epoch: Callable[[Progress], None] | None = None,
) -> Training:
    """Train one model from one seed, which alone decides initial weights, order of rows and dropout.

    `loop.fit` describes `start` and `on_epoch`; trees, which train quickly, always begin anew.
    """
    start_s = time.perf_counter()
    if name == "gbdt":
        columns = GbdtColumns(data, knowledge)
        model = fit_gbdt(columns, data, seed)
        best_epoch, validation_auc = model.best_iteration, float(model.best_score["valid_0"]["auc"])
        scores = predict_gbdt(model, columns, data.test)
    else:
        model = build_network(name, data, knowledge, settings, seed)
        if start is None and knowledge is not None:
            inputs = model.inputs
            assert isinstance(inputs, RowInputs) and inputs.knowledge is not None
            _fit_adaptor(inputs.knowledge, data, seed)
        fitted = fit(model, data, settings, seed, start, on_epoch)
        best_epoch, validation_auc = fitted.best_epoch, fitted.best_auc
        scores = predict(model, data, data.test)
    return Training(model, best_epoch, validation_auc, time.perf_counter() - start_s, scores.astype(np.float32))


def _fit_adaptor(adaptor: Adaptor, data: CtrData, seed: int) -> None:
    """Fit the adaptor to behaviour. A resumed training skips this, since its weights include the result."""
    rows = data.train[data.labels[data.train] > 0]
    users, items = (torch.from_numpy(of[rows]).long().to(adaptor.ids_0.device) for of in (data.users, data.items))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adaptor.fit_positives(users, items)


def build_network(
    name: ModelName, data: ModelRows, knowledge: Knowledge | None, settings: CtrSettings, seed: int
) -> torch.nn.Module:
    """Build a network with seeded weights, on the GPU if there is one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = NETWORKS[name](RowInputs(data, knowledge, settings), settings)
    return network.to("cuda" if torch.cuda.is_available() else "cpu")
