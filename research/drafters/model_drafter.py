"""Grows draft trees of several sequences, one level at a time, by small models or heads."""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.drafters.drafter import Drafter, Observation
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.runner import ModelRunner, StepOutput
from laserbatch.pipeline.decoding.model.sampling import gumbel_noise
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import Proposals, TreeBatch

DRAFT_SEED = 0x5DEECE66D  # separates the random numbers of drafts from those of the target
MAX_TAGS = 1024


class DraftModel:
    """A model that predicts the next tokens of sequences: a small model, or a head of the target.

    `Drafter` describes `observes` and `observe`.
    """

    observes: Literal["nothing", "decode"] = "nothing"

    def has_room(self, sequence: DecodingSequence) -> bool:
        return True

    def begin(self, sequences: list[DecodingSequence]) -> None:
        """Read the new tokens of the sequences that `log_q` will be called for."""

    def log_q(self, trees: TreeBatch, tree_of: np.ndarray, places: np.ndarray) -> torch.Tensor:
        """Log probabilities after nodes, float32 (n, vocab_size), at temperature 1.

        `tree_of` and `places`, int64[n], are the nodes' trees and places, -1 for the root. The trees grow: earlier
        nodes keep their places, and `log_q` was called before for all nodes but the deepest.
        """
        raise NotImplementedError

    def log_acceptance(self, depth: int, log_q: np.ndarray) -> np.ndarray:
        """Estimate the log acceptance of drafted tokens from their `log_q` and depth, which is 0 below the root."""
        return log_q

    def observe(self, observation: Observation) -> None:
        """Read the hidden states of a step of the target."""

    def forget(self, sequence: DecodingSequence) -> None:
        """Release what is kept for a sequence that has ended."""


class CachedModel(DraftModel):
    """A draft model with its own KV cache, which has a row for each sequence that it drafts for.

    `attention` : as in `decoding.attention`; with a CUDA kernel, forwards are replayed as CUDA graphs of this model.

    A row holds the sequence without its last token, which every forward computes again with the tree.
    """

    def __init__(
        self, model, device: torch.device, max_rows: int, max_tokens: int, log_acceptance=None, attention: str = "torch"
    ) -> None:
        self.log_acceptance = log_acceptance or self.log_acceptance
        self._cache = KVCache(max_rows, max_tokens)
        self._runner = ModelRunner(model, self._cache, device, attention)
        self._rows: dict[DecodingSequence, int] = {}
        self._feeds: list[Feed] = []  # the last token of each sequence

    def _has_row(
        self, sequence: DecodingSequence, token_ids: np.ndarray, num_expected: int, shares: bool = True
    ) -> bool:
        """Whether the sequence has a row or can get one (`KVCache.acquire`)."""
        if sequence not in self._rows:
            lease = self._cache.acquire(token_ids, num_expected, shares)
            if lease is None:
                return False
            self._rows[sequence] = lease.row
        return True

    def _read(self, feeds: list[Feed]) -> StepOutput:
        """Run a forward of new tokens; all tokens of a feed except the last stay in the cache."""
        output = self._runner.forward(feeds)
        batch = output.batch
        stays = np.ones(len(batch), bool)
        stays[batch.offsets + batch.num_chain - 1] = False
        self._cache.commit(batch.rows, batch.num_chain - 1, batch.slot_mapping[stays])
        self._feeds = [Feed(feed.row, feed.chain_ids[-1:]) for feed in feeds]
        return output

    def forget(self, sequence: DecodingSequence) -> None:
        row = self._rows.pop(sequence, None)
        if row is not None:
            self._cache.release(row)


class TreeShape(Protocol):
    """Grows trees from the predictions of models."""

    def grow(self, models: Sequence[DraftModel], sequences: list[DecodingSequence], temperature: float) -> TreeBatch:
        """Grow a tree for each sequence."""
        ...


class GrowingTrees:
    """The nodes of `num_trees` trees, in the order in which they are added; parents come before children."""

    def __init__(self, num_trees: int) -> None:
        self.sizes = np.zeros(num_trees, np.int64)
        self._columns: list[tuple[np.ndarray, ...]] = []  # tree, place, token, parent, log acceptance
        self._drawn: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # tree, place, row
        self._log_q: list[torch.Tensor] = []
        self._num_rows = 0

    def add(self, tree_of, parents, token_ids, log_acceptance) -> np.ndarray:
        """Add nodes, given by arrays [n], below `parents` in their trees; return their places, int64[n]."""
        order = np.argsort(tree_of, kind="stable")
        counts = np.bincount(tree_of, minlength=len(self.sizes))
        numbers = np.empty(len(tree_of), np.int64)
        numbers[order] = np.arange(len(tree_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = self.sizes[tree_of] + numbers
        self.sizes = self.sizes + counts
        self._columns.append((tree_of, places, token_ids, parents, log_acceptance))
        return places

    def drawn(self, tree_of: np.ndarray, places: np.ndarray, rows: np.ndarray, log_q: torch.Tensor) -> None:
        """Record that nodes int64[m], perhaps repeated, were drawn in this order from rows int64[m] of log_q."""
        self._drawn.append((tree_of, places, rows + self._num_rows))
        self._log_q.append(log_q)
        self._num_rows += len(log_q)

    def batch(self) -> TreeBatch:
        """The trees so far, without their source."""
        if not self._columns:
            return TreeBatch.empty(len(self.sizes))
        columns = [np.concatenate(column) for column in zip(*self._columns, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        _, _, token_ids, parents, log_acceptance = (column[order] for column in columns)
        arrays = token_ids.astype(np.int32), parents.astype(np.int32), log_acceptance.astype(np.float32)
        proposals = None
        if self._drawn:
            tree_of, places, rows = (np.concatenate(column) for column in zip(*self._drawn, strict=True))
            starts = np.cumsum(self.sizes) - self.sizes
            proposals = Proposals(starts[tree_of] + places, rows, torch.cat(self._log_q))
        return TreeBatch(self.sizes, *arrays, np.zeros(len(token_ids), np.uint8), proposals)


class ModelDrafter(Drafter):
    """Drafts by models, in trees that a `TreeShape` grows; `source` is a code of `retrieval_pools.sources`."""

    def __init__(self, models: Sequence[DraftModel], shape: TreeShape, temperature: float, source: int) -> None:
        self._models, self._shape, self._temperature, self._source = models, shape, temperature, source
        self.observes = "decode" if any(model.observes == "decode" for model in models) else "nothing"

    @torch.inference_mode()
    def draft_all(self, sequences: list[DecodingSequence], max_depths: list[int]) -> TreeBatch:
        places = [i for i, text in enumerate(sequences) if all([model.has_room(text) for model in self._models])]
        if not places:
            return TreeBatch.empty(len(sequences))
        drafting = [sequences[place] for place in places]
        for model in self._models:
            model.begin(drafting)
        trees = self._shape.grow(self._models, drafting, self._temperature)
        trees.source = np.full(len(trees), self._source, np.uint8)
        return trees.scatter(places, len(sequences))

    def observe(self, observation: Observation) -> None:
        for model in self._models:
            model.observe(observation)

    def forget(self, sequence: DecodingSequence) -> None:
        for model in self._models:
            model.forget(sequence)


def draft_noise(
    sequences: list[DecodingSequence], tree_of: np.ndarray, depth: int, tags: np.ndarray, like
) -> torch.Tensor:
    """Gumbel noise, float32 (n, vocab_size), seeded by sequence, position and tag (int64[n] below MAX_TAGS)."""
    seeds = np.array([sequence.request.seed for sequence in sequences])[tree_of] ^ DRAFT_SEED
    positions = (np.array([len(sequence.context) for sequence in sequences])[tree_of] + depth) * MAX_TAGS + tags
    seeds, positions = to_device(np.stack((seeds, positions)), like.device)
    return gumbel_noise(seeds, positions, like.shape[-1])


def on_host(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Copy tensors of one shape to the host in one transfer; they pass as float64, which holds every token id."""
    stacked = torch.stack([tensor.double() for tensor in tensors]).cpu().numpy()
    names = (str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return [array.astype(name) for array, name in zip(stacked, names, strict=True)]
