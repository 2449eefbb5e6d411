"""The training loop of the networks, and their predictions.

Training never reads the test part. There is no data loader: batches are gathered from unchanged columns by permuted
index arrays. After every epoch, all that the next epoch depends on can be written to a file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.dataset import CtrData, ModelRows
from laserbatch.ctr.layers import CtrBatch
from laserbatch.ctr.settings import CtrSettings

PREDICTION_BATCH = 8192


class RowTensors:
    """A data set's columns as tensors, from which batches are gathered; on a CPU they share the arrays' memory."""

    def __init__(self, rows: ModelRows, device: torch.device) -> None:
        self._num_items = rows.num_items
        columns = rows.users, rows.items, rows.past, rows.starts, rows.ends, rows.liked
        self._columns = [torch.from_numpy(column).to(device) for column in columns]

    def batch(self, index: torch.Tensor) -> CtrBatch:
        """Gather the rows with the numbers `index`, int64 (batch,)."""
        users, items, past, starts, ends, liked = self._columns
        starts = starts[index].long()
        lengths = ends[index] - starts
        offsets = lengths.cumsum(0) - lengths
        rows = torch.repeat_interleave(lengths)
        places = torch.arange(len(rows), device=rows.device) + (starts - offsets)[rows]
        numbers = torch.cat([items[index], liked[places]]).long()
        if len(numbers) > self._num_items:
            distinct = torch.arange(self._num_items, device=numbers.device)
        else:
            distinct, numbers = numbers.unique(return_inverse=True)
        of_rows, of_liked = numbers.tensor_split([len(index)])
        return CtrBatch(users[index].long(), distinct, of_rows, past[index], of_liked, offsets, rows)


@dataclass
class Progress:
    """The state of a training after an epoch: all that the next epoch depends on."""

    epoch: int = 0
    best_epoch: int = 0  # counted from 1; 0: none yet
    best_auc: float = -math.inf  # validation AUC
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # weights, best weights, Adam, generators


def fit(
    model: nn.Module,
    data: CtrData,
    settings: CtrSettings,
    seed: int,
    start: Progress | None = None,
    on_epoch: Callable[[Progress], None] | None = None,
) -> Progress:
    """Train a network in place, by binary cross-entropy and Adam; it ends with the weights of its best epoch.

    Training stops early by validation AUC. Then all logits are shifted by a constant, so that the mean prediction on
    validation rows is their base rate: a model stopped by AUC ranks well, but its mean may be off by 0.05. `seed`
    decides the order of rows and dropout. From `start`, a value that `on_epoch` received, training continues as if it
    had never stopped; on a GPU its dropout is drawn anew.
    """
    device = next(model.parameters()).device
    rows, labels = RowTensors(data, device), torch.from_numpy(data.labels).to(device)
    optimizers = _optimizers(model, settings)
    batch_size = default_batch_size(len(data.train))
    order = torch.Generator().manual_seed(seed)
    progress = replace(start) if start is not None else Progress()
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # dropout draws from the global generator
        if start is not None:
            _restore(start.tensors, model, optimizers, order)
        while progress.epoch < settings.max_epochs and progress.epoch - progress.best_epoch < settings.patience:
            model.train()
            for numbers in torch.randperm(len(data.train), generator=order).split(batch_size):
                if len(numbers) == 1 and len(data.train) > 1:
                    continue  # batch statistics need two rows
                index = torch.from_numpy(data.train[numbers]).to(device).long()
                _step(model, rows.batch(index), labels[index], optimizers, settings.weight_decay)
            auc = float(roc_auc_score(data.labels[data.validation], predict(model, data, data.validation)))
            progress.epoch += 1
            if auc > progress.best_auc:
                progress.best_epoch, progress.best_auc = progress.epoch, auc
                progress.tensors = {f"best.{name}": value.clone() for name, value in model.state_dict().items()}
            if on_epoch is not None:
                progress.tensors = {**progress.tensors, **_state(model, optimizers, order)}
                on_epoch(progress)
    best = {name.removeprefix("best."): of for name, of in progress.tensors.items() if name.startswith("best.")}
    model.load_state_dict(best)
    _shift_to_base_rate(model, data)
    return progress


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
    """Fused Adam, and for embeddings with sparse gradients a SparseAdam that updates only the rows of a batch."""
    sparse = [module.weight for module in model.modules() if isinstance(module, nn.Embedding) and module.sparse]
    dense = [weight for weight in model.parameters() if not any(weight is other for other in sparse)]
    rate = settings.learning_rate
    adam = torch.optim.Adam(dense, rate, weight_decay=settings.weight_decay, fused=True)
    return [adam, *(torch.optim.SparseAdam([weight], rate) for weight in sparse)]


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
    for optimizer in optimizers[1:]:  # L2 also applies only to the touched rows
        for weight in optimizer.param_groups[0]["params"]:
            touched = weight.grad.coalesce()
            values = touched.values() + weight_decay * weight.detach()[touched.indices()[0]]
            places, shape = touched.indices(), weight.shape
            weight.grad = torch.sparse_coo_tensor(places, values, shape, is_coalesced=True, check_invariants=False)
    for optimizer in optimizers:
        optimizer.step()


def _state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], order: torch.Generator
) -> dict[str, torch.Tensor]:
    tensors = {f"weights.{name}": value for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for parameter, of_parameter in optimizer.state_dict()["state"].items():
            for name, value in of_parameter.items():
                tensors[f"optimizer.{number}.{parameter}.{name}"] = torch.as_tensor(value)
    return tensors | {"generator.order": order.get_state(), "generator.global": torch.get_rng_state()}


def _restore(
    tensors: dict[str, torch.Tensor], model: nn.Module, optimizers: list[torch.optim.Optimizer], order: torch.Generator
) -> None:
    model.load_state_dict({name[8:]: value for name, value in tensors.items() if name.startswith("weights.")})
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, torch.Tensor | int]] = {}
        for name, value in tensors.items():
            kind, *of_optimizer = name.split(".", 3)
            if kind == "optimizer" and int(of_optimizer[0]) == number:
                is_count = number > 0 and of_optimizer[2] == "step"  # SparseAdam counts in Python
                state.setdefault(int(of_optimizer[1]), {})[of_optimizer[2]] = int(value) if is_count else value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    order.set_state(tensors["generator.order"])
    torch.set_rng_state(tensors["generator.global"])


def default_batch_size(num_rows: int) -> int:
    """The power of two, from 512 to 8,192 rows, that gives about 40 steps per epoch."""
    return int(2 ** np.clip(np.round(np.log2(num_rows / 40)), 9, 13))


@torch.inference_mode()
def predict(model: nn.Module, data: ModelRows, rows: np.ndarray) -> np.ndarray:
    """Predict the probabilities of rows: float64 (len(rows),)."""
    device = next(model.parameters()).device
    tensors = RowTensors(data, device)
    model.eval()
    parts = [
        torch.sigmoid(model(tensors.batch(index.to(device).long())).double()).cpu().numpy()
        for index in torch.from_numpy(np.asarray(rows)).split(PREDICTION_BATCH)
        if len(index)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)
