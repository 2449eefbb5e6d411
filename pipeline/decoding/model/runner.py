"""One forward of a model over a batch: the new tokens of several sequences, packed raggedly into one row.

A sequence feeds a chain (its committed tokens that are not cached yet, at least the last) and a draft tree below it.
Logits can be had of the chain's last token and of every node of the tree, and of nothing else.
"""

import inspect
import logging
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.interface import step_plan
from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata, attention_metadata
from laserbatch.pipeline.decoding.attention.plan import EagerAttention, StepPlan
from laserbatch.pipeline.decoding.batch import Batch, Feed
from laserbatch.pipeline.decoding.memory.device_memory import is_out_of_memory, to_device
from laserbatch.pipeline.decoding.memory.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.cuda_graphs import BufferedForward, kernel_for
from laserbatch.pipeline.decoding.model.output_head import HeldLogits, HiddenRows, OutputHead, StepLogits
from laserbatch.pipeline.decoding.token_tree import TreeBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutput:
    """Result of one forward.

    `rows` gives logits of the batch's wanted tokens, until the next forward. Of feed i, rows `starts[i]` (after the
    chain) and those of its tree's nodes behind it are its own.
    """

    rows: StepLogits
    batch: Batch

    @property
    def starts(self) -> np.ndarray:
        """int64[number of feeds]."""
        return self.batch.wanted_starts

    @property
    def logits(self) -> torch.Tensor:
        """All of them, computed anew each time: (num_kept, vocab_size) on the device."""
        return self.rows.of(np.arange(self.rows.num_rows))


class ModelRunner:
    """Runs batches through a transformers model whose attention is ours, over one KV cache.

    Parameters
    ----------
    attention : "torch", "triton" or "auto", as `decoding.attention`.
    splits_head : whether logits are computed apart from the model's body, when they are asked for
        (`output_head.has_output_head`); else with it.

    Raises
    ------
    pipeline.errors.ModelError : "triton" cannot be had.
    """

    def __init__(
        self, model, cache: KVCache, device: torch.device, attention: str = "torch", splits_head: bool = False
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self.last_plan: StepPlan | None = None  # of the newest forward without a kernel, for checks
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._head = OutputHead(model) if splits_head else None
        self._attention = attention
        self.buffered: BufferedForward | None = None  # takes the forwards, where there is a kernel
        kernel = kernel_for(attention, device)
        if kernel is not None:
            on_cuda, selects = device.type == "cuda", self._selects_logits
            self.buffered = BufferedForward(
                model, cache, device, kernel, selects, pads=on_cuda, captures=on_cuda, head=self._head
            )

    def forward(self, feeds: list[Feed], trees: TreeBatch | None = None) -> StepOutput:
        """Run the model over all feeds at once. Nothing is committed: the caller commits the slots it keeps.

        `trees`: one of each feed; None: they have none.
        """
        batch = Batch(feeds, TreeBatch.empty(len(feeds)) if trees is None else trees, self.cache)
        metadata = attention_metadata(batch, self.cache)
        if self.buffered is not None:
            try:
                return StepOutput(self.buffered.run(batch, metadata), batch)
            except Exception as error:
                if is_out_of_memory(error) or self._attention == "triton":
                    raise
                logger.warning("the attention kernel failed (%s); attention is torch's from here on", error)
                self.buffered = None
        return StepOutput(self._run(batch, metadata), batch)

    @torch.inference_mode()
    def _run(self, batch: Batch, metadata: AttentionMetadata) -> StepLogits:
        """The model without a kernel."""
        input_ids, position_ids = self._on_device(batch.token_ids)[None], self._on_device(batch.positions)[None]
        attention = EagerAttention.on(metadata, self.device)
        plan = self.last_plan = StepPlan(self.cache, self._on_device(batch.slot_mapping), attention)
        wanted = batch.wanted
        token = step_plan.set(plan)
        try:
            if self._head is not None:
                return HiddenRows(self._head, self._head.hidden_of(input_ids, position_ids), wanted)
            selects = self._selects_logits and len(wanted) < len(batch)
            arguments = {"logits_to_keep": self._on_device(wanted)} if selects else {}
            logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **arguments).logits[0]
        finally:
            step_plan.reset(token)
        return HeldLogits(logits if len(logits) == len(wanted) else logits.index_select(0, self._on_device(wanted)))

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array.astype(np.int64, copy=False), self.device)
