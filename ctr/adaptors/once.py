"""ONCE: Liu et al., "ONCE: Boosting Content-based Recommendation with Both Open- and Closed-source Large Language
Models", WSDM 2024. Its sections on GENRE, the part that uses a language model's texts as content features.

Items are represented only by their content. Let c_j be the content of the items that a user liked. Attention pools them
to u, which is fused with the interests p that a language model named, and matched with the candidate's content:

    u = sum over j of alpha_j h_j,  alpha = softmax over j of q . tanh(A h_j),  h = W c
    u' = F [u; P p],  score of u' and h_candidate by their product

Here a CTR network computes the score from u', the candidate and their elementwise product. The additive attention is
that of NAML and NRMS, on which ONCE was evaluated. Without texts of liked items u is zero.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.adaptors.adaptor import OUT_DIM, Adaptor, has_text
from laserbatch.ctr.fields import Field
from laserbatch.ctr.layers import CtrBatch

ATTENTION_DIM = 32


class ContentAdaptor(Adaptor):
    """Represents users by the texts of their liked items and their own; without a text, by a side's learned default."""

    def __init__(self, vectors: tuple[np.ndarray, np.ndarray], ids: tuple[Field, Field]) -> None:
        super().__init__(vectors, ids)
        self.of_content = nn.Linear(self.in_dim, OUT_DIM)  # W
        self.of_interests = nn.Linear(self.in_dim, OUT_DIM)  # P
        self.fusion = nn.Linear(2 * OUT_DIM, OUT_DIM)  # F
        self.attention = nn.Linear(OUT_DIM, ATTENTION_DIM)  # A
        self.query = nn.Linear(ATTENTION_DIM, 1, bias=False)  # q

    def forward(self, batch: CtrBatch) -> torch.Tensor:
        """Rows -> (batch, out_dim)."""
        content, has_vector = self._embedded(1, self.of_content, batch.distinct)
        item = F.embedding(batch.items, content)
        interests, _ = self._embedded(0, self.of_interests, batch.users)
        pooled = self._pooled(content, has_vector, batch.liked, batch.offsets)
        user = self.fusion(torch.cat([pooled, interests], dim=1))
        return self.dropout(torch.cat([user, item, user * item], dim=1))

    def _embedded(self, side: int, layer: nn.Linear, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.get_buffer(f"vectors_{side}")[numbers]
        has_vector = has_text(vectors)
        return torch.where(has_vector, layer(vectors), self.default[side]), has_vector

    def _pooled(
        self, content: torch.Tensor, has_vector: torch.Tensor, liked: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """sum over j of alpha_j h_j of each row: content (n, OUT_DIM), rows `liked` of content -> (batch, OUT_DIM).

        Scores are bounded, since tanh is, so the exponentials need no shift. One sum gives numerator and denominator.
        """
        weights = torch.where(has_vector, self.query(torch.tanh(self.attention(content))).exp(), 0.0)  # (n, 1)
        table = torch.cat([weights * content, weights], dim=1)
        sums = F.embedding_bag(liked, table, offsets, mode="sum")
        return sums[:, :-1] / sums[:, -1:].clamp(min=1e-9)
