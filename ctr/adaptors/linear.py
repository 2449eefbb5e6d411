"""No paper's: a linear layer of both vectors and of their product, which has the best AUC in the sample world."""

import numpy as np
import torch
from torch import nn

from laserbatch.ctr.adaptors.adaptor import DROPOUT, Adaptor, has_text
from laserbatch.ctr.fields import Field
from laserbatch.ctr.layers import Batch

OUT_DIM = 32  # of what becomes of a user's vector, of an item's, and of their product


class LinearAdaptor(Adaptor):
    """A linear layer of each side's vector, and of their product, so that a small model need not learn to multiply.

    An entity without a text gets the side's learned default. `of_entities` may be another's: what is not the text's own
    vector, but made of it, of `entity_dim`.
    """

    entity_dim: int | None = None

    def __init__(self, vectors: tuple[np.ndarray, np.ndarray], ids: tuple[Field, Field]) -> None:
        super().__init__(vectors, ids)
        dim = self.entity_dim or self.in_dim
        self.of_sides = nn.ModuleList(nn.Linear(dim, OUT_DIM) for _ in vectors)
        self.of_product = nn.Linear(dim, OUT_DIM)
        self.default = nn.Parameter(torch.zeros(len(vectors), OUT_DIM))
        self.dropout = nn.Dropout(DROPOUT)
        self.out_dim = 3 * OUT_DIM

    def of_entities(self, side: int, numbers: torch.Tensor) -> torch.Tensor:
        """What a side's entities are known by: (batch,) -> (batch, entity_dim), zeros of who is not known."""
        return self.get_buffer(f"vectors_{side}")[numbers]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Rows -> (batch, out_dim)."""
        sides = self.of_entities(0, batch.users), self.of_entities(1, batch.items)
        parts = [
            torch.where(has_text(vectors), layer(vectors), default)
            for vectors, layer, default in zip(sides, self.of_sides, self.default, strict=True)
        ]
        return self.dropout(torch.cat([*parts, self.of_product(sides[0] * sides[1])], dim=1))
