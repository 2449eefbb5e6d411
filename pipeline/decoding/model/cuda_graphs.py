"""A model's forward through static buffers, with a kernel's attention; on CUDA small steps are replayed as CUDA graphs.

A step of up to 2,048 tokens is padded to the size of a bucket, whose buffers keep their addresses. On CUDA a bucket's
first step runs eagerly, its second is captured, and later ones are replayed, up to hidden states. Larger steps, and
large ones that are mostly prompts, run eagerly in their own buffers. The path is the same without capture.

Capture and replay (`_capture`, `_replay`) have run on an NVIDIA H200 (`docs/gpu.md`). An error there must not stop a
night: the kernel is compared with torch's attention once for each kind of layer, and after a failed capture steps run
eagerly, for a while if memory ran out, otherwise for good.
"""

import gc
import importlib.util
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.interface import CheckedKernel, EagerAttention, StepPlan, planned
from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata, LaunchShape
from laserbatch.pipeline.decoding.batch import Batch
from laserbatch.pipeline.decoding.device_memory import is_out_of_memory
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.output_head import HiddenRows, OutputHead
from laserbatch.pipeline.errors import ModelError

if TYPE_CHECKING:  # Triton may not be installed
    from laserbatch.pipeline.decoding.model.cuda_layers import CudaLayers

logger = logging.getLogger(__name__)

# Padding is at most 64 tokens up to 1,024 and 128 above: 4 to 8 % of the tokens of a batch of 64 that drafts 8 each.
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, 1024, 64), *range(1024, 2049, 128))
MAX_PROMPT_BUCKET = 1024  # a larger step that is mostly prompts hides its launches behind its computation
MIN_LOGIT_SHARE = 0.5  # a step is mostly prompts if logits are needed for a smaller share of its tokens
MAX_BUCKETS = 96  # the last used buckets are kept, with their graphs and buffers
MAX_BUFFER_BYTES = 512 << 20  # of all buckets' buffers together, on the host and likewise on the device
MAX_OUT_OF_MEMORY = 3  # after this many captures that ran out of memory, none is tried
RETRY_STEPS = 500  # eager steps after a capture that ran out of memory
ALIGNMENT = 16  # bytes; Triton compiles a kernel again for pointers that are less aligned


class StepBuffers:
    """The inputs of a step of at most `num_tokens`, `num_sequences` and `num_slots`, in one buffer for a single copy.

    The rest of each array is padding, which reads token 0, attends to nothing and stores its keys in the scratch slot.
    `token_ids`, `positions`, `slot_mapping` int64[num_tokens] and `metadata` view one tensor; `eager` is the batch's
    attention without a kernel. On CUDA the copy is asynchronous, from pinned memory; an event keeps the next step from
    overwriting numbers that are still being copied.
    """

    eager: EagerAttention

    def __init__(self, num_tokens: int, num_sequences: int, num_slots: int, device: torch.device) -> None:
        # Slots last, so that only those in use are copied.
        sizes = dict.fromkeys(("token_ids", "positions", "slot_mapping", "ancestors"), (np.int64, num_tokens))
        sizes |= {"metadata_positions": (np.int32, num_tokens)}
        sizes |= dict.fromkeys(("cu_seqlens_k", "cu_seqlens_q"), (np.int32, num_sequences + 1))
        sizes |= dict.fromkeys(("num_committed", "num_chain"), (np.int32, num_sequences))
        sizes |= {"slots": (np.int32, num_slots)}
        places, end = {}, 0
        for name, (dtype, count) in sizes.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + np.dtype(dtype).itemsize * count
            places[name] = slice(start, end)
        self.num_bytes = end
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

    def fill(self, batch: Batch, metadata: AttentionMetadata[np.ndarray], scratch_slot: int) -> None:
        """Write a batch's numbers and padding, and send them to the device; no sequence reads `scratch_slot`."""
        if self._copied is not None:
            self._copied.synchronize()  # until the earlier numbers are on the device
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
    """Buffers of steps of one size, and on CUDA their captured graph and the hidden states that it leaves.

    `signature` : identifies the memory that the newest eager step used; None before the first.
    """

    buffers: StepBuffers
    signature: tuple | None = None
    graph: "torch.cuda.CUDAGraph | None" = None
    hidden: torch.Tensor | None = None


class BufferedForward:
    """Runs batches through one model, whose layers call our attention, over one cache.

    `make_kernel` returns a step's attention, by the contract of `attention.metadata` with one more argument `shape`.
    `layers` compute hidden states instead of the model's own layers; None: the model's own do.

    `num_captures`, `num_failed_captures`, `num_replays`, `num_eager_steps` : a captured step is replayed at once.
    """

    def __init__(
        self, head: OutputHead, cache: KVCache, device: torch.device,
        make_kernel: Callable[[], Callable[..., torch.Tensor]], layers: "CudaLayers | None" = None,
    ) -> None:  # fmt: skip
        self.buckets: dict[tuple[int, LaunchShape], Bucket] = {}  # in order of use, the last used one last
        self.num_captures = self.num_failed_captures = self.num_replays = self.num_eager_steps = 0
        self._head = head
        self._cache = cache
        self._device = device
        self._make_kernel = make_kernel
        self._layers = layers
        self.last_plan: StepPlan | None = None  # plan of the newest forward that was not a replay, for checks
        self._captures = device.type == "cuda"
        self._num_out_of_memory = 0  # captures that ran out of memory
        self._num_pausing = 0  # eager steps before the next capture
        self._checked: set[tuple] = set()  # kinds of layers for which the kernel was compared with torch's attention

    @torch.inference_mode()
    def run(self, batch: Batch, metadata: AttentionMetadata[np.ndarray]) -> HiddenRows:
        """Run a batch; return the rows of its `logit_indices`, which are valid until the next step."""
        with self._on_device():
            return HiddenRows(self._head, self._run(batch, metadata), batch.logit_indices)

    def drop_graphs(self) -> None:
        """Free the memory of all graphs; they are captured again when they are needed."""
        for bucket in self.buckets.values():
            bucket.graph = bucket.hidden = None

    @property
    def _num_kv_heads(self) -> int:
        """The number of key-value heads of the cache's first layer; 8 before there is one."""
        return next((len(layer.keys) for layer in self._cache.layers.values()), 8)

    def _on_device(self) -> AbstractContextManager:
        """Make the model's device current, because Triton launches and torch makes streams and events there."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _run(self, batch: Batch, metadata: AttentionMetadata[np.ndarray]) -> torch.Tensor:
        """Run a step by a graph or eagerly; return its hidden states, perhaps with padding rows at the end."""
        num_tokens, num_sequences = len(batch), len(batch.feeds)
        if self._layers is not None:
            self._layers.cover(int(batch.positions.max()))
        shape = LaunchShape.of(int(np.diff(metadata.cu_seqlens_k).max()), num_tokens, num_sequences, self._num_kv_heads)
        num_padded = self._padded_tokens(num_tokens, len(batch.logit_indices))
        if num_padded is None:
            buffers = StepBuffers(num_tokens, num_sequences, len(metadata.slots), self._device)
            buffers.fill(batch, metadata, self._cache.scratch_slot)
            self.num_eager_steps += 1
            return self._forward(buffers, shape)
        bucket = self._bucket(num_padded, shape)
        bucket.buffers.fill(batch, metadata, self._cache.scratch_slot)
        return self._run_bucket(bucket, shape)

    def _padded_tokens(self, num_tokens: int, num_logit_rows: int) -> int | None:
        """The number of tokens of a step's bucket; None if the step should run eagerly."""
        if num_tokens > MAX_PROMPT_BUCKET and num_logit_rows < MIN_LOGIT_SHARE * num_tokens:
            return None
        place = bisect_left(TOKEN_BUCKETS, num_tokens)
        return TOKEN_BUCKETS[place] if place < len(TOKEN_BUCKETS) else None

    def _bucket(self, num_padded: int, shape: LaunchShape) -> Bucket:
        """Return the bucket of a size and shape, now the most recently used."""
        bucket = self.buckets.pop((num_padded, shape), None)
        if bucket is None:
            # A sequence has a token at least, so there are never more sequences than tokens.
            max_sequences = min(num_padded, self._cache.max_rows)
            num_slots = max_sequences * shape.max_keys
            bucket = Bucket(StepBuffers(num_padded, max_sequences, num_slots, self._device))
            num_bytes = sum((other.buffers.num_bytes for other in self.buckets.values()), bucket.buffers.num_bytes)
            while self.buckets and (len(self.buckets) >= MAX_BUCKETS or num_bytes > MAX_BUFFER_BYTES):
                num_bytes -= self.buckets.pop(next(iter(self.buckets))).buffers.num_bytes
        self.buckets[num_padded, shape] = bucket
        return bucket

    def _signature(self) -> tuple:
        """Identifies the memory outside its bucket that a captured graph reads: if it differs, the graph is void."""
        cached = [t for layer in self._cache.layers.values() for t in (layer.keys, layer.values)]
        tensors = cached if self._layers is None else [*cached, *self._layers.static_tensors]
        # New memory may lie at the old addresses, and then the capacity, the stride between heads, tells them apart.
        return (self._cache.capacity, *(tensor.data_ptr() for tensor in tensors))

    def _run_bucket(self, bucket: Bucket, shape: LaunchShape) -> torch.Tensor:
        # An eager step compiles kernels, also for memory of other strides; a capture must not. If the cache's memory
        # was given back, a capture would allocate the cache, and each replay would clear it.
        if bucket.signature != self._signature():
            bucket.graph = bucket.hidden = None
            return self._run_eagerly(bucket, shape)
        if bucket.graph is None:
            self._num_pausing = max(0, self._num_pausing - 1)
            if not self._captures or self._num_pausing or not self._try_capture(bucket, shape):
                return self._run_eagerly(bucket, shape)
        self.num_replays += 1
        return self._replay(bucket)

    def _run_eagerly(self, bucket: Bucket, shape: LaunchShape) -> torch.Tensor:
        self.num_eager_steps += 1
        hidden = self._forward(bucket.buffers, shape)
        bucket.signature = self._signature()  # after the step, as the first one allocates the cache
        return hidden

    def _try_capture(self, bucket: Bucket, shape: LaunchShape) -> bool:
        try:
            with _no_garbage_collection():
                self._capture(bucket, shape)
            self.num_captures += 1
            return True
        except Exception as error:  # a model's code may raise anything in a capture; its steps run without graphs
            self.num_failed_captures += 1
            # Where torch cannot end the capture, its error hides the one that was the reason.
            is_memory = any(cause is not None and is_out_of_memory(cause) for cause in (error, error.__context__))
            self._num_out_of_memory += is_memory
            self._captures = is_memory and self._num_out_of_memory < MAX_OUT_OF_MEMORY
            plan = f"it is tried again after {RETRY_STEPS} steps" if self._captures else "steps run without graphs"
            logger.warning("a CUDA graph cannot be captured (%s); %s", error, plan)
        if is_memory:
            self._num_pausing = RETRY_STEPS
            self.drop_graphs()
            torch.cuda.empty_cache()
        return False

    def _capture(self, bucket: Bucket, shape: LaunchShape) -> None:
        """Record the step's launches; nothing is computed yet, and only calls of this thread are refused meanwhile.

        After a failed capture torch leaves the capture's stream current, so the stream before is restored here.
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
        assert bucket.graph is not None and bucket.hidden is not None
        bucket.graph.replay()
        return bucket.hidden

    def _forward(self, buffers: StepBuffers, shape: LaunchShape) -> torch.Tensor:
        attention = CheckedKernel(self._make_kernel(), buffers.metadata, shape, buffers.eager, self._checked)
        plan = self.last_plan = StepPlan(self._cache, buffers.slot_mapping, attention)
        if self._layers is not None:
            return self._layers.hidden_of(buffers.token_ids, buffers.positions, plan)
        with planned(plan):
            return self._head.hidden_of(buffers.token_ids[None], buffers.positions[None])


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause Python's collector: it could destroy a dropped graph or event, which CUDA refuses in a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def kernel_for(choice: str, device: torch.device) -> Callable[[], Callable[..., torch.Tensor]] | None:
    """A function that makes a step's attention kernel, by the setting `decoding.attention`; None: there is no kernel.

    Raises ModelError: "triton" was requested, and there is no CUDA device or no triton.
    """
    if choice == "torch" or (choice == "auto" and device.type != "cuda"):
        return None
    if importlib.util.find_spec("triton") is None:
        if choice == "auto":
            logger.warning("triton is not installed, so attention runs in torch, with padding; `pip install triton`")
            return None
        raise ModelError("decoding.attention is triton, which is not installed; install it, or set auto or torch")
    from laserbatch.pipeline.decoding.attention.triton_attention import INTERPRETED, Scratch, triton_attention

    if device.type != "cuda" and not INTERPRETED:
        raise ModelError("decoding.attention is triton, which needs CUDA; set auto or torch (or TRITON_INTERPRET=1)")
    return lambda: partial(triton_attention, scratch=Scratch())  # shared by the layers of a step
