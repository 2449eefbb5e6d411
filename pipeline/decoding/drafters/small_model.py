"""Small models that draft for the target, each with a KV cache of its own beside the target's."""

import numpy as np
import torch

from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.drafters.growing import DraftModel
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.load import LoadedModel
from laserbatch.pipeline.decoding.model.runner import ModelRunner
from laserbatch.pipeline.decoding.sequence import Sequence
from laserbatch.pipeline.decoding.token_tree import TreeBatch


class SmallModel(DraftModel):
    """A loaded model and rows of its cache for the sequences that it drafts for.

    A row holds what the sequence's text is but for the last token, which every forward computes anew with the tree.
    """

    def __init__(self, loaded: LoadedModel, max_rows: int, max_tokens: int, log_acceptance=None) -> None:
        self.max_context = loaded.max_context
        self.log_acceptance = log_acceptance or self.log_acceptance
        self._cache = KVCache(max_rows, max_tokens)
        self._runner = ModelRunner(loaded.model, self._cache, loaded.device)
        self._rows: dict[int, int] = {}  # by the sequences' `id`
        self._feeds: list[Feed] = []
        self._root: torch.Tensor | None = None

    def begin(self, sequences: list[Sequence]) -> None:
        rows = [self._rows[id(one)] for one in sequences]
        pairs = zip(rows, sequences, strict=True)
        new = [Feed(row, one.context[self._cache.lengths[row] :]) for row, one in pairs]
        output = self._runner.forward(new)
        batch = output.batch
        stays = np.ones(len(batch), bool)
        stays[batch.offsets + batch.num_chain - 1] = False
        self._cache.commit(batch.rows, batch.num_chain - 1, batch.slot_mapping[stays])
        for feed, one in zip(new, sequences, strict=True):
            if self._cache.lengths[feed.row] < one.num_prompt:
                self._cache.remember_prefix(feed.row, one.prompt_ids[: self._cache.lengths[feed.row]])
        self._feeds = [Feed(feed.row, one.context[-1:]) for feed, one in zip(new, sequences, strict=True)]
        self._root = output.logits

    def log_q(self, trees: TreeBatch, tree_of: np.ndarray, places: np.ndarray) -> torch.Tensor:
        if len(trees) == 0:
            return torch.log_softmax(self._root[to_device(tree_of, self._root.device)].float(), -1)
        output = self._runner.forward(self._feeds, trees)
        return torch.log_softmax(output.rows.of(output.batch.wanted_starts[tree_of] + 1 + places).float(), -1)

    def has_room(self, sequence: Sequence) -> bool:
        if id(sequence) in self._rows:
            return True
        expected = len(sequence.context) + sequence.num_left
        lease = self._cache.acquire(sequence.context, expected) if expected <= self.max_context else None
        if lease is not None:
            self._rows[id(sequence)] = lease.row
        return lease is not None

    def forget(self, sequence: Sequence) -> None:
        row = self._rows.pop(id(sequence), None)
        if row is not None:
            self._cache.release(row)
