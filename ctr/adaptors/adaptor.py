"""What an adaptor is: vectors of texts made into inputs of a CTR network."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.fields import NUM_RESERVED, Field
from laserbatch.ctr.layers import Batch

DROPOUT = 0.3  # of what comes of texts, chosen on validation rows for the linear one


class Adaptor(nn.Module):
    """A module from rows to inputs, made of the vectors of users and items; a network trains it with its own weights.

    `vectors` float32 (num_entities, dim) of each side are those of the run, zeros where an entity has no text, and are
    never saved with the weights: entities may be others, or in another order, when a model is asked. What an adaptor
    learns of single entities it keeps by the codes of `ids`, the fields of both ids, which go with the model.
    """

    out_dim: int  # set by each

    def __init__(self, vectors: tuple[np.ndarray, np.ndarray], ids: tuple[Field, Field]) -> None:
        super().__init__()
        for side, (of_side, field) in enumerate(zip(vectors, ids, strict=True)):
            self.register_buffer(f"vectors_{side}", torch.from_numpy(of_side), persistent=False)
            self.register_buffer(f"ids_{side}", torch.from_numpy(field.codes[:, 0]), persistent=False)
        self.num_ids = tuple(field.num_codes for field in ids)
        self.in_dim = vectors[0].shape[1]

    def texts_of_ids(self, side: int) -> torch.Tensor:
        """A side's vectors by the code of the id, float32 (num_ids, dim): zeros of reserved codes, and without a text.

        An id that has several, of several dates, has its first: the run's own stand before older ones.
        """
        vectors, codes = self.get_buffer(f"vectors_{side}"), self.get_buffer(f"ids_{side}")
        found, first = np.unique(codes.cpu().numpy(), return_index=True)
        is_known = found >= NUM_RESERVED
        texts = vectors.new_zeros(self.num_ids[side], self.in_dim)
        texts[found[is_known]] = vectors[first[is_known]]
        return texts

    def fit_positives(self, users: torch.Tensor, items: torch.Tensor) -> None:
        """Learn from behaviour before the network trains: the positives of training rows, int64 (n,) in order of time.

        It may draw from torch's global generator, which is seeded. By default nothing is learned then.
        """

    def forward(self, batch: Batch) -> torch.Tensor:
        """Rows -> (batch, out_dim)."""
        raise NotImplementedError


def has_text(vectors: torch.Tensor) -> torch.Tensor:
    """Whether each is of a text: (n, dim) -> bool (n, 1)."""
    return (vectors != 0).any(dim=1, keepdim=True)


def info_nce(a: torch.Tensor, b: torch.Tensor, of_b: torch.Tensor, temperature: float) -> torch.Tensor:
    """InfoNCE of pairs of unit vectors (n, dim) against each other's b; what is the same (`of_b`) is no negative."""
    logits = a @ b.T / temperature
    same = (of_b[:, None] == of_b) & ~torch.eye(len(b), dtype=torch.bool, device=b.device)
    return F.cross_entropy(logits.masked_fill(same, -torch.inf), torch.arange(len(b), device=b.device))
