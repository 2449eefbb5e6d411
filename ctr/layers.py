"""Layers that DIN and DCNv2 share: entity embeddings, MLP, Dice, knowledge vectors, and what both see of a row."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from laserbatch.ctr.feature_set import SideVectors
from laserbatch.ctr.fields import NUM_RESERVED, Field
from laserbatch.ctr.knowledge import Knowledge
from laserbatch.ctr.settings import CtrSettings

KNOWLEDGE_DROPOUT = 0.3
KNOWLEDGE_DIM = 32  # of what becomes of a user's vector, of an item's, and of their product
MIN_SPARSE_ROWS = 1_000_000  # of a table, from which on sparse steps of 8,192 rows take less: 18 beside 21 ms (CPU)
EMBEDDING_STD = 0.01  # what training did not move says little; with 0.2 ids are noise to test rows, and AUC lower


class EntityEmbedding(nn.Module):
    """Embedding of an entity's fields, by entity number; a bag of several codes is their mean.

    A table of many rows has sparse gradients: a step then costs what its batch touches, not what there is.
    """

    def __init__(self, fields: tuple[Field, ...], embedding_dim: int) -> None:
        super().__init__()
        self.out_dim = len(fields) * embedding_dim
        codes, weights, field_of_slot, offset = [], [], [], 0
        for number, field in enumerate(fields):
            is_present = field.codes > 0
            codes.append(np.where(is_present, field.codes + offset, 0))  # every field's code 0 is row 0: zeros
            weights.append(is_present / np.maximum(is_present.sum(axis=1, keepdims=True), 1))
            field_of_slot += [number] * field.codes.shape[1]
            offset += field.num_codes - 1
        self.embedding = nn.Embedding(offset + 1, embedding_dim, padding_idx=0, sparse=offset >= MIN_SPARSE_ROWS)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        with torch.no_grad():
            self.embedding.weight[0] = 0
        self.has_bags = len(field_of_slot) > len(fields)
        pooling = np.eye(len(fields), dtype=np.float32)[field_of_slot].T  # (num_fields, num_slots)
        self.register_buffer("codes", torch.from_numpy(np.hstack(codes).astype(np.int32)), persistent=False)
        self.register_buffer("weights", torch.from_numpy(np.hstack(weights).astype(np.float32)), persistent=False)
        self.register_buffer("pooling", torch.from_numpy(pooling), persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """(n,) entity numbers -> (n, out_dim)."""
        embedded = self.embedding(self.codes[numbers])  # (n, num_slots, dim); absent codes are zeros
        if self.has_bags:
            embedded = self.pooling @ (embedded * self.weights[numbers].unsqueeze(-1))  # (n, num_fields, dim)
        return embedded.flatten(-2)

    def table(self, *numbers: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Embeddings (m, out_dim) in which every one of several arrays of numbers is found, and its places there.

        Each entity is embedded once: popular items are in many histories.
        """
        num_entities, joined = len(self.codes), torch.cat(numbers)
        if len(joined) > num_entities:
            return self(torch.arange(num_entities, device=joined.device)), list(numbers)
        distinct, places = joined.unique(return_inverse=True)
        return self(distinct), list(places.split([len(of_array) for of_array in numbers]))


class Dice(nn.Module):
    """Data-adaptive activation (Zhou et al. 2018, Section 5.2): p(s) s + (1 - p(s)) alpha s, p by batch statistics."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(dim))

    def forward(self, s: torch.Tensor) -> torch.Tensor:  # (batch, dim)
        p = torch.sigmoid(self.norm(s))
        return p * s + (1 - p) * self.alpha * s


def mlp(in_dim: int, hidden_sizes: tuple[int, ...], dropout: float, activation=nn.ReLU, out_dim: int | None = None):
    """Linear layers with activation and dropout between them; a last linear layer when `out_dim` is given."""
    layers: list[nn.Module] = []
    for size in hidden_sizes:
        layers += [nn.Linear(in_dim, size), Dice(size) if activation is Dice else activation(), nn.Dropout(dropout)]
        in_dim = size
    if out_dim is not None:
        layers.append(nn.Linear(in_dim, out_dim))
    return nn.Sequential(*layers)


class KnowledgeInputs(nn.Module):
    """Frozen knowledge vectors of users and of items as inputs of models: a linear layer of each, and of their product.

    The product is there so that a small model need not learn to multiply. `vectors` float32 (num_entities, dim) of each
    side are zeros where an entity has none: it gets the side's learned default. KAR's mixture of experts (Xi et al.
    2024) in this place has a lower AUC in the sample world.
    """

    def __init__(self, vectors: tuple[np.ndarray, np.ndarray]) -> None:
        super().__init__()
        for side, of_side in enumerate(vectors):
            self.register_buffer(f"vectors_{side}", torch.from_numpy(of_side), persistent=False)
        dim = vectors[0].shape[1]
        self.of_sides = nn.ModuleList(nn.Linear(dim, KNOWLEDGE_DIM) for _ in vectors)
        self.of_product = nn.Linear(dim, KNOWLEDGE_DIM)
        self.default = nn.Parameter(torch.zeros(len(vectors), KNOWLEDGE_DIM))
        self.dropout = nn.Dropout(KNOWLEDGE_DROPOUT)
        self.out_dim = 3 * KNOWLEDGE_DIM

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Numbers of users and items (batch,) -> (batch, out_dim)."""
        sides = self.vectors_0[users], self.vectors_1[items]
        parts = [
            torch.where((vectors != 0).any(dim=1, keepdim=True), layer(vectors), default)
            for vectors, layer, default in zip(sides, self.of_sides, self.default, strict=True)
        ]
        return self.dropout(torch.cat([*parts, self.of_product(sides[0] * sides[1])], dim=1))


@dataclass(frozen=True)
class Batch:
    """Rows as a model takes them; histories one behind the other, without padding."""

    users: torch.Tensor  # int64 (batch,)
    items: torch.Tensor  # int64 (batch,)
    past: torch.Tensor  # float32 (batch, num_past_columns)
    liked: torch.Tensor  # int64 (num_liked,) items of all histories
    offsets: torch.Tensor  # int64 (batch,): where each row's begin
    rows: torch.Tensor  # int64 (num_liked,): whose each is


class RowInputs(nn.Module):
    """What every model sees of a row besides its history: fields, cluster ids, what was before, knowledge vectors."""

    def __init__(
        self,
        user_fields: tuple[Field, ...],
        item_fields: tuple[Field, ...],
        num_past: int,
        knowledge: Knowledge | None,
        settings: CtrSettings,
    ) -> None:
        super().__init__()
        vectors = None
        if knowledge is not None:
            user_fields += _cluster_fields(knowledge.user)
            item_fields += _cluster_fields(knowledge.item)
            vectors = knowledge.user.vectors, knowledge.item.vectors
        self.user_embedding = EntityEmbedding(user_fields, settings.embedding_dim)
        self.item_embedding = EntityEmbedding(item_fields, settings.embedding_dim)
        self.knowledge = None if vectors is None else KnowledgeInputs(vectors)
        self.item_dim = self.item_embedding.out_dim
        knowledge_dim = 0 if self.knowledge is None else self.knowledge.out_dim
        self.out_dim = self.user_embedding.out_dim + self.item_dim + num_past + knowledge_dim

    def forward(self, batch: Batch, target: torch.Tensor) -> torch.Tensor:
        """A batch and its embedded targets (batch, item_dim) -> (batch, out_dim)."""
        parts = [self.user_embedding(batch.users), target, batch.past]
        if self.knowledge is not None:
            parts.append(self.knowledge(batch.users, batch.items))
        return torch.cat(parts, dim=1)


def _cluster_fields(side: SideVectors) -> tuple[Field, ...]:
    """The cluster ids as more fields, one a level; clusters are never unknown, so code 1 is unused."""
    codes = np.where(side.codes > 0, side.codes - 1 + NUM_RESERVED, 0)
    sizes = (side.num_codes - 1 + NUM_RESERVED).tolist()
    return tuple(Field("cluster", codes[:, [level]], size) for level, size in enumerate(sizes))
