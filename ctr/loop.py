"""The training loop of the networks, and their predictions.

Training never looks at the test part. Rows are permuted and gathered by index arrays from columns that stay as they
are, so that there is no data loader.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.dataset import CtrData, Rows
from laserbatch.ctr.layers import CtrBatch
from laserbatch.ctr.settings import CtrSettings

PREDICTION_BATCH = 8192


class RowTensors:
    """A data set's columns as tensors, of which batches are gathered; on a CPU they share the arrays' memory."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self._columns = [
            torch.from_numpy(column).to(device)
            for column in (rows.users, rows.items, rows.past, rows.starts, rows.ends, rows.liked)
        ]

    def batch(self, index: torch.Tensor) -> CtrBatch:
        """The rows of some numbers, int64 (batch,)."""
        users, items, past, starts, ends, liked = self._columns
        starts = starts[index].long()
        lengths = ends[index] - starts
        offsets = lengths.cumsum(0) - lengths
        rows = torch.repeat_interleave(lengths)
        places = torch.arange(len(rows), device=rows.device) + (starts - offsets)[rows]
        return CtrBatch(users[index].long(), items[index].long(), past[index], liked[places].long(), offsets, rows)


class Fitted(NamedTuple):
    """The epoch that validation chose, from 1, and its AUC there."""

    best_epoch: int
    best_auc: float


def fit(model: nn.Module, data: CtrData, settings: CtrSettings, seed: int) -> Fitted:
    """Train a network in place, by binary cross-entropy and Adam; it ends with the weights of its best epoch.

    All its logits are then shifted by a constant, so that on validation rows the mean prediction is their base rate:
    what is stopped by AUC ranks well and may be 0.05 off. Training stops early by validation AUC; `seed` is of the
    order of rows and of dropout.
    """
    device = next(model.parameters()).device
    rows, labels = RowTensors(data, device), torch.from_numpy(data.labels).to(device)
    optimizers = _optimizers(model, settings)
    batch_size = default_batch_size(len(data.train))
    order = torch.Generator().manual_seed(seed)
    best, weights = Fitted(0, -math.inf), {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # dropout draws from the global generator
        for epoch in range(1, settings.max_epochs + 1):
            model.train()
            for numbers in torch.randperm(len(data.train), generator=order).split(batch_size):
                if len(numbers) == 1 and len(data.train) > 1:
                    continue  # batch statistics need two rows
                index = torch.from_numpy(data.train[numbers]).to(device).long()
                _step(model, rows.batch(index), labels[index], optimizers, settings.weight_decay)
            found = float(roc_auc_score(data.labels[data.validation], predict(model, data, data.validation)))
            if found > best.best_auc:
                best = Fitted(epoch, found)
                weights = {name: value.clone() for name, value in model.state_dict().items()}
            if epoch - best.best_epoch >= settings.patience:
                break
    model.load_state_dict(weights)
    _shift_to_base_rate(model, data)
    return best


@torch.no_grad()
def _shift_to_base_rate(model: nn.Module, data: CtrData) -> None:
    rate = data.labels[data.validation].mean()
    if 0 < rate < 1:
        logits = logit(predict(model, data, data.validation).clip(1e-9, 1 - 1e-9))
        shift, _ = brentq(lambda shift: expit(logits + shift).mean() - rate, -50, 50, full_output=True)
        last = model.logit
        assert isinstance(last, nn.Linear)
        last.bias.add_(float(shift))


def _optimizers(model: nn.Module, settings: CtrSettings) -> list[torch.optim.Optimizer]:
    """Adam in its fused form, and of embeddings with sparse gradients Adam on the rows that a batch touches."""
    sparse = [module.weight for module in model.modules() if isinstance(module, nn.Embedding) and module.sparse]
    dense = [weight for weight in model.parameters() if not any(weight is other for other in sparse)]
    rate = settings.learning_rate
    found: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, rate, weight_decay=settings.weight_decay, fused=True)]
    return found + [torch.optim.SparseAdam([weight], rate) for weight in sparse]


def _step(
    model: nn.Module,
    batch: CtrBatch,
    labels: torch.Tensor,
    optimizers: list[torch.optim.Optimizer],
    weight_decay: float,
) -> None:
    with torch.autocast("cuda", torch.bfloat16, enabled=labels.is_cuda):  # the one place of mixed precision
        logits = model(batch)
    loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers[1:]:  # L2 too only of the rows that are touched
        for weight in optimizer.param_groups[0]["params"]:
            touched = weight.grad.coalesce()
            values = touched.values() + weight_decay * weight.detach()[touched.indices()[0]]
            weight.grad = torch.sparse_coo_tensor(
                touched.indices(), values, weight.shape, is_coalesced=True, check_invariants=False
            )
    for optimizer in optimizers:
        optimizer.step()


def default_batch_size(num_rows: int) -> int:
    """The power of two that gives about 40 steps an epoch, from 512 to 8,192 rows."""
    return int(2 ** np.clip(np.round(np.log2(num_rows / 40)), 9, 13))


@torch.inference_mode()
def predict(model: nn.Module, data: Rows, rows: np.ndarray) -> np.ndarray:
    """Probabilities of rows: float64 (len(rows),)."""
    device = next(model.parameters()).device
    tensors = RowTensors(data, device)
    model.eval()
    parts = [
        torch.sigmoid(model(tensors.batch(index.to(device).long())).double()).cpu().numpy()
        for index in torch.from_numpy(np.asarray(rows)).split(PREDICTION_BATCH)
        if len(index)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)
