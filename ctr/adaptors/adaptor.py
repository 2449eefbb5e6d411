"""The base class of adaptors, which turn vectors of texts into inputs of a CTR network, and our linear adaptor.

The linear one has the best AUC in the sample world; adaptors of papers that train beforehand share its layers.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.fields import NUM_RESERVED, Field
from laserbatch.ctr.layers import CtrBatch

OUT_DIM = 32  # output width for a user's vector, for an item's, and for each product
DROPOUT = 0.3  # on the outputs of an adaptor, chosen on validation rows for the linear one


class Adaptor(nn.Module):
    """A module that maps rows to inputs by the vectors of their users and items; a network trains it as its part.

    `vectors` of each side, float32 (num_entities, dim), come from the run, with zeros for entities without a text. They
    are never saved with the weights: when a model is used later, entities may differ or have another order. What an
    adaptor learns about single entities is stored by the codes of `ids`, the id fields of both sides, which are saved
    with the model. `default` (2, OUT_DIM) is learned for entities without a text.
    """

    out_dim = 3 * OUT_DIM
    ids_0: torch.Tensor
    ids_1: torch.Tensor
    vectors_0: torch.Tensor
    vectors_1: torch.Tensor

    def __init__(self, vectors: tuple[np.ndarray, np.ndarray], ids: tuple[Field, Field]) -> None:
        super().__init__()
        for side, (of_side, field) in enumerate(zip(vectors, ids, strict=True)):
            self.register_buffer(f"vectors_{side}", torch.from_numpy(of_side), persistent=False)
            self.register_buffer(f"ids_{side}", torch.from_numpy(field.codes[:, 0]), persistent=False)
        self.num_ids = tuple(field.num_codes for field in ids)
        self.in_dim = vectors[0].shape[1]
        self.default = nn.Parameter(torch.zeros(len(vectors), OUT_DIM))
        self.dropout = nn.Dropout(DROPOUT)

    def texts_of_ids(self, side: int) -> torch.Tensor:
        """A side's vectors by id code, float32 (num_ids, dim); zeros for reserved codes and for ids without a text.

        If an id has vectors of several dates, the first is taken: the run's own vectors come before older ones.
        """
        vectors, codes = self.get_buffer(f"vectors_{side}"), self.get_buffer(f"ids_{side}")
        distinct, first = np.unique(codes.cpu().numpy(), return_index=True)
        has_entity = distinct >= NUM_RESERVED
        ids, rows = (torch.from_numpy(of[has_entity]).long().to(vectors.device) for of in (distinct, first))
        texts = vectors.new_zeros(self.num_ids[side], self.in_dim)
        texts[ids] = vectors[rows]
        return texts

    def fit_positives(self, users: torch.Tensor, items: torch.Tensor) -> None:
        """Learn from the positives of training rows, int64 (n,) in order of time, before the network is trained.

        Implementations may draw from torch's global generator, which is seeded. By default nothing is learned here.
        """

    def forward(self, batch: CtrBatch) -> torch.Tensor:
        """Rows -> (batch, out_dim)."""
        raise NotImplementedError


class LinearAdaptor(Adaptor):
    """Linear layers over each side's vector, and over the item's vector multiplied with two others.

    These are the user's vector and the mean vector of the items that the user liked: so a small model need not learn to
    multiply. An entity without a text gets the side's learned default. Subclasses may override `of_entities` to
    replace a text's vector by a representation of width `entity_dim`.
    """

    out_dim = 4 * OUT_DIM
    entity_dim: int | None = None

    def __init__(self, vectors: tuple[np.ndarray, np.ndarray], ids: tuple[Field, Field]) -> None:
        super().__init__(vectors, ids)
        dim = self.entity_dim or self.in_dim
        self.of_sides = nn.ModuleList(nn.Linear(dim, OUT_DIM) for _ in vectors)
        self.of_product, self.of_liked = nn.Linear(dim, OUT_DIM), nn.Linear(dim, OUT_DIM)

    def of_entities(self, side: int, numbers: torch.Tensor) -> torch.Tensor:
        """The representation of a side's entities: (n,) -> (n, entity_dim), zeros for an entity without a text."""
        return self.get_buffer(f"vectors_{side}")[numbers]

    def forward(self, batch: CtrBatch) -> torch.Tensor:
        """Rows -> (batch, out_dim)."""
        table = self.of_entities(1, batch.distinct)
        user, item = self.of_entities(0, batch.users), F.embedding(batch.items, table)
        parts = [
            torch.where(has_text(vectors), layer(vectors), default)
            for vectors, layer, default in zip((user, item), self.of_sides, self.default, strict=True)
        ]
        mean_liked = F.embedding_bag(batch.liked, table, batch.offsets, mode="mean")  # zeros without liked items
        parts += [self.of_product(user * item), self.of_liked(mean_liked * item)]
        return self.dropout(torch.cat(parts, dim=1))


def has_text(vectors: torch.Tensor) -> torch.Tensor:
    """Whether each vector comes from a text: (n, dim) -> bool (n, 1)."""
    return (vectors != 0).any(dim=1, keepdim=True)


def info_nce(a: torch.Tensor, b: torch.Tensor, of_b: torch.Tensor, temperature: float) -> torch.Tensor:
    """InfoNCE of pairs (a, b) of unit vectors (n, dim); other rows of b are negatives unless their `of_b` is equal."""
    logits = a @ b.T / temperature
    same = (of_b[:, None] == of_b) & ~torch.eye(len(b), dtype=torch.bool, device=b.device)
    return F.cross_entropy(logits.masked_fill(same, -torch.inf), torch.arange(len(b), device=b.device))
