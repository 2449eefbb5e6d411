"""Deep & Cross Network, version 2 (Wang et al., WWW 2021), in its parallel structure."""

import torch
from torch import nn

from laserbatch.ctr.dataset import CtrData, Knowledge
from laserbatch.ctr.layers import RowInputs, mlp
from laserbatch.ctr.settings import CtrSettings


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
    """Cross and deep network side by side over user, target, knowledge and the mean of the history.

    Parameters
    ----------
    data : fields by entity number.
    knowledge : the variant's vectors and cluster ids; `Knowledge()` for none.
    """

    def __init__(self, data: CtrData, knowledge: Knowledge, settings: CtrSettings) -> None:
        super().__init__()
        self.inputs = RowInputs(data, knowledge, settings)
        in_dim = self.inputs.out_dim + self.inputs.item_dim
        self.cross = CrossNetwork(in_dim, settings.num_cross_layers)
        self.deep = mlp(in_dim, settings.hidden_sizes, settings.dropout)
        self.logit = nn.Linear(in_dim + settings.hidden_sizes[-1], 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """users, items (batch,) and history (batch, length) numbers -> logits (batch,)."""
        target = self.inputs.item_embedding(items)
        liked, rows = self.inputs.liked_items(history)
        lengths = rows.bincount(minlength=len(target)).clamp(min=1).unsqueeze(1)
        mean_liked = torch.zeros_like(target).index_add(0, rows, liked) / lengths  # (batch, item_dim)
        x0 = torch.cat([self.inputs(users, items, target), mean_liked], dim=1)
        return self.logit(torch.cat([self.cross(x0), self.deep(x0)], dim=1)).squeeze(1)
