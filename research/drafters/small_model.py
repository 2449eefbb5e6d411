"""Small models that draft for the target, each with a KV cache of its own beside the target's."""

import numpy as np
import torch

from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.model.load import LoadedModel
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.research.drafters.model_drafter import CachedModel


class SmallModel(CachedModel):
    def __init__(
        self, loaded: LoadedModel, max_rows: int, max_tokens: int, log_acceptance=None, attention: str = "torch"
    ) -> None:
        super().__init__(loaded.model, loaded.device, max_rows, max_tokens, log_acceptance, attention)
        self.max_context = loaded.max_context

    def begin(self, sequences: list[DecodingSequence]) -> None:
        rows = [self._rows[sequence] for sequence in sequences]
        pairs = zip(rows, sequences, strict=True)
        new = [Feed(row, sequence.context[self._cache.lengths[row] :]) for row, sequence in pairs]
        self._root = self._read(new).logits
        for feed, sequence in zip(new, sequences, strict=True):
            if self._cache.lengths[feed.row] < sequence.num_prompt:
                self._cache.remember_prefix(feed.row, sequence.prompt_ids[: self._cache.lengths[feed.row]])

    def log_q(self, trees: TreeBatch, tree_of: np.ndarray, places: np.ndarray) -> torch.Tensor:
        if len(trees) == 0:
            return torch.log_softmax(self._root[to_device(tree_of, self._root.device)].float(), -1)
        output = self._runner.forward(self._feeds, trees)
        return torch.log_softmax(output.rows.of(output.batch.logit_starts[tree_of] + 1 + places).float(), -1)

    def has_room(self, sequence: DecodingSequence) -> bool:
        expected = len(sequence.context) + sequence.num_left
        return expected <= self.max_context and self._has_row(sequence, sequence.context, expected)
