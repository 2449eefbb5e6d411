"""The attention of one forward: a layer's new keys go into the cache, and its tokens read them by slot."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata, LaunchShape
from laserbatch.pipeline.decoding.attention.torch_attention import CALL_COST, Group, cut_groups, torch_attention
from laserbatch.pipeline.decoding.memory.kv_cache import KVCache

# Relative error of a kernel against torch's attention above which it is not used. Broken masks give 0.1 to 1.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
MOST_LOOP_TOKENS = 65  # new tokens of a sequence, its last token and the largest tree; torch is faster at longer chains


class KernelError(RuntimeError):
    """A kernel does not compute what it should."""


@dataclass
class StepPlan:
    """One forward over a cache: where its N tokens are written, int64[N], and what attends.

    `attention(query, keys, values, scale, window, softcap, sinks)` is the contract of `metadata`, of this step.
    """

    cache: KVCache
    slot_mapping: torch.Tensor
    attention: Callable[..., torch.Tensor]
    layers_seen: list[int] = field(default_factory=list)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one layer: (num_tokens, num_heads, value_dim).

        Parameters
        ----------
        query, key, value : (their heads, num_tokens, their dimension), after rotary embedding.
        scale : None is 1 / sqrt(head_dim).

        Raises
        ------
        KernelError : the attention gives other results than torch's.
        """
        self.layers_seen.append(layer)
        memory = self.cache.write(layer, self.slot_mapping, key, value)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return self.attention(query.transpose(0, 1), memory.keys, memory.values, scale, window, softcap, sinks)


@dataclass
class EagerAttention:
    """A step's attention without a kernel: compiled loops on a CPU where they serve, else torch's."""

    metadata: AttentionMetadata
    call_cost: int
    _tasks: dict = field(default_factory=dict)

    @classmethod
    def on(cls, metadata: AttentionMetadata, device: torch.device) -> "EagerAttention":
        return cls(metadata, CALL_COST["cpu" if device.type == "cpu" else "cuda"])

    def __call__(self, query, keys, values, scale, window, softcap, sinks) -> torch.Tensor:
        on_loops = query.device.type == "cpu" and query.dtype == torch.float32 and softcap is None and sinks is None
        if not on_loops or not len(self._short):
            return torch_attention(query, keys, values, self.groups, scale, window, softcap, sinks)
        from laserbatch.pipeline.decoding.attention.numba_attention import Tasks, numba_attention

        num_folded = query.shape[1] // keys.shape[0]
        if num_folded not in self._tasks:
            self._tasks[num_folded] = Tasks.of(self.metadata, self._short, num_folded)
        result = numba_attention(query, keys, values, self.metadata, self._tasks[num_folded], scale, window)
        if self._long_groups:
            torch_attention(query, keys, values, self._long_groups, scale, window, None, None, result)
        return result

    @cached_property
    def groups(self) -> list[Group]:
        """All sequences."""
        return cut_groups(self.metadata, np.arange(len(self.metadata.num_chain)), self.call_cost)

    @cached_property
    def _short(self) -> np.ndarray:
        """int64[n]: the sequences that the loops serve."""
        return np.flatnonzero(np.diff(self.metadata.cu_seqlens_q) <= MOST_LOOP_TOKENS)

    @cached_property
    def _long_groups(self) -> list[Group]:
        others = np.flatnonzero(np.diff(self.metadata.cu_seqlens_q) > MOST_LOOP_TOKENS)
        return cut_groups(self.metadata, others, self.call_cost) if len(others) else []


@dataclass(frozen=True)
class CheckedKernel:
    """A step's attention by a kernel, which is compared with torch's once for each kind of layer not yet in `checked`.

    `metadata` is on the kernel's device, `eager` of the same step; the kernel pads, torch does not.
    """

    kernel: Callable[..., torch.Tensor]
    metadata: AttentionMetadata
    shape: LaunchShape
    eager: EagerAttention
    checked: set[tuple]

    def __call__(self, query, keys, values, scale, window, softcap, sinks) -> torch.Tensor:
        result = self.kernel(query, keys, values, self.metadata, scale, window, softcap, sinks, shape=self.shape)
        kind = (*query.shape[1:], len(values), values.shape[2], window, softcap, sinks is None, query.dtype)
        if kind in self.checked or is_capturing(query):
            return result
        num_tokens = len(self.eager.metadata.positions)
        expected = torch_attention(query, keys, values, self.eager.groups, scale, window, softcap, sinks)[:num_tokens]
        if not expected.isfinite().all():  # the model's own fault, which verification reports
            return result
        error = float(
            (result[:num_tokens].float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-12)
        )
        if not error <= TOLERANCE[query.dtype]:
            raise KernelError(f"relative error {error:.1e} in a layer of {query.shape[1]} heads")
        self.checked.add(kind)
        return result


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether launches are being recorded into a CUDA graph; then nothing can be read from the device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
