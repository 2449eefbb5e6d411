"""What an adaptor is: vectors of texts made into inputs of a CTR network."""

import numpy as np
import torch
from torch import nn

from laserbatch.ctr.fields import Field
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
