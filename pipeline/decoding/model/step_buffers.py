"""The numbers of a batch in one buffer of fixed places, so that one copy brings them over.

Buffers may be larger than a step: what is over is padding, written so that it reads token 0, attends to nothing and
stores its keys in the scratch slot. A captured CUDA graph reads the same buffers at each replay.

On CUDA the copy is made from pinned memory and not waited for; an event keeps the next step from overwriting numbers
that are still being copied. That branch has not been run on a GPU yet.
"""

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata
from laserbatch.pipeline.decoding.attention.plan import EagerAttention
from laserbatch.pipeline.decoding.batch import Batch

ALIGNMENT = 16  # bytes; Triton compiles a kernel anew for pointers that are less aligned


class StepBuffers:
    """Places for a step of at most so many tokens, sequences, slots and wanted logits, on a device.

    `token_ids`, `positions`, `slot_mapping` int64[num_tokens], `wanted` int64[num_wanted] and `metadata` view one
    tensor.
    `eager` is the attention without a kernel of the batch that they hold.
    """

    eager: EagerAttention

    def __init__(
        self, num_tokens: int, num_sequences: int, num_slots: int, num_wanted: int, device: torch.device
    ) -> None:
        # Slots last, so that only those in use are copied.
        sizes = {
            "token_ids": (np.int64, num_tokens),
            "positions": (np.int64, num_tokens),
            "slot_mapping": (np.int64, num_tokens),
            "ancestors": (np.int64, num_tokens),
            "wanted": (np.int64, num_wanted),
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
        self.token_ids, self.positions = views.pop("token_ids"), views.pop("positions")
        self.slot_mapping, self.wanted = views.pop("slot_mapping"), views.pop("wanted")
        self.metadata = AttentionMetadata(positions=views.pop("metadata_positions"), **views)

    def fill(self, batch: Batch, metadata: AttentionMetadata, scratch_slot: int) -> None:
        """Write a batch's numbers and padding, and send them to the device; what `scratch_slot` holds is never read."""
        if self._copied is not None:
            self._copied.synchronize()
        self._put("token_ids", batch.token_ids, 0)
        self._put("positions", batch.positions, 0)
        self._put("slot_mapping", batch.slot_mapping, scratch_slot)
        self._put("ancestors", metadata.ancestors, 0)
        self._put("wanted", batch.wanted, 0)
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
        self.eager = EagerAttention.on(metadata, self._device.device)

    def _put(self, name: str, values: np.ndarray, padding: int) -> None:
        array = self._arrays[name]
        array[: len(values)] = values
        array[len(values) :] = padding
