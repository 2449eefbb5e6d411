"""The layers of a plain model on CUDA in ten launches each, where transformers' own take about forty.

They are four matrix products over joined weights, attention (two launches), and the kernels of `layer_kernels` between
them: add and normalise; rotate and store into the cache; gate. They compute models of known kinds, with the same
weights; `checks` compares the result with the model's own layers before the engine uses it. Import this module only
where Triton can be imported.

Libraries were considered first. liger-kernel (0.8.5) copies strided operands such as the parts of a joined product, has
no store into slots, and could replace only the norm; flashinfer-python builds its kernels with nvcc at run time.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import nn

from laserbatch.pipeline.decoding.attention.interface import StepPlan
from laserbatch.pipeline.decoding.model import layer_kernels
from laserbatch.pipeline.decoding.model.known_models import LayerParts, RotaryTables, is_known

GATE_BLOCK = 1024  # channels of one program
HEADS_BLOCK = 4  # heads of one program


@dataclass(frozen=True)
class _Norm:
    """Weight and epsilon of an RMSNorm."""

    weight: torch.Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> "_Norm":
        return cls(module.weight.detach(), getattr(module, "variance_epsilon", None) or module.eps)


class _Layer(LayerParts["_Norm | None"]):
    """Weights and sizes of a decoder layer. Weights of its own projections become views of the joined ones."""

    norm: _Norm
    mlp_norm: _Norm

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, lambda module: None if module is None else _Norm.of(module))
        attention, mlp = layer.self_attn, layer.mlp
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self.attention_output = (attention.o_proj.weight, attention.o_proj.bias)
        self.mlp_output = (mlp.down_proj.weight, mlp.down_proj.bias)


class CudaLayers:
    """The decoder of a causal language model of transformers, from token ids to hidden states."""

    def __init__(self, model: Any) -> None:
        body = model.model
        self._embedding = body.embed_tokens
        self._layers = [_Layer(layer) for layer in body.layers]
        self._rotary = RotaryTables(body.rotary_emb, self._layers, self._embedding.weight)
        self._last_norm = _Norm.of(body.norm)
        self._adds_one = type(body.norm).__name__.startswith("Gemma")
        self._is_gelu = type(body.layers[0].mlp.act_fn).__name__ == "GELUTanh"

    @classmethod
    def of(cls, model: Any) -> "CudaLayers | None":
        """Layers with the weights of a model; None if the model is of no known kind."""
        if not is_known(model, ("Linear",)) or model.model.layers[0].self_attn.head_dim % 2:
            return None
        return cls(model)

    @property
    def static_tensors(self) -> list[torch.Tensor]:
        """Tensors that a captured step reads and that `cover` may replace."""
        return [table for tables in self._rotary.tables.values() for table in tables]

    def cover(self, max_position: int) -> None:
        """Grow the rotary tables to cover `max_position`."""
        self._rotary.cover(max_position)

    def hidden_of(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Hidden states of a step's tokens after the last norm: (num_tokens, hidden_size).

        `token_ids`, `positions` : int64[num_tokens] on the device; `cover` was called for all positions.
        """
        hidden = self._embedding(token_ids)
        normed = torch.empty_like(hidden)
        update, update_norm = None, None
        for layer in self._layers:
            self._normalise(hidden, update, update_norm, layer.norm, normed)
            update = F.linear(self._attended(layer, normed, positions, plan), *layer.attention_output)
            self._normalise(hidden, update, layer.attention_output_norm, layer.mlp_norm, normed)
            update = F.linear(self._gated(F.linear(normed, *layer.gate_up)), *layer.mlp_output)
            update_norm = layer.mlp_output_norm
        self._normalise(hidden, update, update_norm, self._last_norm, normed)
        return normed

    def _normalise(self, hidden, update, update_norm: _Norm | None, norm: _Norm, out) -> None:
        """Add the update, normalised first if it has a norm, to `hidden`; write the norm of the sum to `out`."""
        size = hidden.shape[1]
        block = triton.next_power_of_2(size)
        layer_kernels.rms_norm[(len(hidden),)](
            hidden, hidden if update is None else update, (update_norm or norm).weight, norm.weight, out,
            (update_norm or norm).epsilon, norm.epsilon,
            SIZE=size, BLOCK=block, HAS_UPDATE=update is not None, NORMS_UPDATE=update_norm is not None,
            ADDS_ONE=self._adds_one, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip

    def _attended(self, layer: _Layer, normed: torch.Tensor, positions: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Result of attention: (num_tokens, num_heads * head_dim)."""
        num_tokens, num_all = len(normed), layer.num_heads + 2 * layer.num_kv_heads
        qkv = F.linear(normed, *layer.qkv).view(num_tokens, num_all, layer.head_dim)
        memory = layer.memory(plan, layer.num_kv_heads, qkv)
        cos, sin = self._rotary.tables[layer.rotary_type]
        norms = layer.query_norm or layer.norm, layer.key_norm or layer.norm
        layer_kernels.rotate_and_store[(num_tokens, triton.cdiv(num_all, HEADS_BLOCK))](
            qkv, norms[0].weight, norms[1].weight, positions, plan.slot_mapping, cos, sin, memory.keys, memory.values,
            layer.num_heads, layer.num_kv_heads, memory.keys.stride(1), memory.keys.stride(0),
            memory.values.stride(1), memory.values.stride(0), norms[0].epsilon,
            HEAD_DIM=layer.head_dim, HALF_BLOCK=triton.next_power_of_2(layer.head_dim // 2), HEADS=HEADS_BLOCK,
            HAS_NORM=layer.query_norm is not None, ADDS_ONE=self._adds_one, num_warps=HEADS_BLOCK,
        )  # fmt: skip
        return layer.attend(plan, qkv[:, : layer.num_heads], memory)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The gated values (num_tokens, size) of gates and values (num_tokens, 2 * size)."""
        num_tokens, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(num_tokens, size)
        layer_kernels.gate[(num_tokens, triton.cdiv(size, GATE_BLOCK))](
            gate_up, out, SIZE=size, BLOCK=GATE_BLOCK, IS_GELU=self._is_gelu
        )
        return out


@torch.no_grad()
def _joined(*layers: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The joined weight and bias of linear layers with the same input; the layers keep views of them."""
    parts = [layer.out_features for layer in layers]
    joined = []
    for name in ("weight", "bias"):
        parameters = [getattr(layer, name) for layer in layers]
        if parameters[0] is None:
            joined.append(None)
            continue
        whole = torch.cat(parameters)
        for layer, view in zip(layers, whole.split(parts), strict=True):
            setattr(layer, name, nn.Parameter(view, requires_grad=False))
        joined.append(whole)
    return tuple(joined)
