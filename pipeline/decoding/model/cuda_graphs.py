"""A model's forward through static buffers, with a kernel's attention; on CUDA small steps are replayed as CUDA graphs.

A step of few tokens is padded to a bucket, whose buffers stay where they are. On CUDA a bucket's first step runs
eagerly, its second is captured, and later ones are replayed. Large steps, and those that want few of their logits
(prompts), run eagerly in buffers of their own. The path is the same without capture, which is how it is tested.

Where the output head can be taken apart, a graph ends with hidden states: logits, which at a vocabulary of 152k are
0.3 GB of each graph of 1024 tokens, are computed from them when they are looked at (`output_head`). Else graphs copy
their logits to one place that all of them share.

Capture and replay (`_capture`, `_replay`) have not been run on a GPU yet. What goes wrong there must not stop a night:
the kernel is compared with torch's attention once for each kind of layer, and a capture that fails leaves the eager
steps.
"""

import importlib.util
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.interface import step_plan
from laserbatch.pipeline.decoding.attention.metadata import PART_KEYS, AttentionMetadata, LaunchShape
from laserbatch.pipeline.decoding.attention.plan import CheckedKernel, StepPlan
from laserbatch.pipeline.decoding.batch import Batch
from laserbatch.pipeline.decoding.memory.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.output_head import HeldLogits, HiddenRows, OutputHead, StepLogits
from laserbatch.pipeline.decoding.model.step_buffers import StepBuffers
from laserbatch.pipeline.errors import ModelError

logger = logging.getLogger(__name__)

TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LEAST_WANTED = 0.5  # share of a step's tokens whose logits are wanted, below which computing all of them is a waste


@dataclass
class Bucket:
    """Buffers of steps of one size, and on CUDA their captured graph and what it leaves: hidden states, or logits."""

    buffers: StepBuffers
    has_run: bool = False
    graph: "torch.cuda.CUDAGraph | None" = None
    result: torch.Tensor | None = None


class BufferedForward:
    """Runs batches through one model over one cache.

    Parameters
    ----------
    model : of transformers, switched to our attention.
    kernel : attention as `attention.metadata` has it, with a further argument `shape`.
    selects_logits : whether the model's forward takes `logits_to_keep`.
    pads : whether steps are padded to buckets.
    captures : whether buckets are captured in CUDA graphs; needs CUDA.
    head : the model in two parts, where it can be had.
    """

    def __init__(
        self,
        model,
        cache: KVCache,
        device: torch.device,
        kernel: Callable[..., torch.Tensor],
        selects_logits: bool,
        pads: bool,
        captures: bool,
        head: OutputHead | None = None,
    ) -> None:
        self.buckets: dict[tuple[int, LaunchShape], Bucket] = {}
        self._model = model
        self._cache = cache
        self._device = device
        self._kernel = kernel
        self._selects_logits = selects_logits
        self._head = head
        self._shared: torch.Tensor | None = None  # (most tokens of a bucket, vocab_size), which graphs copy logits to
        self._pads = pads
        self._captures = captures
        self._checked: set[tuple] = set()  # kinds of layers of which the kernel was compared with torch's attention
        self._memory: list[int] = []  # where the cache's layers lay when graphs were captured

    @torch.inference_mode()
    def run(self, batch: Batch, metadata: AttentionMetadata) -> StepLogits:
        """Logits of the batch's wanted tokens, in their order. Valid until the next step."""
        with self._current_device():
            result = self._run(batch, metadata)
        if self._head is None:
            return HeldLogits(result[: len(batch.wanted)])
        return HiddenRows(self._head, result, batch.wanted)

    def _current_device(self) -> AbstractContextManager:
        """Triton launches on the current device, and streams and events are made there: let it be the model's."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _run(self, batch: Batch, metadata: AttentionMetadata) -> torch.Tensor:
        """What `_forward` gives, maybe with padding behind it."""
        num_tokens, num_sequences = len(batch), len(batch.feeds)
        shape = LaunchShape.of(int(np.diff(metadata.cu_seqlens_k).max()), num_tokens, num_sequences)
        num_padded = self._padded_tokens(num_tokens, len(batch.wanted))
        if num_padded is None:
            buffers = StepBuffers(num_tokens, num_sequences, len(metadata.slots), len(batch.wanted), self._device)
            buffers.fill(batch, metadata, self._cache.scratch_slot)
            return self._forward(buffers, shape)
        bucket = self.buckets.get((num_padded, shape))
        if bucket is None:
            # A sequence has a token at least, so there are never more sequences than tokens.
            most_sequences = min(num_padded, self._cache.max_rows)
            num_slots = most_sequences * shape.num_parts * PART_KEYS
            bucket = Bucket(StepBuffers(num_padded, most_sequences, num_slots, num_padded, self._device))
            self.buckets[num_padded, shape] = bucket
        bucket.buffers.fill(batch, metadata, self._cache.scratch_slot)
        return self._run_bucket(bucket, shape)

    def _padded_tokens(self, num_tokens: int, num_wanted: int) -> int | None:
        """The bucket's number of tokens, None where a step is better run as it is."""
        if not self._pads or num_wanted < LEAST_WANTED * num_tokens:
            return None
        return next((size for size in TOKEN_BUCKETS if size >= num_tokens), None)

    def _run_bucket(self, bucket: Bucket, shape: LaunchShape) -> torch.Tensor:
        """What `_forward` gives for a filled bucket."""
        if not self._captures or not bucket.has_run:  # the first run compiles kernels, which a capture must not
            bucket.has_run = True
            result = self._forward(bucket.buffers, shape)
            if self._captures and self._head is None and self._shared is None:
                self._shared = result.new_empty(TOKEN_BUCKETS[-1], result.shape[1])
            return result
        memory = [t.data_ptr() for layer in self._cache.layers.values() for t in (layer.keys, layer.values)]
        if not memory:  # it was given back: a capture would make the cache anew, and empty it at each replay
            return self._forward(bucket.buffers, shape)
        if memory != self._memory:  # the cache has grown: what was captured reads freed memory
            self._memory = memory
            for other in self.buckets.values():
                other.graph = other.result = None
        if bucket.graph is None:
            try:
                self._capture(bucket, shape)
            except Exception as error:
                self._captures = False
                logger.warning("CUDA graphs cannot be captured (%s); steps run without them", error)
                return self._forward(bucket.buffers, shape)
        return self._replay(bucket)

    def _capture(self, bucket: Bucket, shape: LaunchShape) -> None:
        """Record the step's launches; nothing is computed yet.

        Only calls of this thread are refused meanwhile: others have nothing to do with the graph. Where the capture
        fails torch leaves its stream the current one, so that the stream before it is put back here.
        """
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self.buckets.values() if other.graph is not None), None)
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):  # one pool: only one bucket's intermediate results live at a time
            result = self._forward(bucket.buffers, shape)
            if self._head is None:
                result = self._shared[: len(result)].copy_(result)  # its own memory is free for other graphs again
        bucket.graph, bucket.result = graph, result

    def _replay(self, bucket: Bucket) -> torch.Tensor:
        bucket.graph.replay()
        return bucket.result

    def _forward(self, buffers: StepBuffers, shape: LaunchShape) -> torch.Tensor:
        """The model over filled buffers: hidden states of all tokens, or logits of the tokens `buffers.wanted`."""
        attention = CheckedKernel(self._kernel, buffers.metadata, shape, buffers.eager, self._checked)
        plan = StepPlan(self._cache, buffers.slot_mapping, attention)
        input_ids, position_ids = buffers.token_ids[None], buffers.positions[None]
        token = step_plan.set(plan)
        try:
            if self._head is not None:
                return self._head.hidden_of(input_ids, position_ids)
            arguments = {"logits_to_keep": buffers.wanted} if self._selects_logits else {}
            logits = self._model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **arguments).logits[0]
        finally:
            step_plan.reset(token)
        return logits if self._selects_logits else logits.index_select(0, buffers.wanted)


def kernel_for(choice: str, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """The attention kernel that the setting `decoding.attention` asks for; None is torch's padded attention.

    Raises
    ------
    ModelError : "triton" was asked for, and there is no CUDA device or no triton.
    """
    if choice == "torch" or (choice == "auto" and device.type != "cuda"):
        return None
    if importlib.util.find_spec("triton") is None:
        if choice == "auto":
            logger.warning("triton is not installed: attention is torch's, over padded masks; pip install triton")
            return None
        raise ModelError("decoding.attention is triton, which is not installed; install triton or use auto or torch")
    from laserbatch.pipeline.decoding.attention.triton_attention import INTERPRETED, triton_attention

    if device.type != "cuda" and not INTERPRETED:
        raise ModelError("decoding.attention is triton, which needs CUDA; use auto or torch, or set TRITON_INTERPRET=1")
    return triton_attention
