"""Our attention as a function of transformers' attention interface, so that its models run unmodified.

A forward's plan is passed in a context variable, because some models drop keyword arguments. No mask function is
registered under our name, so transformers builds no mask. The implementation is chosen here: a kernel, which is
compared with torch's attention before it is trusted, compiled loops, or torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from transformers import AttentionInterface

from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata, LaunchShape
from laserbatch.pipeline.decoding.attention.torch_attention import CALL_COST, Group, cut_groups, torch_attention
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.errors import ModelError
from laserbatch.pipeline.processor import multiplies_bfloat16

ATTENTION_NAME = "laserbatch_slots"
# A result with a larger error relative to another implementation is wrong. Broken masks or positions give 0.1 to 1.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
_ABSENT = object()


@dataclass
class StepPlan:
    """One forward over a cache: the slots to which its N tokens are written, int64[N], and its attention.

    `attention(query, keys, values, scale, window, softcap, sinks)` keeps the contract of `metadata` for this step.
    """

    cache: KVCache
    slot_mapping: torch.Tensor
    attention: Callable[..., torch.Tensor]
    layers_seen: list[int] = field(default_factory=list)


_step_plan: ContextVar[StepPlan] = ContextVar("laserbatch_step_plan")


@contextmanager
def planned(plan: StepPlan) -> Iterator[None]:
    """Make a model's forward within the block follow this plan."""
    token = _step_plan.set(plan)
    try:
        yield
    finally:
        _step_plan.reset(token)


def slot_attention(
    module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | object | None = _ABSENT, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, **kwargs,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of one layer in a batch of packed sequences: (1, num_tokens, num_heads, value_dim) and None.

    The layer's new keys and values are written to the cache, and its tokens read them by slot.

    `query` : (1, num_heads, num_tokens, head_dim), after rotary embedding; key and value with their own head counts.
    `scaling` : None is 1 / sqrt(head_dim).
    `sliding_window` : if the model does not pass it, the layer's attribute is used.
    `softcap`, `s_aux` : Gemma's bounded scores and GPT-OSS's attention sinks.

    Raises ModelError: the model passes its own mask or bias of scores.
    """
    plan = _step_plan.get()
    window = getattr(module, "sliding_window", None) if sliding_window is _ABSENT else sliding_window
    unknown = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name != "position_ids"]
    if unknown or attention_mask is not None:
        raise ModelError(f"its attention takes {', '.join(unknown) or 'its own mask'}, which packing does not support")
    assert query.shape[0] == 1, "not a packed batch"
    plan.layers_seen.append(module.layer_idx)
    memory = plan.cache.write(module.layer_idx, plan.slot_mapping, key[0], value[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = plan.attention(query[0].transpose(0, 1), memory.keys, memory.values, scale, window, softcap, s_aux)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, slot_attention)


@dataclass
class EagerAttention:
    """A step's attention without a kernel: compiled loops on a CPU where they apply, otherwise torch."""

    metadata: AttentionMetadata[np.ndarray]
    device: torch.device
    _tasks: dict = field(default_factory=dict)

    def __call__(self, query, keys, values, scale, window, softcap, sinks) -> torch.Tensor:
        if not _has_loops(query) or softcap is not None or sinks is not None:
            return torch_attention(query, keys, values, self.groups, scale, window, softcap, sinks)
        from laserbatch.pipeline.decoding.attention.numba_attention import Tasks, numba_attention

        num_folded = query.shape[1] // keys.shape[0]
        if num_folded not in self._tasks:
            self._tasks[num_folded] = Tasks.of(self.metadata, num_folded)
        return numba_attention(query, keys, values, self.metadata, self._tasks[num_folded], scale, window)

    @cached_property
    def groups(self) -> list[Group]:
        return cut_groups(self.metadata, CALL_COST["cpu" if self.device.type == "cpu" else "cuda"])


def _has_loops(query: torch.Tensor) -> bool:
    """Whether compiled loops can take queries; in bfloat16 they need the processor's instructions on pairs."""
    if query.device.type != "cpu":
        return False
    is_paired = query.dtype == torch.bfloat16 and query.shape[2] % 2 == 0
    return query.dtype == torch.float32 or (is_paired and multiplies_bfloat16())


class KernelError(RuntimeError):
    """A kernel does not compute what it should."""


@dataclass(frozen=True)
class CheckedKernel:
    """A step's attention by a kernel, which is compared with torch's once for each kind of layer (`checked`).

    `metadata` is on the kernel's device and may be padded; `eager` is the attention of the same step without padding.
    """

    kernel: Callable[..., torch.Tensor]
    metadata: AttentionMetadata[torch.Tensor]
    shape: LaunchShape
    eager: EagerAttention
    checked: set[tuple]

    def __call__(self, query, keys, values, scale, window, softcap, sinks) -> torch.Tensor:
        result = self.kernel(query, keys, values, self.metadata, scale, window, softcap, sinks, shape=self.shape)
        kind = (*query.shape[1:], len(values), values.shape[2], window, softcap, sinks is None, query.dtype)
        is_capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()  # nothing can be read from the device
        if kind in self.checked or is_capturing:
            return result
        num_tokens = len(self.eager.metadata.positions)
        expected = torch_attention(query, keys, values, self.eager.groups, scale, window, softcap, sinks)[:num_tokens]
        if not expected.isfinite().all():  # the model's own fault, which verification reports
            return result
        error = relative_error(result[:num_tokens], expected)
        if not error <= TOLERANCE[query.dtype]:
            raise KernelError(f"relative error {error:.1e} in a layer of {query.shape[1]} heads")
        self.checked.add(kind)
        return result


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square error relative to that of `expected`; NaN if a tensor holds NaN."""
    actual, expected = actual.float(), expected.float()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))
