"""Layers that the networks share (entity embeddings, MLP, Dice), and the batch of rows that networks take."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.fields import Field

MIN_SPARSE_ROWS = 1_000_000  # tables of this size have sparse gradients: a step of 8,192 rows takes 18, not 21 ms (CPU)
EMBEDDING_STD = 0.01  # small, so that untrained ids stay near 0; with 0.2 they are noise in test rows, and AUC is lower


class EntityEmbedding(nn.Module):
    """Embeds the fields of an entity, given by number; a field of several codes is the mean of their embeddings.

    A large table has sparse gradients: the cost of a step then depends on the rows of its batch, not on the table.
    """

    codes: torch.Tensor  # int32 (num_entities, num_slots)
    weights: torch.Tensor  # float32 (num_entities, num_slots)
    first_slots: torch.Tensor  # int32 (num_fields,): each field's first slot

    def __init__(self, fields: tuple[Field, ...], embedding_dim: int) -> None:
        super().__init__()
        self.out_dim = len(fields) * embedding_dim
        codes, weights, offset = [], [], 0
        for field in fields:
            is_present = field.codes > 0
            codes.append(np.where(is_present, field.codes + offset, 0))  # every field's code 0 is row 0: zeros
            weights.append(is_present / np.maximum(is_present.sum(axis=1, keepdims=True), 1))
            offset += field.num_codes - 1
        self.embedding = nn.Embedding(offset + 1, embedding_dim, padding_idx=0, sparse=offset >= MIN_SPARSE_ROWS)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        with torch.no_grad():
            self.embedding.weight[0] = 0
        num_slots = np.array([field.codes.shape[1] for field in fields], np.int32)
        self.has_bags = bool((num_slots > 1).any())
        self.register_buffer("codes", torch.from_numpy(np.hstack(codes).astype(np.int32)), persistent=False)
        self.register_buffer("weights", torch.from_numpy(np.hstack(weights).astype(np.float32)), persistent=False)
        first_slots = torch.from_numpy(np.cumsum(num_slots, dtype=np.int32) - num_slots)
        self.register_buffer("first_slots", first_slots, persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """(n,) entity numbers -> (n, out_dim)."""
        codes = self.codes[numbers]  # (n, num_slots); the embeddings of absent codes are zeros
        if not self.has_bags:
            return self.embedding(codes).flatten(-2)
        first_slots = torch.arange(len(codes), dtype=torch.int32, device=codes.device)[:, None] * codes.shape[1]
        embedded = F.embedding_bag(
            codes.flatten(), self.embedding.weight, (first_slots + self.first_slots).flatten(), mode="sum",
            sparse=self.embedding.sparse, per_sample_weights=self.weights[numbers].flatten(),
        )  # fmt: skip
        return embedded.view(len(codes), -1)


class Dice(nn.Module):
    """Data-adaptive activation (Zhou et al. 2018, Section 5.2): p(s) s + (1 - p(s)) alpha s, p by batch statistics."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(dim))

    def forward(self, s: torch.Tensor) -> torch.Tensor:  # (batch, dim)
        p = torch.sigmoid(self.norm(s))
        return p * s + (1 - p) * self.alpha * s


def mlp(
    in_dim: int,
    hidden_sizes: tuple[int, ...],
    dropout: float,
    activation: Callable[..., nn.Module] = nn.ReLU,
    out_dim: int | None = None,
) -> nn.Sequential:
    """Linear layers with activation and dropout between them; a last linear layer when `out_dim` is given."""
    layers: list[nn.Module] = []
    for size in hidden_sizes:
        layers += [nn.Linear(in_dim, size), Dice(size) if activation is Dice else activation(), nn.Dropout(dropout)]
        in_dim = size
    if out_dim is not None:
        layers.append(nn.Linear(in_dim, out_dim))
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class CtrBatch:
    """A batch of rows for a network; histories are concatenated without padding.

    `items` and `liked` index `distinct`, so that each item is embedded once: popular items are in many histories.
    """

    users: torch.Tensor  # int64 (batch,)
    distinct: torch.Tensor  # int64 (num_distinct,) item numbers of rows and histories
    items: torch.Tensor  # int64 (batch,)
    past: torch.Tensor  # float32 (batch, num_past_columns)
    liked: torch.Tensor  # int64 (num_liked,) liked items of all histories
    offsets: torch.Tensor  # int64 (batch,): where each row's history begins in `liked`
    rows: torch.Tensor  # int64 (num_liked,): the row of each liked item
