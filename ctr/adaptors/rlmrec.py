"""RLMRec: Ren et al., "Representation Learning with Large Language Models for Recommendation", WWW 2024. Its sections
on contrastive and on generative alignment.

A collaborative backbone (LightGCN) learns vectors e of ids from likes, while vectors s of texts describe the ids. Both
are aligned while e is learned, by L = L_backbone + ALIGNMENT L_align, where over a batch of ids

    L_align = - mean over i of ln (exp(cos(x_i, y_i) / tau) / sum over j of exp(cos(x_i, y_j) / tau))

with x = e and y = sigma(s) in the contrastive variant. In the generative variant some ids' layer-0 vectors are replaced
by a mask token before the graph convolution, and for these ids x = sigma(e) after it, and y = s. sigma is a small
network.

The CTR network reads, by the linear adaptor's layers, a prediction of e from the text: ridge regression of e on s, for
known and new entities alike. It does not read e itself, as rankings by e do: e of training ids knows the labels of
training rows, and a network with e as input had a lower AUC than one without texts (benchmarks/README.md).
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.adaptors.adaptor import LinearAdaptor, has_text, info_nce
from laserbatch.ctr.fields import NUM_RESERVED, Field
from laserbatch.retrieval_pools.routing.lightgcn import bpr_loss, normalised_adjacency, propagate

DIM = 32
NUM_LAYERS = 3
NUM_STEPS, LEARNING_RATE, L2 = 100, 0.03, 0.02
PAIRS_PER_STEP, IDS_PER_STEP = 1 << 16, 1_024
ALIGNMENT, TEMPERATURE = 0.1, 0.2
MASKED_SHARE = 0.2
RIDGE = 1.0


class ContrastiveAlignment(LinearAdaptor):
    """RLMRec-Con: texts are mapped into the space of a collaborative backbone that is aligned with them.

    The text of an id must tell its e from those of other ids.
    """

    entity_dim = DIM
    masked_share = 0.0  # share of the ids with a text whose layer-0 vector a step replaces by the mask token

    def __init__(self, vectors: tuple[np.ndarray, np.ndarray], ids: tuple[Field, Field]) -> None:
        super().__init__(vectors, ids)
        for side in range(2):
            self.register_buffer(f"of_text_{side}", torch.zeros(self.in_dim, DIM))

    def of_entities(self, side: int, numbers: torch.Tensor) -> torch.Tensor:
        """The prediction of e from the text, zeros without a text: (batch,) -> (batch, DIM)."""
        return self.get_buffer(f"vectors_{side}")[numbers] @ self.get_buffer(f"of_text_{side}")

    def fit_positives(self, users: torch.Tensor, items: torch.Tensor) -> None:
        """Train backbone and alignment on the positives of training rows, int64 (n,); unknown ids are left out."""
        users, items = self.ids_0[users].long(), self.ids_1[items].long()
        has_both_ids = (users >= NUM_RESERVED) & (items >= NUM_RESERVED)
        if not has_both_ids.any():
            return
        num_users, num_items = self.num_ids
        pairs = torch.unique(users[has_both_ids] * num_items + items[has_both_ids])
        users, items = pairs // num_items, pairs % num_items
        adjacency = normalised_adjacency(users, items, num_users, num_items)
        texts = torch.cat([self.texts_of_ids(0), self.texts_of_ids(1)])
        is_node = torch.zeros(len(texts), dtype=torch.bool, device=texts.device)
        is_node[users] = is_node[items + num_users] = True
        described = torch.nonzero(is_node & has_text(texts).squeeze(1)).squeeze(1)
        if not len(described):
            return

        layer_0 = torch.randn(len(texts), DIM, device=texts.device) * 0.1
        sigma, token = self.network().to(texts.device), torch.zeros(DIM, device=texts.device)
        optimizer = torch.optim.Adam([layer_0, token, *sigma.parameters()], LEARNING_RATE)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            masked = described[torch.rand(len(described), device=described.device) < self.masked_share]
            start = layer_0.index_fill(0, masked, 0.0).index_add(0, masked, token.expand(len(masked), -1))
            final = propagate(adjacency, start, NUM_LAYERS).requires_grad_()
            chosen = torch.randint(len(pairs), (min(len(pairs), PAIRS_PER_STEP),), device=users.device)
            negatives = torch.randint(NUM_RESERVED, num_items, chosen.shape, device=users.device) + num_users
            loss = bpr_loss(final, users[chosen], items[chosen] + num_users, negatives)
            ids = masked if self.masked_share else described
            if len(ids):
                ids = ids[torch.randint(len(ids), (min(len(ids), IDS_PER_STEP),), device=ids.device)]
                loss = loss + ALIGNMENT * self.disagreement(final, texts, ids, sigma)
            loss.backward()
            assert final.grad is not None
            layer_0.grad, token.grad = spread_back(adjacency, final.grad, masked)
            layer_0.grad += L2 / len(layer_0) * layer_0
            optimizer.step()
        self._regress(propagate(adjacency, layer_0, NUM_LAYERS), texts * is_node.unsqueeze(1))

    def _regress(self, final: torch.Tensor, texts: torch.Tensor) -> None:
        """Regress e (num_ids, DIM), scaled to unit deviation, on texts (num_ids, in_dim); zero rows do not count."""
        final = final / final[has_text(texts).squeeze(1)].std()
        penalty = RIDGE * torch.eye(self.in_dim, device=texts.device)
        for side, (e, x) in enumerate(zip(final.split(self.num_ids), texts.split(self.num_ids), strict=True)):
            self.get_buffer(f"of_text_{side}").copy_(torch.linalg.solve(x.T @ x + penalty, x.T @ e))

    def network(self) -> nn.Module:
        """The small network sigma: of texts, (n, in_dim) -> (n, DIM), or of e, (n, DIM) -> (n, in_dim), if masked."""
        in_dim, out_dim = (DIM, self.in_dim) if self.masked_share else (self.in_dim, DIM)
        return nn.Sequential(nn.Linear(in_dim, DIM), nn.LeakyReLU(), nn.Linear(DIM, out_dim))

    def disagreement(
        self, final: torch.Tensor, texts: torch.Tensor, ids: torch.Tensor, sigma: nn.Module
    ) -> torch.Tensor:
        """L_align of `ids`, int64 (n,), from e (num_ids, DIM) and the texts' vectors (num_ids, in_dim) of all ids."""
        e, s = F.embedding(ids, final), texts[ids]
        x, y = (sigma(e), s) if self.masked_share else (e, sigma(s))
        return info_nce(F.normalize(x, dim=1), F.normalize(y, dim=1), ids, TEMPERATURE)


class GenerativeAlignment(ContrastiveAlignment):
    """RLMRec-Gen: e of a masked id, which comes from its neighbours, must predict the vector of its text."""

    masked_share = MASKED_SHARE


def spread_back(
    adjacency: torch.Tensor, gradient: torch.Tensor, masked: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of layer 0, and of the token that replaced the masked ids there, from the gradient of e.

    Propagation is linear and symmetric, so the gradient is propagated like the vectors.
    """
    spread = propagate(adjacency, gradient, NUM_LAYERS)
    return spread.index_fill(0, masked, 0.0), spread[masked].sum(dim=0)
