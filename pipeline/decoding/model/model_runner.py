"""One forward of a model over the nodes of several sequences, packed raggedly into one row of tokens.

A sequence feeds a chain (its committed tokens that are not cached yet, at least the last) and a draft tree below it.
Logits can be had of the chain's last token and of every node of the tree, and of nothing else.

Knows no request, no verifier and no drafter.
"""

import inspect
import logging
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.attention_plan import CALL_COST_CPU, CALL_COST_CUDA, StepPlan
from laserbatch.pipeline.decoding.attention.row_plan import row_plan
from laserbatch.pipeline.decoding.attention.step_buffers import PackedStep
from laserbatch.pipeline.decoding.attention.token_plan import token_plan
from laserbatch.pipeline.decoding.attention.tree_attention import step_plan
from laserbatch.pipeline.decoding.device_copy import to_device
from laserbatch.pipeline.decoding.feed import Feed, Pack
from laserbatch.pipeline.decoding.memory.kv_cache import KVCache, is_out_of_memory
from laserbatch.pipeline.decoding.memory.kv_store import KVStore
from laserbatch.pipeline.decoding.memory.token_store import TokenStore
from laserbatch.pipeline.decoding.model.output_head import HeldLogits, HiddenRows, OutputHead, StepLogits
from laserbatch.pipeline.decoding.model.packed_forward import PackedForward, kernel_for
from laserbatch.pipeline.decoding.packed_trees import PackedTrees
from laserbatch.pipeline.errors import ModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutput:
    """Result of one forward.

    `rows` gives logits of the pack's wanted tokens, until the next forward. Of feed i, rows `starts[i]` (after the
    chain) and those of its tree's nodes behind it are its own.
    """

    rows: StepLogits
    pack: Pack

    @property
    def starts(self) -> np.ndarray:
        """int64[number of feeds]."""
        return self.pack.wanted_starts

    @property
    def logits(self) -> torch.Tensor:
        """All of them, computed anew each time: (num_kept, vocab_size) on the device."""
        return self.rows.of(np.arange(self.rows.num_rows))


class ModelRunner:
    """Runs packed steps of a transformers model whose attention is `tree_attention`, over one KV store.

    Parameters
    ----------
    attention : "torch", "triton" or "auto", as `decoding.attention`; a kernel needs a `TokenStore`.
    splits_head : whether logits are computed apart from the model's body, when they are asked for
        (`output_head.has_output_head`); else with it.

    Raises
    ------
    pipeline.errors.ModelError : "triton" cannot be had.
    """

    def __init__(
        self, model, store: KVCache, device: torch.device, attention: str = "torch", splits_head: bool = False
    ) -> None:
        self.model = model
        self.store = store
        self.device = device
        self.last_plan: StepPlan | None = None  # of the newest forward, for checks
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._head = OutputHead(model) if splits_head else None
        self._plan = row_plan if isinstance(store, KVStore) else token_plan
        self._attention = attention
        self.packed: PackedForward | None = None  # takes the forwards, where there is a kernel
        kernel = kernel_for(attention, device)
        if kernel is not None and isinstance(store, TokenStore):
            on_cuda = device.type == "cuda"
            selects = self._selects_logits
            self.packed = PackedForward(
                model, store, device, kernel, selects, pads=on_cuda, captures=on_cuda, head=self._head
            )
        elif attention == "triton":
            raise ModelError("decoding.attention is triton, which needs decoding.kv_cache tokens")
        self._call_cost = CALL_COST_CPU if device.type == "cpu" else CALL_COST_CUDA

    def forward(self, feeds: list[Feed], trees: PackedTrees | None = None) -> StepOutput:
        """Run the model over all feeds at once. Nothing is committed: the caller commits the slots it keeps.

        `trees`: one of each feed; None: they have none.
        """
        pack = Pack(feeds, PackedTrees.empty(len(feeds)) if trees is None else trees, self.store)
        plan = self._plan(self.store, pack, self._call_cost)
        rows, keep = None, pack.wanted
        if self.packed is not None:
            rows = self._run_packed(PackedStep(pack.token_ids, pack.slots, keep, plan.ragged, self.store.scratch_slot))
        if rows is None:
            rows = self._run(plan, keep)
        self.last_plan = plan
        return StepOutput(rows, pack)

    def _run_packed(self, step: PackedStep) -> StepLogits | None:
        """The same by the kernel; None where it failed, and then it is not tried again."""
        try:
            return self.packed.run(step)
        except Exception as error:
            if is_out_of_memory(error) or self._attention == "triton":
                raise
            logger.warning("the attention kernel failed (%s); attention is torch's from here on", error)
            self.packed = None
            return None

    @torch.inference_mode()
    def _run(self, plan: StepPlan, keep: np.ndarray) -> StepLogits:
        """The model over a pack, of which the tokens `keep` are looked at."""
        pack = plan.pack
        input_ids, position_ids = self._on_device(pack.token_ids)[None], self._on_device(pack.positions)[None]
        token = step_plan.set(plan)
        try:
            if self._head is not None:
                return HiddenRows(self._head, self._head.hidden_of(input_ids, position_ids), keep)
            selects = self._selects_logits and len(keep) < plan.num_tokens
            arguments = {"logits_to_keep": self._on_device(keep)} if selects else {}
            logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **arguments).logits[0]
        finally:
            step_plan.reset(token)
        return HeldLogits(logits if len(logits) == len(keep) else logits.index_select(0, self._on_device(keep)))

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array.astype(np.int64, copy=False), self.device)
