"""DIN, the Deep Interest Network (Zhou et al., KDD 2018), and DCNv2, Deep & Cross version 2 (Wang et al., WWW 2021).

Both map a batch of rows to logits (batch,). They are built from fields by entity number, and from a variant's vectors
and cluster ids; `loop.py` trains them.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.adaptors.adaptor import Adaptor, LinearAdaptor
from laserbatch.ctr.adaptors.kar import HybridExpertAdaptor
from laserbatch.ctr.adaptors.once import ContentAdaptor
from laserbatch.ctr.adaptors.rlmrec import ContrastiveAlignment, GenerativeAlignment
from laserbatch.ctr.adaptors.trawl import ContrastiveAdaptor
from laserbatch.ctr.dataset import ModelRows
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.feature_set import SideVectors
from laserbatch.ctr.fields import NUM_RESERVED, Field
from laserbatch.ctr.knowledge import Knowledge
from laserbatch.ctr.layers import CtrBatch, Dice, EntityEmbedding, mlp
from laserbatch.ctr.settings import AdaptorName, CtrSettings

ATTENTION_SIZES = (32, 16)  # hidden sizes of DIN's activation unit
NUM_CROSS_LAYERS = 2  # cross layers of DCNv2
MAX_CROSS_DIM = 16_384  # such a cross layer has weights of 1 GiB; by calculation, training takes ten times as much
ADAPTORS: dict[AdaptorName, type[Adaptor]] = {
    "linear": LinearAdaptor,
    "kar": HybridExpertAdaptor,
    "once": ContentAdaptor,
    "trawl": ContrastiveAdaptor,
    "rlmrec": ContrastiveAlignment,
    "rlmrec_gen": GenerativeAlignment,
}


class RowInputs(nn.Module):
    """The inputs of a row besides its history: fields, cluster ids, statistics of earlier rows, adapted texts."""

    def __init__(self, rows: ModelRows, knowledge: Knowledge | None, settings: CtrSettings) -> None:
        super().__init__()
        self.knowledge: Adaptor | None = None
        user_fields, item_fields = rows.user_fields, rows.item_fields
        if knowledge is not None:
            user_fields += _cluster_fields(knowledge.user)
            item_fields += _cluster_fields(knowledge.item)
        self.user_embedding = EntityEmbedding(user_fields, settings.embedding_dim)
        self.item_embedding = EntityEmbedding(item_fields, settings.embedding_dim)
        if knowledge is not None:
            vectors = knowledge.user.vectors, knowledge.item.vectors
            self.knowledge = ADAPTORS[settings.adaptor](vectors, (user_fields[0], item_fields[0]))
        self.item_dim = self.item_embedding.out_dim
        knowledge_dim = 0 if self.knowledge is None else self.knowledge.out_dim
        self.out_dim = self.user_embedding.out_dim + self.item_dim + rows.past.shape[1] + knowledge_dim

    def forward(self, batch: CtrBatch, target: torch.Tensor) -> torch.Tensor:
        """A batch and its embedded targets (batch, item_dim) -> (batch, out_dim)."""
        parts = [self.user_embedding(batch.users), target, batch.past]
        if self.knowledge is not None:
            parts.append(self.knowledge(batch))
        return torch.cat(parts, dim=1)


def _cluster_fields(side: SideVectors) -> tuple[Field, ...]:
    """The cluster ids as additional fields, one per level; clusters are never unknown, so code 1 is unused."""
    codes = np.where(side.codes > 0, side.codes - 1 + NUM_RESERVED, 0)
    sizes = (side.num_codes - 1 + NUM_RESERVED).tolist()
    return tuple(Field("cluster", codes[:, [level]], size) for level, size in enumerate(sizes))


class LocalActivationUnit(nn.Module):
    """a(e_j, v_A) of Eq. 3: the weight of a liked item for the target.

    Weights are not normalised, as in the paper: a user who liked many items of a kind has more interest in it.
    """

    def __init__(self, item_dim: int) -> None:
        super().__init__()
        # [h, t, h - t, h * t] W = h (W1 + W3) + t (W2 - W3) + (h * t) W4: an equal layer with fewer multiplications.
        self.of_history = nn.Linear(item_dim, ATTENTION_SIZES[0], bias=False)
        self.of_target = nn.Linear(item_dim, ATTENTION_SIZES[0])
        self.of_product = nn.Linear(item_dim, ATTENTION_SIZES[0], bias=False)
        self.activation = nn.PReLU()
        self.score = mlp(ATTENTION_SIZES[0], ATTENTION_SIZES[1:], 0.0, nn.PReLU, out_dim=1)

    def forward(
        self, table: torch.Tensor, liked: torch.Tensor, target: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Embedded items (num_distinct, item_dim) and targets (batch, item_dim), and the place of each liked item among
        the items and its row in the batch -> weights (num_liked, 1)."""
        product = F.embedding(liked, table) * target.index_select(0, rows)
        of_target = self.of_target(target).index_select(0, rows)
        of_history = F.embedding(liked, self.of_history(table))
        return self.score(self.activation(of_history + of_target + self.of_product(product)))


class DIN(nn.Module):
    """DIN: an MLP with Dice over user, target, knowledge and an attended history."""

    def __init__(self, inputs: RowInputs, settings: CtrSettings) -> None:
        super().__init__()
        self.inputs = inputs
        self.activation_unit = LocalActivationUnit(inputs.item_dim)
        self.mlp = mlp(inputs.out_dim + inputs.item_dim, settings.hidden_sizes, settings.dropout, Dice, out_dim=1)

    @property
    def logit(self) -> nn.Linear:
        """The last layer."""
        last = self.mlp[-1]
        assert isinstance(last, nn.Linear)
        return last

    def forward(self, batch: CtrBatch) -> torch.Tensor:
        table = self.inputs.item_embedding(batch.distinct)
        target = F.embedding(batch.items, table)  # v_A, (batch, item_dim)
        weights = self.activation_unit(table, batch.liked, target, batch.rows).squeeze(1)
        # v_U(A) = sum_j a(e_j, v_A) e_j, Eq. 3. In float32 also under autocast: CUDA has no gradient of a bag's weights
        # in bfloat16, and weights and table must have the same type.
        weights = weights.float()
        interest = F.embedding_bag(batch.liked, table.float(), batch.offsets, mode="sum", per_sample_weights=weights)
        return self.mlp(torch.cat([self.inputs(batch, target), interest], dim=1)).squeeze(1)


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
    """DCNv2 over user, target, knowledge and the mean of the history, with deep and cross parts in parallel."""

    def __init__(self, inputs: RowInputs, settings: CtrSettings) -> None:
        super().__init__()
        self.inputs = inputs
        dim = inputs.out_dim + inputs.item_dim
        if dim > MAX_CROSS_DIM:
            raise CtrError(
                f"the columns of the tables give inputs of width {dim}, from which a cross layer of dcnv2 has {dim}**2 "
                f"weights; expected at most {MAX_CROSS_DIM}. Give tables with fewer columns, or train din or gbdt"
            )
        self.cross = CrossNetwork(dim, NUM_CROSS_LAYERS)
        self.deep = mlp(dim, settings.hidden_sizes, settings.dropout)
        self.logit = nn.Linear(settings.hidden_sizes[-1] + dim, 1)

    def forward(self, batch: CtrBatch) -> torch.Tensor:
        table = self.inputs.item_embedding(batch.distinct)
        target = F.embedding(batch.items, table)
        mean_liked = F.embedding_bag(batch.liked, table, batch.offsets, mode="mean")  # (batch, item_dim); empty: 0
        x0 = torch.cat([self.inputs(batch, target), mean_liked], dim=1)
        return self.logit(torch.cat([self.cross(x0), self.deep(x0)], dim=1)).squeeze(1)
