"""One forward of a model over a batch: the new tokens of several sequences, packed raggedly into one row.

A sequence feeds a chain (its committed tokens that are not cached yet, at least the last) and a draft tree below it.
Only the chain's last token and the nodes of the tree have logits.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.interface import EagerAttention, StepPlan, planned
from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata, attention_metadata
from laserbatch.pipeline.decoding.batch import Batch, Feed
from laserbatch.pipeline.decoding.device_memory import is_device_lost, is_out_of_memory, to_device
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.cuda_graphs import BufferedForward, kernel_for
from laserbatch.pipeline.decoding.model.output_head import HiddenRows, OutputHead
from laserbatch.pipeline.decoding.token_tree import TreeBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutput:
    """Result of one forward.

    `rows` gives the logits of the batch's `logit_indices`, until the next forward. Row `batch.logit_starts[i]` follows
    the chain of feed i; the rows of its tree's nodes come next.
    """

    rows: HiddenRows
    batch: Batch

    @property
    def logits(self) -> torch.Tensor:
        """The logits of all rows, computed anew each time: (num_rows, vocab_size) on the device."""
        return self.rows.of(np.arange(self.rows.num_rows))


class ModelRunner:
    """Runs batches through a transformers model whose attention is ours, over one KV cache.

    `model` : the model, or an object with the methods of an `OutputHead`. `attention` : as in `decoding.attention`.
    Raises ModelError: "triton" is not available.
    """

    def __init__(self, model, cache: KVCache, device: torch.device, attention: str = "torch") -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self.last_plan: StepPlan | None = None  # plan of the newest forward without a kernel, for checks
        self.fused = getattr(model, "fused", None)  # runs the forwards without a kernel, unless None
        self.head = model if hasattr(model, "hidden_of") else OutputHead(model)
        self._attention = attention
        make_kernel = kernel_for(attention, device)  # None: there is no kernel
        layers = getattr(model, "cuda_layers", None)
        self.buffered = None if make_kernel is None else BufferedForward(self.head, cache, device, make_kernel, layers)

    def forward(self, feeds: list[Feed], trees: TreeBatch | None = None) -> StepOutput:
        """Run the model over all feeds at once. Nothing is committed: the caller commits the slots it keeps.

        `trees`: one for each feed; None: there are no drafts.
        """
        batch = Batch(feeds, TreeBatch.empty(len(feeds)) if trees is None else trees, self.cache)
        metadata = attention_metadata(batch, self.cache)
        if self.buffered is not None:
            try:
                return StepOutput(self.buffered.run(batch, metadata), batch)
            except Exception as error:  # Triton and CUDA may raise anything; torch's attention does without them
                if is_out_of_memory(error) or is_device_lost(error) or self._attention == "triton":
                    raise
                message = "the attention kernel failed (%s); from now on attention runs in torch"
                logger.warning(message, error, exc_info=True)
                self.buffered = None
        return StepOutput(self._run(batch, metadata), batch)

    @torch.inference_mode()
    def _run(self, batch: Batch, metadata: AttentionMetadata[np.ndarray]) -> HiddenRows:
        input_ids, position_ids = self._on_device(batch.token_ids)[None], self._on_device(batch.positions)[None]
        attention = EagerAttention(metadata, self.device)
        plan = self.last_plan = StepPlan(self.cache, self._on_device(batch.slot_mapping), attention)
        if self.fused is not None:
            return HiddenRows(self.fused, self.fused.hidden_of(batch, plan), batch.logit_indices)
        with planned(plan):
            return HiddenRows(self.head, self.head.hidden_of(input_ids, position_ids), batch.logit_indices)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array.astype(np.int64, copy=False), self.device)
