"""TRAWL: Luo et al., "TRAWL: External Knowledge-Enhanced Recommendation with LLM Assistance", CIKM 2024. Its section on
training the adapter, by the abstract and by what LASER's authors say of it.

A frozen encoder's vectors say what a text is about, not who would like it. A small adapter f moves them: texts that
behaviour joins shall be near each other, and far from the other texts of a batch (InfoNCE):

    L = - mean over (a, b) of ln (exp(f(a) . f(b) / tau) / sum over b' of exp(f(a) . f(b') / tau)),  |f| = 1

Pairs are items that the same users liked, each with the NUM_NEIGHBOURS that it is met with most, and users with items
that they liked. What f gives then stands still, while the CTR network learns to read it by the linear adaptor's layers.
"""

import numpy as np
import torch
from scipy import sparse
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.adaptors.adaptor import LinearAdaptor, has_text, info_nce
from laserbatch.ctr.fields import Field

NUM_NEIGHBOURS = 20  # of an item, the most frequent ones
MAX_POSITIVES = 50  # newest ones of a user that are looked at: pairs are as many as their square
HIDDEN_DIM, ADAPTED_DIM = 64, 32
TEMPERATURE = 0.2
NUM_STEPS, BATCH_SIZE, LEARNING_RATE = 50, 512, 3e-3


class ContrastiveAdaptor(LinearAdaptor):
    """One adapter of each side, trained on behaviour before the network; without positives it stays as it began."""

    entity_dim = ADAPTED_DIM

    def __init__(self, vectors: tuple[np.ndarray, np.ndarray], ids: tuple[Field, Field]) -> None:
        super().__init__(vectors, ids)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(self.in_dim, HIDDEN_DIM), nn.ReLU(), nn.Linear(HIDDEN_DIM, ADAPTED_DIM))
            for _ in vectors
        )

    def of_entities(self, side: int, numbers: torch.Tensor) -> torch.Tensor:
        """f, zeros without a text: (batch,) -> (batch, ADAPTED_DIM) of length sqrt(ADAPTED_DIM)."""
        vectors = self.get_buffer(f"vectors_{side}")[numbers]
        return torch.where(has_text(vectors), self._adapted(side, vectors) * ADAPTED_DIM**0.5, 0.0)

    def fit_positives(self, users: torch.Tensor, items: torch.Tensor) -> None:
        """Train both adapters on the pairs of training rows' positives, int64 (n,) in order of time."""
        has = [has_text(self.get_buffer(f"vectors_{side}")).squeeze(1) for side in range(2)]
        is_pair = has[0][users] & has[1][items]
        met = items_liked_together(users[has[1][items]].cpu().numpy(), items[has[1][items]].cpu().numpy())
        pairs = [  # (side of a, numbers of a, items b)
            (0, users[is_pair], items[is_pair]),
            (1, *(torch.from_numpy(of).to(items.device) for of in met)),
        ]
        pairs = [of for of in pairs if len(of[1])]
        if not pairs:
            return
        optimizer = torch.optim.Adam(self.adapters.parameters(), LEARNING_RATE)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = torch.stack([self._step_loss(*of) for of in pairs]).sum()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()

    def _step_loss(self, side: int, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        chosen = torch.randint(len(left), (BATCH_SIZE,), device=left.device)
        left, right = left[chosen], right[chosen]
        a = self._adapted(side, self.get_buffer(f"vectors_{side}")[left])
        return info_nce(a, self._adapted(1, self.vectors_1[right]), right, TEMPERATURE)

    def _adapted(self, side: int, vectors: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.adapters[side](vectors), dim=1)


def items_liked_together(users: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each item with those that most users liked beside it, equal ones by number; at most NUM_NEIGHBOURS of an item.

    From users and items, int64 (n,) in order of time, to items and neighbours, int64 (num_pairs,).
    """
    if len(users) == 0:
        return users, items
    by_user = np.argsort(users, kind="stable")
    users, items = users[by_user], items[by_user]
    is_newest = np.searchsorted(users, users, side="right") - np.arange(len(users)) <= MAX_POSITIVES
    users, items = users[is_newest], items[is_newest]
    distinct, places = np.unique(items, return_inverse=True)
    liked = sparse.csr_array((np.ones(len(users), np.float32), (users, places)))
    liked.data[:] = 1  # however often
    together = (liked.T @ liked).tocoo()
    row, column = together.coords
    is_other = row != column
    row, column, count = row[is_other], column[is_other], together.data[is_other]
    order = np.lexsort((column, -count, row))
    row, column = row[order], column[order]
    is_near = np.arange(len(row)) - np.searchsorted(row, row) < NUM_NEIGHBOURS
    return distinct[row[is_near]], distinct[column[is_near]]
