"""TRAWL: Luo et al., "TRAWL: External Knowledge-Enhanced Recommendation with LLM Assistance", CIKM 2024. Its section on
training the adapter, as the abstract and LASER's authors describe it.

A frozen encoder's vectors say what a text is about, not who would like it. A small adapter f moves them: texts of pairs
from behaviour come near each other, and far from the other texts of a batch (InfoNCE):

    L = - mean over (a, b) of ln (exp(f(a) . f(b) / tau) / sum over b' of exp(f(a) . f(b') / tau)),  |f| = 1

Pairs are items that the same users liked, each with its NUM_NEIGHBOURS most frequent neighbours, and users with items
that they liked. The CTR network then reads f by the linear adaptor's layers, and trains f further with them.
"""

import numpy as np
import torch
from scipy import sparse
from torch import nn
from torch.nn import functional as F

from laserbatch.ctr.adaptors.adaptor import LinearAdaptor, has_text, info_nce
from laserbatch.ctr.fields import Field

NUM_NEIGHBOURS = 20  # number of neighbours of an item, the most frequent ones
MAX_POSITIVES = 50  # only a user's newest positives form pairs, since the number of pairs grows with its square
HIDDEN_DIM, ADAPTED_DIM = 64, 32
TEMPERATURE = 0.2
NUM_STEPS, BATCH_SIZE, LEARNING_RATE = 50, 512, 3e-3


class ContrastiveAdaptor(LinearAdaptor):
    """An adapter for each side, trained on behaviour, if there are positives, and then with the network."""

    entity_dim = ADAPTED_DIM

    def __init__(self, vectors: tuple[np.ndarray, np.ndarray], ids: tuple[Field, Field]) -> None:
        super().__init__(vectors, ids)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(self.in_dim, HIDDEN_DIM), nn.ReLU(), nn.Linear(HIDDEN_DIM, ADAPTED_DIM))
            for _ in vectors
        )

    def of_entities(self, side: int, numbers: torch.Tensor) -> torch.Tensor:
        """f scaled to length sqrt(ADAPTED_DIM), zeros without a text: (batch,) -> (batch, ADAPTED_DIM)."""
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
    """Pair each item with at most NUM_NEIGHBOURS items that most users liked too; ties go to the lower number.

    Maps users and items, int64 (n,) in order of time, to items and neighbours, int64 (num_pairs,).
    """
    if len(users) == 0:
        return users, items
    by_user = np.argsort(users, kind="stable")
    users, items = users[by_user], items[by_user]
    is_newest = np.searchsorted(users, users, side="right") - np.arange(len(users)) <= MAX_POSITIVES
    users, items = users[is_newest], items[is_newest]
    distinct, places = np.unique(items, return_inverse=True)
    liked = sparse.csr_array((np.ones(len(users), np.float32), (users, places)))
    liked.data[:] = 1  # repeated likes count once
    together = (liked.T @ liked).tocoo()
    row, column = together.coords
    is_other = row != column
    row, column, count = row[is_other], column[is_other], together.data[is_other]
    order = np.lexsort((column, -count, row))
    row, column = row[order], column[order]
    is_near = np.arange(len(row)) - np.searchsorted(row, row) < NUM_NEIGHBOURS
    return distinct[row[is_near]], distinct[column[is_near]]
