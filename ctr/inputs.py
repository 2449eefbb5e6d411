"""What every network sees of a row besides its history; the adaptors by their names in `ctr.adaptor`."""

import numpy as np
import torch
from torch import nn

from laserbatch.ctr.adaptors.adaptor import Adaptor, LinearAdaptor
from laserbatch.ctr.adaptors.kar import HybridExpertAdaptor
from laserbatch.ctr.adaptors.once import ContentAdaptor
from laserbatch.ctr.adaptors.rlmrec import ContrastiveAlignment, GenerativeAlignment
from laserbatch.ctr.adaptors.trawl import ContrastiveAdaptor
from laserbatch.ctr.dataset import ModelRows
from laserbatch.ctr.feature_set import SideVectors
from laserbatch.ctr.fields import NUM_RESERVED, Field
from laserbatch.ctr.knowledge import Knowledge
from laserbatch.ctr.layers import CtrBatch, EntityEmbedding
from laserbatch.ctr.settings import CtrSettings

ADAPTORS: dict[str, type[Adaptor]] = {
    "linear": LinearAdaptor,
    "kar": HybridExpertAdaptor,
    "once": ContentAdaptor,
    "trawl": ContrastiveAdaptor,
    "rlmrec": ContrastiveAlignment,
    "rlmrec_gen": GenerativeAlignment,
}


class RowInputs(nn.Module):
    """The inputs of a row besides its history: fields, cluster ids, statistics of earlier rows, adapted texts."""

    def __init__(self, rows: ModelRows, knowledge: Knowledge | None, settings: CtrSettings) -> None:
        super().__init__()
        self.knowledge: Adaptor | None = None
        user_fields, item_fields = rows.user_fields, rows.item_fields
        if knowledge is not None:
            user_fields += _cluster_fields(knowledge.user)
            item_fields += _cluster_fields(knowledge.item)
        self.user_embedding = EntityEmbedding(user_fields, settings.embedding_dim)
        self.item_embedding = EntityEmbedding(item_fields, settings.embedding_dim)
        if knowledge is not None:
            vectors = knowledge.user.vectors, knowledge.item.vectors
            self.knowledge = ADAPTORS[settings.adaptor](vectors, (user_fields[0], item_fields[0]))
        self.item_dim = self.item_embedding.out_dim
        knowledge_dim = 0 if self.knowledge is None else self.knowledge.out_dim
        self.out_dim = self.user_embedding.out_dim + self.item_dim + rows.past.shape[1] + knowledge_dim

    def forward(self, batch: CtrBatch, target: torch.Tensor) -> torch.Tensor:
        """A batch and its embedded targets (batch, item_dim) -> (batch, out_dim)."""
        parts = [self.user_embedding(batch.users), target, batch.past]
        if self.knowledge is not None:
            parts.append(self.knowledge(batch))
        return torch.cat(parts, dim=1)


def _cluster_fields(side: SideVectors) -> tuple[Field, ...]:
    """The cluster ids as more fields, one a level; clusters are never unknown, so code 1 is unused."""
    codes = np.where(side.codes > 0, side.codes - 1 + NUM_RESERVED, 0)
    sizes = (side.num_codes - 1 + NUM_RESERVED).tolist()
    return tuple(Field("cluster", codes[:, [level]], size) for level, size in enumerate(sizes))
