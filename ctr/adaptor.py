"""KAR's hybrid-expert adaptor (Xi et al. 2024): frozen knowledge vectors to inputs of a CTR model.

Experts are two-layer networks (128 -> 32). Each kind of knowledge (of users, of items) has its dedicated experts; the
shared ones serve both. A kind's softmax gate weighs its dedicated and the shared experts. Where there are both kinds we
add the product of the two adapted vectors, so that a small model need not learn to multiply.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.settings import CtrSettings


class ExpertGroup(nn.Module):
    """Several two-layer experts, computed as one."""

    def __init__(self, num_experts: int, in_dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim = num_experts, hidden_dim
        self.hidden = nn.Linear(in_dim, num_experts * hidden_dim)
        self.out_weight = nn.Parameter(torch.empty(num_experts, hidden_dim, out_dim))
        self.out_bias = nn.Parameter(torch.zeros(num_experts, out_dim))
        nn.init.uniform_(self.out_weight, -(hidden_dim**-0.5), hidden_dim**-0.5)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """(batch, in_dim) -> (batch, num_experts, out_dim)."""
        hidden = F.relu(self.hidden(vectors)).view(-1, self.num_experts, self.hidden_dim)
        return torch.einsum("beh,eho->beo", hidden, self.out_weight) + self.out_bias


class HybridExpertAdaptor(nn.Module):
    """Adapted knowledge of one or two kinds.

    Parameters
    ----------
    vectors : a float32 (num_entities, dim) table for each kind, of equal dim; zeros where an entity has none.
    """

    def __init__(self, vectors: list[np.ndarray], settings: CtrSettings) -> None:
        super().__init__()
        kinds = range(len(vectors))
        in_dim = vectors[0].shape[1]
        shape = (in_dim, settings.expert_hidden_dim, settings.expert_dim)
        for kind in kinds:
            self.register_buffer(f"vectors_{kind}", torch.from_numpy(vectors[kind]), persistent=False)
        self.shared = ExpertGroup(settings.num_shared_experts, *shape)
        self.dedicated = nn.ModuleList(ExpertGroup(settings.num_dedicated_experts, *shape) for _ in kinds)
        self.dropout = nn.Dropout(settings.knowledge_dropout)
        num_experts = settings.num_shared_experts + settings.num_dedicated_experts
        self.gates = nn.ModuleList(nn.Linear(in_dim, num_experts) for _ in kinds)
        self.out_dim = settings.expert_dim * (len(vectors) + (len(vectors) == 2))

    def forward(self, numbers: list[torch.Tensor]) -> torch.Tensor:
        """Entity numbers (batch,) of each kind -> (batch, out_dim)."""
        adapted = [self._gather(kind, of_kind) for kind, of_kind in enumerate(numbers)]
        if len(adapted) == 2:
            adapted.append(adapted[0] * adapted[1])
        return torch.cat(adapted, dim=1)

    def _gather(self, kind: int, numbers: torch.Tensor) -> torch.Tensor:
        distinct, position = numbers.unique(return_inverse=True)  # each entity once, then gathered
        return F.embedding(position, self._adapt(kind, self.get_buffer(f"vectors_{kind}")[distinct]))

    def _adapt(self, kind: int, vectors: torch.Tensor) -> torch.Tensor:
        experts = torch.cat([self.shared(vectors), self.dedicated[kind](vectors)], dim=1)  # (batch, experts, out)
        gate = torch.softmax(self.gates[kind](vectors), dim=1).unsqueeze(-1)
        has_vector = (vectors != 0).any(dim=1, keepdim=True)
        adapted = F.layer_norm((gate * experts).sum(dim=1), experts.shape[2:])
        return self.dropout(adapted) * has_vector
