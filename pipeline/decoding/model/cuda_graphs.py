"""A model's forward through static buffers, with a kernel's attention; on CUDA small steps are replayed as CUDA graphs.

A step of few tokens is padded to a bucket, whose buffers stay where they are. On CUDA a bucket's first step runs
eagerly, its second is captured, and later ones are replayed, up to hidden states. Large steps, and those that want few
of their logits (prompts), run eagerly in buffers of their own. The path is the same without capture.

Capture and replay (`_capture`, `_replay`) have not been run on a GPU yet. What goes wrong there must not stop a night:
the kernel is compared with torch's attention once for each kind of layer, and a capture that fails leaves eager steps.
"""

import importlib.util
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.interface import CheckedKernel, EagerAttention, StepPlan, planned
from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata, LaunchShape
from laserbatch.pipeline.decoding.batch import Batch
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.output_head import HiddenRows, OutputHead, StepLogits
from laserbatch.pipeline.errors import ModelError

if TYPE_CHECKING:  # Triton may not be installed
    from laserbatch.pipeline.decoding.model.cuda_layers import CudaLayers

logger = logging.getLogger(__name__)

TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LEAST_WANTED = 0.5  # share of a step's tokens whose logits are wanted, below which it is taken for prompts
ALIGNMENT = 16  # bytes; Triton compiles a kernel anew for pointers that are less aligned


class StepBuffers:
    """The numbers of a step of at most so many tokens, sequences and slots, in one buffer that one copy brings over.

    What is over is padding, written so that it reads token 0, attends to nothing and stores its keys in the scratch
    slot. `token_ids`, `positions`, `slot_mapping` int64[num_tokens] and `metadata` view one tensor; `eager` is the
    attention without a kernel of the batch that they hold. On CUDA the copy is made from pinned memory and not waited
    for; an event keeps the next step from overwriting numbers that are still being copied.
    """

    eager: EagerAttention

    def __init__(self, num_tokens: int, num_sequences: int, num_slots: int, device: torch.device) -> None:
        # Slots last, so that only those in use are copied.
        sizes = {
            "token_ids": (np.int64, num_tokens),
            "positions": (np.int64, num_tokens),
            "slot_mapping": (np.int64, num_tokens),
            "ancestors": (np.int64, num_tokens),
            "metadata_positions": (np.int32, num_tokens),
            "cu_seqlens_k": (np.int32, num_sequences + 1),
            "cu_seqlens_q": (np.int32, num_sequences + 1),
            "num_committed": (np.int32, num_sequences),
            "num_chain": (np.int32, num_sequences),
            "slots": (np.int32, num_slots),
        }
        places, end = {}, 0
        for name, (dtype, count) in sizes.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + np.dtype(dtype).itemsize * count
            places[name] = slice(start, end)
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=on_cuda)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if on_cuda else None
        self._slots_start = places["slots"].start
        self._arrays = {name: self._host.numpy()[place].view(sizes[name][0]) for name, place in places.items()}
        types = {np.int64: torch.int64, np.int32: torch.int32}
        views = {name: self._device[place].view(types[sizes[name][0]]) for name, place in places.items()}
        self.token_ids, self.positions, self.slot_mapping = map(views.pop, ("token_ids", "positions", "slot_mapping"))
        self.metadata = AttentionMetadata(positions=views.pop("metadata_positions"), **views)

    def fill(self, batch: Batch, metadata: AttentionMetadata, scratch_slot: int) -> None:
        """Write a batch's numbers and padding, and send them to the device; what `scratch_slot` holds is never read."""
        if self._copied is not None:
            self._copied.synchronize()
        self._put("token_ids", batch.token_ids, 0)
        self._put("positions", batch.positions, 0)
        self._put("slot_mapping", batch.slot_mapping, scratch_slot)
        self._put("ancestors", metadata.ancestors, 0)
        self._put("metadata_positions", metadata.positions, 0)
        self._put("cu_seqlens_k", metadata.cu_seqlens_k, metadata.cu_seqlens_k[-1])
        self._put("cu_seqlens_q", metadata.cu_seqlens_q, metadata.cu_seqlens_q[-1])
        self._put("num_committed", metadata.num_committed, 0)
        self._put("num_chain", metadata.num_chain, 0)
        self._arrays["slots"][: len(metadata.slots)] = metadata.slots
        used = slice(0, self._slots_start + metadata.slots.itemsize * len(metadata.slots))
        self._device[used].copy_(self._host[used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self.eager = EagerAttention(metadata, self._device.device)

    def _put(self, name: str, values: np.ndarray, padding: int) -> None:
        array = self._arrays[name]
        array[: len(values)] = values
        array[len(values) :] = padding


@dataclass
class Bucket:
    """Buffers of steps of one size, and on CUDA their captured graph and the hidden states that it leaves."""

    buffers: StepBuffers
    has_run: bool = False
    graph: "torch.cuda.CUDAGraph | None" = None
    hidden: torch.Tensor | None = None


class BufferedForward:
    """Runs batches through one model, whose layers call our attention, over one cache.

    `make_kernel` gives for each step the attention of its layers, as `attention.metadata` has it, with a further
    argument `shape`. `layers` : what computes hidden states in the place of the model's own layers; None: these.
    """

    def __init__(
        self,
        head: OutputHead,
        cache: KVCache,
        device: torch.device,
        make_kernel: Callable[[], Callable[..., torch.Tensor]],
        layers: "CudaLayers | None" = None,
    ) -> None:
        self.buckets: dict[tuple[int, LaunchShape], Bucket] = {}
        self._head = head
        self._cache = cache
        self._device = device
        self._make_kernel = make_kernel
        self._layers = layers
        self.last_plan: StepPlan | None = None  # of the newest forward that was not a replay, for checks
        self._captures = device.type == "cuda"
        self._checked: set[tuple] = set()  # kinds of layers of which the kernel was compared with torch's attention
        self._memory: list[int] = []  # where the cache's layers lay when graphs were captured

    @torch.inference_mode()
    def run(self, batch: Batch, metadata: AttentionMetadata) -> StepLogits:
        """Logits of the batch's wanted tokens, in their order. Valid until the next step."""
        # Triton launches on the current device, and streams and events are made there: let it be the model's.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return HiddenRows(self._head, self._run(batch, metadata), batch.wanted)

    def _run(self, batch: Batch, metadata: AttentionMetadata) -> torch.Tensor:
        """What `_forward` gives, maybe with padding behind it."""
        num_tokens, num_sequences = len(batch), len(batch.feeds)
        if self._layers is not None:
            self._layers.cover(int(batch.positions.max()))
        shape = LaunchShape.of(int(np.diff(metadata.cu_seqlens_k).max()), num_tokens, num_sequences)
        num_padded = self._padded_tokens(num_tokens, len(batch.wanted))
        if num_padded is None:
            buffers = StepBuffers(num_tokens, num_sequences, len(metadata.slots), self._device)
            buffers.fill(batch, metadata, self._cache.scratch_slot)
            return self._forward(buffers, shape)
        bucket = self.buckets.get((num_padded, shape))
        if bucket is None:
            # A sequence has a token at least, so there are never more sequences than tokens.
            most_sequences = min(num_padded, self._cache.max_rows)
            num_slots = most_sequences * shape.max_keys
            bucket = Bucket(StepBuffers(num_padded, most_sequences, num_slots, self._device))
            self.buckets[num_padded, shape] = bucket
        bucket.buffers.fill(batch, metadata, self._cache.scratch_slot)
        return self._run_bucket(bucket, shape)

    def _padded_tokens(self, num_tokens: int, num_wanted: int) -> int | None:
        """The bucket's number of tokens, None where a step is better run as it is."""
        if num_wanted < LEAST_WANTED * num_tokens:
            return None
        return next((size for size in TOKEN_BUCKETS if size >= num_tokens), None)

    def _run_bucket(self, bucket: Bucket, shape: LaunchShape) -> torch.Tensor:
        """What `_forward` gives for a filled bucket."""
        is_first, bucket.has_run = not bucket.has_run, True
        memory = [t.data_ptr() for layer in self._cache.layers.values() for t in (layer.keys, layer.values)]
        memory += [] if self._layers is None else [t.data_ptr() for t in self._layers.static_tensors]
        # The first run compiles kernels, which a capture must not. Without memory (it was given back) a capture would
        # make the cache anew, and empty it at each replay.
        if is_first or not memory or not self._captures:
            return self._forward(bucket.buffers, shape)
        if memory != self._memory:  # the cache has grown: what was captured reads freed memory
            self._memory = memory
            for other in self.buckets.values():
                other.graph = other.hidden = None
        if bucket.graph is None:
            try:
                self._capture(bucket, shape)
            except Exception as error:
                self._captures = False
                logger.warning("CUDA graphs cannot be captured (%s); steps run without them", error)
                return self._forward(bucket.buffers, shape)
        return self._replay(bucket)

    def _capture(self, bucket: Bucket, shape: LaunchShape) -> None:
        """Record the step's launches; nothing is computed yet, and only calls of this thread are refused meanwhile.

        Where the capture fails torch leaves its stream the current one, so that the stream before is put back here.
        """
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self.buckets.values() if other.graph is not None), None)
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):  # one pool: only one bucket's intermediate results live at a time
            hidden = self._forward(bucket.buffers, shape)
        bucket.graph, bucket.hidden = graph, hidden

    def _replay(self, bucket: Bucket) -> torch.Tensor:
        bucket.graph.replay()
        return bucket.hidden

    def _forward(self, buffers: StepBuffers, shape: LaunchShape) -> torch.Tensor:
        """Hidden states of the tokens in filled buffers."""
        attention = CheckedKernel(self._make_kernel(), buffers.metadata, shape, buffers.eager, self._checked)
        plan = self.last_plan = StepPlan(self._cache, buffers.slot_mapping, attention)
        if self._layers is not None:
            return self._layers.hidden_of(buffers.token_ids, buffers.positions, plan)
        with planned(plan):
            return self._head.hidden_of(buffers.token_ids[None], buffers.positions[None])


def kernel_for(choice: str, device: torch.device) -> Callable[[], Callable[..., torch.Tensor]] | None:
    """What makes the attention kernel of a step by the setting `decoding.attention`; None: attention is torch's.

    Raises ModelError: "triton" was asked for, and there is no CUDA device or no triton.
    """
    if choice == "torch" or (choice == "auto" and device.type != "cuda"):
        return None
    if importlib.util.find_spec("triton") is None:
        if choice == "auto":
            logger.warning("triton is not installed: attention is torch's, over padded masks; pip install triton")
            return None
        raise ModelError("decoding.attention is triton, which is not installed; install triton or use auto or torch")
    from laserbatch.pipeline.decoding.attention.triton_attention import INTERPRETED, attention_of_step

    if device.type != "cuda" and not INTERPRETED:
        raise ModelError("decoding.attention is triton, which needs CUDA; use auto or torch, or set TRITON_INTERPRET=1")
    return attention_of_step
