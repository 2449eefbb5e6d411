"""A plain model on a CPU in few calls a layer.

A decoder layer of transformers is some forty small operations of torch, which for a few tokens take longer than its
matrices' products. Where a model is of a known kind, here are the same products over the same weights (`cpu_linear`)
with compiled loops between them: normalisation; rotation, and writing to the KV cache; attention; the gate. It computes
what transformers does, but for rounding; `checks` compares both before the engine believes it.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import nn

from laserbatch.pipeline.decoding.attention.interface import StepPlan
from laserbatch.pipeline.decoding.attention.numba_attention import LOG2E, SUMS, power_of_two
from laserbatch.pipeline.decoding.batch import Batch
from laserbatch.pipeline.decoding.model.cpu_linear import compiled_size
from laserbatch.pipeline.decoding.model.known_models import is_of_kind

KNOWN_KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3")
OTHER_PARTS = ("OneDnnLinear", "PartOfLinear")
FIRST_POSITIONS = 1024
# As Python divides, a loop looks for zeros and is not computed in vectors.
_COMPILED = {"cache": True, "nogil": True, "fastmath": SUMS, "error_model": "numpy"}
_product, _sum_with_product = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary


class _Norm:
    """Normalisation by the root mean square; of no module none, whose weight is empty."""

    def __init__(self, module: Any) -> None:
        self.weight = np.empty(0, np.float32) if module is None else module.weight.detach().numpy()
        self.epsilon = np.float32(0 if module is None else module.variance_epsilon)

    def __call__(self, hidden: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        _normalise(hidden.numpy(), self.weight, self.epsilon, result.numpy())
        return result


class _Layer:
    """The parts of a decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.number, self.scale, self.head_dim = attention.layer_idx, attention.scaling, attention.head_dim
        self.num_heads, self.num_kv_heads = (size // self.head_dim for size in attention.q_proj.out_features[:2])
        linear = (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)
        # Weights and biases: asking a module for one takes as long as a small loop.
        self.qkv, self.attention_output, self.gate_up, self.mlp_output = ((each.weight, each.bias) for each in linear)
        self.norm, self.mlp_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.query_norm, self.key_norm = (_Norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
        self._has_window = attention.config if type(layer).__name__.startswith("Mistral") else attention

    @property
    def window(self) -> int | None:
        return getattr(self._has_window, "sliding_window", None)


class FusedModel:
    """A causal language model of transformers, for the engine's steps."""

    def __init__(self, model: Any) -> None:
        body = model.model
        self._embedding, self._rotary = body.embed_tokens, body.rotary_emb
        self._layers = [_Layer(layer) for layer in body.layers]
        self._norm, self._output_layer = _Norm(body.norm), model.lm_head
        self._cos = self._sin = np.empty((0, 0), np.float32)  # (positions, head_dim / 2)

    @classmethod
    def of(cls, model: nn.Module) -> "FusedModel | None":
        """A model with the weights of another; None where that is of no known kind or not laid out for a CPU."""
        return cls(model) if is_of_kind(model, KNOWN_KINDS, OTHER_PARTS) else None

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab_size) of hidden states (n, hidden_size)."""
        return self._output_layer(hidden)

    def hidden_of(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Hidden states of a step's tokens: (num_tokens, hidden_size)."""
        num_tokens = len(batch)
        self._see(int(batch.positions.max()))
        token_ids = np.zeros(compiled_size(num_tokens), np.int64)
        token_ids[:num_tokens] = batch.token_ids
        hidden = self._embedding(torch.from_numpy(token_ids)[None])[0]
        normed, gated = torch.empty_like(hidden), None
        for layer in self._layers:
            qkv = _product(layer.norm(hidden, normed), *layer.qkv, "none", [], "")
            hidden = _sum_with_product(self._attended(layer, qkv, batch, plan), hidden, *layer.attention_output, "add")
            gate_up = _product(layer.mlp_norm(hidden, normed), *layer.gate_up, "none", [], "")
            gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2) if gated is None else gated
            _gate(gate_up.numpy(), gated.numpy())
            hidden = _sum_with_product(gated, hidden, *layer.mlp_output, "add")
        return self._norm(hidden, normed)[:num_tokens]

    def _attended(self, layer: _Layer, qkv: torch.Tensor, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Attention's result, (num_padded, num_heads * head_dim), of (num_padded, heads of all three * head_dim)."""
        num_tokens, num_padding = len(batch), len(qkv) - len(batch)
        memory = plan.cache.layers.get(layer.number)
        if memory is None:
            nothing = qkv.new_empty(layer.num_kv_heads, 0, layer.head_dim)
            memory = plan.cache.write(layer.number, plan.slot_mapping[:0], nothing, nothing)
        query = qkv.new_empty(num_tokens, layer.num_heads, layer.head_dim)
        _rotate(
            qkv.numpy(), batch.positions, self._cos, self._sin, batch.slot_mapping, layer.query_norm.weight,
            layer.key_norm.weight, layer.query_norm.epsilon, query.numpy(), memory.keys.numpy(), memory.values.numpy(),
        )  # fmt: skip
        plan.layers_seen.append(layer.number)
        out = plan.attention(query, memory.keys, memory.values, layer.scale, layer.window, None, None)
        out = out.view(num_tokens, -1)
        return F.pad(out, (0, 0, 0, num_padding)) if num_padding else out

    def _see(self, position: int) -> None:
        """Have the rotations of all positions up to one."""
        if position >= len(self._cos):
            positions = torch.arange(max(FIRST_POSITIONS, 2 * position))[None]
            cos, sin = self._rotary(self._embedding.weight, positions)
            self._cos, self._sin = (each[0, :, : each.shape[2] // 2].contiguous().numpy() for each in (cos, sin))


@njit(**_COMPILED)
def _normalise(hidden, weight, epsilon, result):
    for i in range(len(hidden)):
        factor = _root_mean_square(hidden[i], epsilon)
        for j in range(hidden.shape[1]):
            result[i, j] = hidden[i, j] * factor * weight[j]


@njit(**_COMPILED)
def _root_mean_square(values, epsilon):
    """What the values are multiplied by: 1 / their root mean square."""
    total = np.float32(0)
    for value in values:
        total += value * value
    return np.float32(1) / np.sqrt(total / np.float32(len(values)) + epsilon)


@njit(**_COMPILED)
def _rotate(qkv, positions, cos, sin, slots, query_weight, key_weight, epsilon, query, keys, values):
    """Each token's queries, to (num_tokens, num_heads, dim), its keys and values, to its slot of (heads, any, dim)."""
    num_heads, dim = query.shape[1:]
    num_kv_heads, half = len(keys), dim // 2
    for i in range(len(query)):
        c, s, slot = cos[positions[i]], sin[positions[i]], slots[i]
        for head in range(num_heads + num_kv_heads):
            is_query = head < num_heads
            own = qkv[i, head * dim : (head + 1) * dim]
            to = query[i, head] if is_query else keys[head - num_heads, slot]
            weight = query_weight if is_query else key_weight
            if len(weight):
                factor = _root_mean_square(own, epsilon)
                for d in range(dim):
                    own[d] *= factor * weight[d]
            for d in range(half):
                to[d] = own[d] * c[d] - own[half + d] * s[d]
                to[half + d] = own[half + d] * c[d] + own[d] * s[d]
        for head in range(num_kv_heads):
            begin = (num_heads + num_kv_heads + head) * dim
            for d in range(dim):
                values[head, slot, d] = qkv[i, begin + d]


@njit(**_COMPILED)
def _gate(gate_up, result):
    """silu(gate) * up of (num_tokens, 2 * n), n numbers of the gate first."""
    n = result.shape[1]
    for i in range(len(result)):
        for j in range(n):
            x = gate_up[i, j]
            e = power_of_two(-abs(x) * LOG2E)
            result[i, j] = x * (e if x < 0 else np.float32(1)) / (np.float32(1) + e) * gate_up[i, n + j]
