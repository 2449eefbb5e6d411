"""Deep Interest Network (Zhou et al., KDD 2018)."""

import torch
from torch import nn

from ctr.dataset import CtrData, Knowledge
from ctr.layers import Dice, RowInputs, mlp
from ctr.settings import CtrSettings

ATTENTION_SIZES = (32, 16)


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

    def forward(self, history: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """history (batch, length, item_dim), target (batch, item_dim) -> weights (batch, length)."""
        target = target.unsqueeze(1)
        hidden = self.of_history(history) + self.of_target(target) + self.of_product(history * target)
        return self.score(self.activation(hidden)).squeeze(-1)


class DIN(nn.Module):
    """User, target and knowledge beside an attended history, into an MLP with Dice.

    Parameters
    ----------
    data : fields by entity number.
    knowledge : the variant's vectors and cluster ids; `Knowledge()` for none.
    """

    def __init__(self, data: CtrData, knowledge: Knowledge, settings: CtrSettings) -> None:
        super().__init__()
        self.inputs = RowInputs(data, knowledge, settings)
        self.activation_unit = LocalActivationUnit(self.inputs.item_dim)
        in_dim = self.inputs.out_dim + self.inputs.item_dim
        self.mlp = mlp(in_dim, settings.hidden_sizes, settings.dropout, Dice, out_dim=1)

    def forward(self, users: torch.Tensor, items: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """users, items (batch,) and history (batch, length) numbers -> logits (batch,)."""
        target = self.inputs.item_embedding(items)  # v_A, (batch, item_dim)
        liked = self.inputs.item_embedding(history)  # e_1 .. e_H, (batch, length, item_dim)
        weights = self.activation_unit(liked, target) * (history < self.inputs.num_items)
        interest = (weights.unsqueeze(1) @ liked).squeeze(1)  # v_U(A), Eq. 3: (batch, item_dim)
        row = torch.cat([self.inputs(users, items, target), interest], dim=1)
        return self.mlp(row).squeeze(1)
