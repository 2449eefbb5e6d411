"""Training of one network: binary cross-entropy, Adam, early stopping on validation AUC. Never looks at the test part.

Rows are permuted and indexed as whole tensors; there is no data loader, for there is nothing to load.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.dataset import CtrData
from laserbatch.ctr.judging import auc
from laserbatch.ctr.settings import CtrSettings

PREDICTION_BATCH = 8192


@dataclass(frozen=True)
class Fit:
    """What a training came to.

    Attributes
    ----------
    best_epoch : the epoch, from 1, whose weights the model now has.
    num_epochs : epochs trained.
    validation_auc : of `best_epoch`.
    """

    best_epoch: int
    num_epochs: int
    validation_auc: float


def fit(model: nn.Module, data: CtrData, settings: CtrSettings, seed: int) -> Fit:
    """Train a model in place; it ends with the weights of its best epoch on validation.

    Parameters
    ----------
    model : maps (users, items, history) numbers to logits, as DIN and DCNv2 do.
    seed : of the order of rows and of dropout.
    """
    device = next(model.parameters()).device
    users, items, history = (torch.from_numpy(array).to(device) for array in (data.users, data.items, data.history))
    labels = torch.from_numpy(data.labels).to(device)
    train = torch.from_numpy(data.train).to(device)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    batch_size = settings.batch_size or default_batch_size(len(train))
    order = torch.Generator().manual_seed(seed)
    best, best_weights, epoch = Fit(0, 0, -math.inf), {}, 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # dropout draws from the global generator
        while epoch < settings.max_epochs and epoch - best.best_epoch < settings.patience:
            epoch += 1
            model.train()
            for rows in train[torch.randperm(len(train), generator=order).to(device)].split(batch_size):
                if len(rows) == 1 and len(train) > 1:
                    continue  # batch statistics need two rows
                logits = model(users[rows], items[rows], history[rows])
                loss = F.binary_cross_entropy_with_logits(logits, labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            found = auc(data.labels[data.validation], predict(model, data, data.validation))
            if found > best.validation_auc:
                best = Fit(epoch, epoch, found)
                best_weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best_weights)
    return Fit(best.best_epoch, epoch, best.validation_auc)


def default_batch_size(num_rows: int) -> int:
    """The power of two that gives about 40 steps an epoch, from 512 to 8,192 rows."""
    return int(2 ** np.clip(np.round(np.log2(num_rows / 40)), 9, 13))


@torch.inference_mode()
def predict(model: nn.Module, data: CtrData, rows: np.ndarray) -> np.ndarray:
    """Probabilities of rows: float64 (len(rows),)."""
    device = next(model.parameters()).device
    model.eval()
    parts = []
    for start in range(0, len(rows), PREDICTION_BATCH):
        batch = rows[start : start + PREDICTION_BATCH]
        inputs = (torch.from_numpy(array[batch]).to(device) for array in (data.users, data.items, data.history))
        parts.append(torch.sigmoid(model(*inputs).double()).cpu().numpy())
    return np.concatenate(parts) if parts else np.zeros(0)
