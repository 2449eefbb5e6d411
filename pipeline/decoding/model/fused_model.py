"""A plain model on a CPU in few calls per layer, in float32 or bfloat16.

A decoder layer of transformers is some forty small operations of torch, which for few tokens take longer than its
matrix products. For a model of a known kind, this module computes the same products over the same weights
(`cpu_linear`), with compiled loops between them: normalisation; rotation, and writing to the KV cache; attention; the
gate. Tokens are divided among threads. The results are those of transformers, except for rounding: in bfloat16 each
loop computes in float32 and rounds its result once. `checks` compares both before the engine uses this model.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from laserbatch.pipeline.decoding.attention.bfloat16 import as_array, as_tensor, narrowed, widened
from laserbatch.pipeline.decoding.attention.interface import StepPlan
from laserbatch.pipeline.decoding.attention.numba_attention import (
    ATTENTION_STAMP,
    LOG2E,
    SUMS,
    num_threads,
    power_of_two,
)
from laserbatch.pipeline.decoding.batch import Batch
from laserbatch.pipeline.decoding.model.cpu_product import PackedMatrix
from laserbatch.pipeline.decoding.model.known_models import LayerParts, RotaryTables, is_known
from laserbatch.retrieval_pools.compiled import cached, source_stamp

# Python's division checks for zeros, which keeps a loop from being vectorised.
_OPTIONS: dict[str, Any] = {"fastmath": SUMS, "error_model": "numpy"}
_COMPILED = _OPTIONS | {"parallel": True, "stamp": ATTENTION_STAMP + source_stamp([Path(__file__)])}
MIN_TOKENS_PER_THREAD = 16  # fewer are computed faster by one thread than by two


class _Norm:
    """RMSNorm; the identity, with an empty weight, if the layer has no such module."""

    def __init__(self, module: Any) -> None:
        self.weight, self.epsilon = np.empty(0, np.float32), np.float32(0)
        if module is not None:
            is_gemma = type(module).__name__.startswith("Gemma")  # Gemma multiplies by 1 + weight
            self.weight = module.weight.detach().float().add(1 if is_gemma else 0).numpy()
            self.epsilon = np.float32(module.eps if is_gemma else module.variance_epsilon)

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """The normalised form of `hidden` (num_tokens, hidden_size)."""
        result = np.empty_like(hidden)
        _normalise(hidden, self.weight, self.epsilon, result, _num_parts(hidden))
        return result


class _Layer(LayerParts[_Norm]):
    def __init__(self, layer: Any) -> None:
        super().__init__(layer, _Norm)
        attention, mlp = layer.self_attn, layer.mlp
        self.num_heads, self.num_kv_heads = (size // self.head_dim for size in attention.q_proj.out_features[:2])
        linear = attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj
        # Reading a module's attribute takes as long as a small loop.
        self.qkv, self.attention_output, self.gate_up, self.mlp_output = (layer.matrix for layer in linear)


class FusedModel:
    """A causal language model of transformers, for the engine's steps."""

    def __init__(self, model: Any) -> None:
        body = model.model
        self._embedding = body.embed_tokens
        self._layers = [_Layer(layer) for layer in body.layers]
        self._rotary = RotaryTables(body.rotary_emb, self._layers, torch.empty(0))  # float32 for weights of any type
        self._norm, self._output_layer = _Norm(body.norm), model.lm_head
        self._is_gelu = type(body.layers[0].mlp.act_fn).__name__ == "GELUTanh"

    @classmethod
    def of(cls, model: Any) -> "FusedModel | None":
        """The fused form of a model, with its weights; None if it is of no known kind or not laid out for a CPU."""
        return cls(model) if is_known(model, ("JoinedLinear", "PartOfLinear")) else None

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab_size) of hidden states (n, hidden_size)."""
        return self._output_layer(hidden)

    def hidden_of(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Hidden states of a step's tokens: (num_tokens, hidden_size)."""
        self._rotary.cover(int(batch.positions.max()))
        hidden = as_array(self._embedding(torch.from_numpy(batch.token_ids.astype(np.int64))[None])[0])
        for layer in self._layers:
            attended = self._attended(layer, layer.qkv.product(layer.norm(hidden)), batch, plan)
            hidden = _plus(hidden, attended, layer.attention_output, layer.attention_output_norm, layer.is_gemma)
            gate_up = layer.gate_up.product(layer.mlp_norm(hidden))
            gated = np.empty((len(hidden), gate_up.shape[1] // 2), hidden.dtype)
            _gate(gate_up, self._is_gelu, gated, _num_parts(hidden))
            hidden = _plus(hidden, gated, layer.mlp_output, layer.mlp_output_norm, layer.is_gemma)
        return as_tensor(self._norm(hidden))

    def _attended(self, layer: _Layer, qkv: np.ndarray, batch: Batch, plan: StepPlan) -> np.ndarray:
        """The result of attention, (num_tokens, num_heads * head_dim), for `qkv` (num_tokens, all heads * head_dim)."""
        memory = layer.memory(plan, layer.num_kv_heads, self._embedding.weight)
        query = np.empty((len(batch), layer.num_heads, layer.head_dim), qkv.dtype)
        cos, sin = self._rotary.tables[layer.rotary_type]
        _rotate(
            qkv, batch.positions, cos.numpy(), sin.numpy(), batch.slot_mapping,
            layer.query_norm.weight, layer.key_norm.weight, layer.query_norm.epsilon,
            query, as_array(memory.keys), as_array(memory.values), _num_parts(query),
        )  # fmt: skip
        return as_array(layer.attend(plan, as_tensor(query), memory))


def _plus(hidden: np.ndarray, inputs: np.ndarray, matrix: PackedMatrix, norm: _Norm, normalises: bool) -> np.ndarray:
    """The residual stream (num_tokens, hidden_size) plus a layer's result, normalised first if `normalises`."""
    if not normalises:
        return matrix.product(inputs, hidden)
    _add_normalised(matrix.product(inputs), norm.weight, norm.epsilon, hidden, _num_parts(hidden))
    return hidden


def _num_parts(tokens: np.ndarray) -> int:
    """The number of parts into which a loop divides tokens, one for each thread."""
    return max(1, min(len(tokens) // MIN_TOKENS_PER_THREAD, torch.get_num_threads(), num_threads()))


@cached(**_COMPILED)
def _normalise(hidden, weight, epsilon, result, num_parts):
    for part in prange(num_parts):
        for i in range(len(hidden) * part // num_parts, len(hidden) * (part + 1) // num_parts):
            factor = _root_mean_square(hidden[i], epsilon)
            for j in range(hidden.shape[1]):
                result[i, j] = narrowed(widened(hidden[i, j]) * factor * weight[j], result)


@cached(**_COMPILED)
def _add_normalised(update, weight, epsilon, hidden, num_parts):
    for part in prange(num_parts):
        for i in range(len(hidden) * part // num_parts, len(hidden) * (part + 1) // num_parts):
            factor = _root_mean_square(update[i], epsilon)
            for j in range(hidden.shape[1]):
                total = widened(hidden[i, j]) + widened(update[i, j]) * factor * weight[j]
                hidden[i, j] = narrowed(total, hidden)


@njit(**_OPTIONS)
def _root_mean_square(values, epsilon):
    """The factor of RMSNorm: 1 / the root mean square of the values."""
    total = np.float32(0)
    for i in range(len(values)):
        value = widened(values[i])
        total += value * value
    return np.float32(1) / np.sqrt(total / np.float32(len(values)) + epsilon)


@cached(**_COMPILED)
def _rotate(qkv, positions, cos, sin, slots, query_weight, key_weight, epsilon, query, keys, values, num_parts):
    """Rotate queries into (num_tokens, num_heads, dim), and keys into slots (heads, any, dim); copy values there."""
    num_tokens, num_heads, dim = query.shape
    num_kv_heads = len(keys)
    for part in prange(num_parts):
        vector = np.empty(dim, np.float32)
        for i in range(num_tokens * part // num_parts, num_tokens * (part + 1) // num_parts):
            c, s, slot = cos[positions[i]], sin[positions[i]], slots[i]
            for head in range(num_heads + num_kv_heads):
                to = query[i, head] if head < num_heads else keys[head - num_heads, slot]
                weight = query_weight if head < num_heads else key_weight
                _rotate_head(qkv[i, head * dim : (head + 1) * dim], weight, epsilon, c, s, vector, to)
            for head in range(num_kv_heads):
                begin = (num_heads + num_kv_heads + head) * dim
                for d in range(dim):
                    values[head, slot, d] = qkv[i, begin + d]


@njit(**_OPTIONS)
def _rotate_head(head, weight, epsilon, cos, sin, vector, rotated):
    """Set `rotated` to a head's rotated values, which are normalised first if there is a weight."""
    half = len(head) // 2
    for d in range(len(head)):
        vector[d] = widened(head[d])
    if len(weight):
        factor = _root_mean_square(vector, epsilon)
        for d in range(len(head)):
            vector[d] *= factor * weight[d]
    for d in range(half):
        rotated[d] = narrowed(vector[d] * cos[d] - vector[half + d] * sin[d], rotated)
        rotated[half + d] = narrowed(vector[half + d] * cos[d] + vector[d] * sin[d], rotated)


@cached(**_COMPILED)
def _gate(gate_up, is_gelu, result, num_parts):
    """activation(gate) * up for (num_tokens, 2 * n), the gate's n numbers first: SiLU, or the tanh form of GELU."""
    for part in prange(num_parts):
        for i in range(len(result) * part // num_parts, len(result) * (part + 1) // num_parts):
            _gate_token(gate_up[i], is_gelu, result[i])


@njit(**_OPTIONS)
def _gate_token(gate_up, is_gelu, result):
    n = len(result)
    for j in range(n):
        x = widened(gate_up[j])
        exponent = x
        if is_gelu:  # (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
            exponent = np.float32(1.5957691216057308) * (x + np.float32(0.044715) * x * x * x)
        e = power_of_two(-abs(exponent) * LOG2E)
        activated = x * (e if exponent < 0 else np.float32(1)) / (np.float32(1) + e)
        result[j] = narrowed(activated * widened(gate_up[n + j]), result)
