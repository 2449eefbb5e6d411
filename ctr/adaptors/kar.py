"""KAR: Xi et al., "Towards Open-World Recommendation with Knowledge Augmentation from Large Language Models", RecSys
2024. Its section on knowledge adaptation, the part "hybrid-expert adaptor".

Let r be the encoded knowledge of a side (preferences of a user, facts of an item), S_s the shared experts and S_d the
experts of the side. A gate weighs both kinds, and the weighted sum is the augmented vector:

    alpha = softmax(g(r)),    r_hat = sum over e in S_s and S_d of alpha_e e(r)

Both augmented vectors become additional inputs of the CTR model. Experts are small networks, here with layers of 128
and 32. We add a normalisation, dropout after it, and the product of both augmented vectors, so that a small network
need not learn to multiply.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.adaptors.adaptor import OUT_DIM, Adaptor, has_text
from laserbatch.ctr.fields import Field
from laserbatch.ctr.layers import CtrBatch

NUM_EXPERTS = 2  # number of dedicated experts of each side, and of shared experts
HIDDEN_DIM = 128


class ExpertGroup(nn.Module):
    """`NUM_EXPERTS` experts of two layers each, computed together."""

    def __init__(self, in_dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(in_dim, NUM_EXPERTS * HIDDEN_DIM)
        self.out_weight = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN_DIM, OUT_DIM))
        self.out_bias = nn.Parameter(torch.zeros(NUM_EXPERTS, OUT_DIM))
        nn.init.uniform_(self.out_weight, -(HIDDEN_DIM**-0.5), HIDDEN_DIM**-0.5)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """(n, in_dim) -> (n, NUM_EXPERTS, OUT_DIM)."""
        hidden = F.relu(self.hidden(vectors)).view(-1, NUM_EXPERTS, HIDDEN_DIM)
        return torch.einsum("neh,eho->neo", hidden, self.out_weight) + self.out_bias


class HybridExpertAdaptor(Adaptor):
    """Shared and dedicated experts with a gate for each side; entities without a text get a side's learned default."""

    def __init__(self, vectors: tuple[np.ndarray, np.ndarray], ids: tuple[Field, Field]) -> None:
        super().__init__(vectors, ids)
        self.shared = ExpertGroup(self.in_dim)
        self.dedicated = nn.ModuleList(ExpertGroup(self.in_dim) for _ in vectors)
        self.gates = nn.ModuleList(nn.Linear(self.in_dim, 2 * NUM_EXPERTS) for _ in vectors)

    def forward(self, batch: CtrBatch) -> torch.Tensor:
        """Rows -> (batch, out_dim)."""
        user, item = self._gather(0, batch.users), self._gather(1, batch.distinct[batch.items])
        return torch.cat([user, item, user * item], dim=1)

    def _gather(self, side: int, numbers: torch.Tensor) -> torch.Tensor:
        distinct, places = numbers.unique(return_inverse=True)  # each entity once, then gathered
        vectors = self.get_buffer(f"vectors_{side}")[distinct]
        experts = torch.cat([self.shared(vectors), self.dedicated[side](vectors)], dim=1)  # (n, 2 NUM_EXPERTS, OUT_DIM)
        alpha = torch.softmax(self.gates[side](vectors), dim=1)
        augmented = F.layer_norm((alpha.unsqueeze(-1) * experts).sum(dim=1), (OUT_DIM,))
        return F.embedding(places, torch.where(has_text(vectors), self.dropout(augmented), self.default[side]))
