"""The numbers of a packed step in one buffer of fixed places, so that one copy brings them over.

Buffers may be larger than a step: what is over is padding, written so that it reads token 0, attends to nothing and
stores its keys in the scratch slot. A captured CUDA graph reads the same buffers at each replay.

On CUDA the copy is made from pinned memory and not waited for; an event keeps the next step from overwriting numbers
that are still being copied. That branch has not been run on a GPU yet.

Knows no model and no store.
"""

from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.packed_attention import PackedIndex
from laserbatch.pipeline.decoding.attention.token_plan import RaggedStep

ALIGNMENT = 16  # bytes; Triton compiles a kernel anew for pointers that are less aligned


@dataclass(frozen=True)
class PackedStep:
    """One forward of N tokens.

    `token_ids` int32[N]; `write_slots` int64[N], where their keys go; `keep` int64[K], the tokens whose logits are
    wanted, K <= N; `ragged`, what they see; `scratch_slot`, whose content is never read.
    """

    token_ids: np.ndarray
    write_slots: np.ndarray
    keep: np.ndarray
    ragged: RaggedStep
    scratch_slot: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.ragged.num_committed)

    @property
    def max_keys(self) -> int:
        """Keys of the longest sequence, new tokens included."""
        return int(np.diff(self.ragged.slot_starts).max())


class StepBuffers:
    """Places for a step of at most so many tokens, sequences, slots and wanted logits, on a device.

    `token_ids`, `positions`, `write_slots` int64[num_tokens], `keep` int64[num_kept] and `index` view one tensor.
    """

    def __init__(
        self, num_tokens: int, num_sequences: int, num_slots: int, num_kept: int, device: torch.device
    ) -> None:
        # Slots last, so that only those in use are copied.
        sizes = {
            "token_ids": (np.int64, num_tokens),
            "positions": (np.int64, num_tokens),
            "write_slots": (np.int64, num_tokens),
            "ancestors": (np.int64, num_tokens),
            "keep": (np.int64, num_kept),
            "node_positions": (np.int32, num_tokens),
            "slot_starts": (np.int32, num_sequences + 1),
            "query_starts": (np.int32, num_sequences + 1),
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
        self.write_slots, self.keep = views.pop("write_slots"), views.pop("keep")
        self.index = PackedIndex(**views)

    def fill(self, step: PackedStep) -> None:
        """Write a step's numbers and padding, and send them to the device."""
        if self._copied is not None:
            self._copied.synchronize()
        ragged = step.ragged
        self._put("token_ids", step.token_ids, 0)
        self._put("positions", ragged.node_positions, 0)
        self._put("write_slots", step.write_slots, step.scratch_slot)
        self._put("ancestors", ragged.ancestors, 0)
        self._put("keep", step.keep, 0)
        self._put("node_positions", ragged.node_positions, 0)
        self._put("slot_starts", ragged.slot_starts, ragged.slot_starts[-1])
        self._put("query_starts", ragged.query_starts, ragged.query_starts[-1])
        self._put("num_committed", ragged.num_committed, 0)
        self._put("num_chain", ragged.num_chain, 0)
        self._arrays["slots"][: len(ragged.slots)] = ragged.slots
        used = slice(0, self._slots_start + ragged.slots.itemsize * len(ragged.slots))
        self._device[used].copy_(self._host[used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _put(self, name: str, values: np.ndarray, padding: int) -> None:
        array = self._arrays[name]
        array[: len(values)] = values
        array[len(values) :] = padding
