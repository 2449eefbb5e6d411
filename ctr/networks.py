"""DIN, the Deep Interest Network (Zhou et al., KDD 2018), and DCNv2, Deep & Cross version 2 (Wang et al., WWW 2021).

Both map numbers of users and items (batch,) and of histories (batch, length) to logits (batch,). They are made of
fields by entity number, and of a variant's vectors and cluster ids. Their training never looks at the test part; rows
are permuted and indexed as whole tensors, so that there is no data loader.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.dataset import CtrData, Knowledge
from laserbatch.ctr.layers import Dice, RowInputs, mlp
from laserbatch.ctr.settings import CtrSettings

ATTENTION_SIZES = (32, 16)  # of DIN
NUM_CROSS_LAYERS = 2  # of DCNv2
PREDICTION_BATCH = 8192


class LocalActivationUnit(nn.Module):
    """a(e_j, v_A) of Eq. 3: how much a liked item speaks for the target.

    Its weights are not normalised, as in the paper: a user who liked much of a kind has more interest in it.
    """

    def __init__(self, item_dim: int) -> None:
        super().__init__()
        # [h, t, h - t, h * t] W = h (W1 + W3) + t (W2 - W3) + (h * t) W4: the same layer, with fewer multiplications.
        self.of_history = nn.Linear(item_dim, ATTENTION_SIZES[0], bias=False)
        self.of_target = nn.Linear(item_dim, ATTENTION_SIZES[0])
        self.of_product = nn.Linear(item_dim, ATTENTION_SIZES[0], bias=False)
        self.activation = nn.PReLU()
        self.score = mlp(ATTENTION_SIZES[0], ATTENTION_SIZES[1:], 0.0, nn.PReLU, out_dim=1)

    def forward(self, liked: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """liked (num_liked, item_dim), target (batch, item_dim), row of each liked item -> weights (num_liked, 1)."""
        product = liked * target.index_select(0, rows)
        of_target = self.of_target(target).index_select(0, rows)
        return self.score(self.activation(self.of_history(liked) + of_target + self.of_product(product)))


class DIN(nn.Module):
    """User, target and knowledge beside an attended history, into an MLP with Dice."""

    def __init__(self, data: CtrData, knowledge: Knowledge | None, settings: CtrSettings) -> None:
        super().__init__()
        self.inputs = RowInputs(data, knowledge, settings)
        self.activation_unit = LocalActivationUnit(self.inputs.item_dim)
        in_dim = self.inputs.out_dim + self.inputs.item_dim
        self.mlp = mlp(in_dim, settings.hidden_sizes, settings.dropout, Dice, out_dim=1)

    def forward(self, users: torch.Tensor, items: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        target = self.inputs.item_embedding(items)  # v_A, (batch, item_dim)
        liked, rows = self.inputs.liked_items(history)  # e_1 .. e_H of every row: (num_liked, item_dim), (num_liked,)
        weights = self.activation_unit(liked, target, rows)
        interest = torch.zeros_like(target).index_add(0, rows, weights * liked)  # v_U(A), Eq. 3
        row = torch.cat([self.inputs(users, items, target), interest], dim=1)
        return self.mlp(row).squeeze(1)


class CrossNetwork(nn.Module):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l (Eq. 1): each layer raises the order of explicit feature crosses by one."""

    def __init__(self, dim: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))

    def forward(self, x0: torch.Tensor) -> torch.Tensor:  # (batch, dim)
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class DCNv2(nn.Module):
    """DCNv2 in its parallel structure, over user, target, knowledge and the mean of the history."""

    def __init__(self, data: CtrData, knowledge: Knowledge | None, settings: CtrSettings) -> None:
        super().__init__()
        self.inputs = RowInputs(data, knowledge, settings)
        in_dim = self.inputs.out_dim + self.inputs.item_dim
        self.cross = CrossNetwork(in_dim, NUM_CROSS_LAYERS)
        self.deep = mlp(in_dim, settings.hidden_sizes, settings.dropout)
        self.logit = nn.Linear(in_dim + settings.hidden_sizes[-1], 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        target = self.inputs.item_embedding(items)
        liked, rows = self.inputs.liked_items(history)
        lengths = rows.bincount(minlength=len(target)).clamp(min=1).unsqueeze(1)
        mean_liked = torch.zeros_like(target).index_add(0, rows, liked) / lengths  # (batch, item_dim)
        x0 = torch.cat([self.inputs(users, items, target), mean_liked], dim=1)
        return self.logit(torch.cat([self.cross(x0), self.deep(x0)], dim=1)).squeeze(1)


@dataclass(frozen=True)
class Fit:
    """What a training came to: the epoch, from 1, whose weights the model now has, and its AUC on validation."""

    best_epoch: int
    validation_auc: float


def fit(model: nn.Module, data: CtrData, settings: CtrSettings, seed: int) -> Fit:
    """Train a network in place, by binary cross-entropy and Adam; it ends with the weights of its best epoch.

    Training stops early by validation AUC; `seed` is of the order of rows and of dropout.
    """
    device = next(model.parameters()).device
    users, items, history = (torch.from_numpy(array).to(device) for array in (data.users, data.items, data.history))
    labels = torch.from_numpy(data.labels).to(device)
    train = torch.from_numpy(data.train).to(device)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    batch_size = default_batch_size(len(train))
    order = torch.Generator().manual_seed(seed)
    best, best_weights, epoch = Fit(0, -math.inf), {}, 0
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
            found = float(roc_auc_score(data.labels[data.validation], predict(model, data, data.validation)))
            if found > best.validation_auc:
                best = Fit(epoch, found)
                best_weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best_weights)
    return best


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
