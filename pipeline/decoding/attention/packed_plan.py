"""The attention of one packed step whose index arrays lie in buffers: a layer writes its keys and reads by slot.

Knows the store and the buffers; no model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from laserbatch.pipeline.decoding.attention.packed_attention import LaunchShape, packed_attention
from laserbatch.pipeline.decoding.attention.step_buffers import StepBuffers
from laserbatch.pipeline.decoding.memory.token_store import TokenStore

# Relative error of a kernel against `packed_attention` above which it is not used. Broken masks give 0.1 to 1.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether launches are being recorded into a CUDA graph; then nothing can be read from the device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class KernelError(RuntimeError):
    """A kernel does not compute what it should."""


@dataclass(frozen=True)
class PackedPlan:
    """One forward over filled buffers.

    `attention` has the form of `packed_attention`; it is compared with that once for each kind of layer that is not yet
    in `checked`.
    """

    store: TokenStore
    buffers: StepBuffers
    shape: LaunchShape
    attention: Callable[..., torch.Tensor]
    checked: set[tuple]

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
        KernelError : the attention gives other results than the slow one.
        """
        cache = self.store.write(layer, self.buffers.write_slots, key, value)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        arguments = (query.transpose(0, 1), cache.keys, cache.values, self.buffers.index, scale, window, softcap, sinks)
        result = self.attention(*arguments, shape=self.shape)
        kind = (query.shape[0], *key.shape[::2], value.shape[-1], window, softcap, sinks is None, query.dtype)
        if self.attention is not packed_attention and kind not in self.checked and not is_capturing(query):
            expected = packed_attention(*arguments).float()
            if not expected.isfinite().all():  # the model's own fault, which verification reports
                return result
            error = float((result.float() - expected).norm() / expected.norm().clamp_min(1e-12))
            if not error <= TOLERANCE[query.dtype]:
                raise KernelError(f"relative error {error:.1e} in layer {layer}")
            self.checked.add(kind)
        return result
