"""The models that our own layers compute, on a CPU (`fused_model`) or on CUDA (`cuda_layers`): Llama and similar ones.

A model is known by the classes of all its modules: if one has another class or a hook, transformers' layers compute the
model. The differences between its layers and Llama's are stated here once for both.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from laserbatch.pipeline.decoding.attention.interface import StepPlan
from laserbatch.pipeline.decoding.kv_cache import LayerMemory

KNOWN_KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3")
KNOWN_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
COMMON_PARTS = ("Embedding", "ModuleList", "SiLU", "SiLUActivation", "GELUTanh", "Gemma3TextModel",
                "Gemma3TextScaledWordEmbedding")  # fmt: skip
FIRST_POSITIONS = 4096  # number of positions that the rotary tables cover at first

Norm = TypeVar("Norm")


def is_known(model: Any, linear_layers: tuple[str, ...]) -> bool:
    """Whether all modules of a causal language model are the parts of a known kind, and none has a hook.

    `linear_layers` : the classes of its linear layers. A model that softcaps its attention scores is of no known kind.
    """
    kind = type(model).__name__.removesuffix("ForCausalLM")
    parts = {*COMMON_PARTS, *linear_layers, *(f"{kind}{part}" for part in KNOWN_PARTS)}
    return (
        kind in KNOWN_KINDS
        and all(
            type(module).__name__ in parts and not module._forward_hooks and not module._forward_pre_hooks
            for module in model.modules()
        )
        and getattr(model.model.layers[0].self_attn, "attn_logit_softcapping", None) is None
    )


class LayerParts(Generic[Norm]):
    """Sizes and norms of a decoder layer.

    `make_norm` gets a module, or None if the layer has no such norm.
    """

    def __init__(self, layer: Any, make_norm: Callable[[nn.Module | None], Norm]) -> None:
        attention = layer.self_attn
        self.number, self.scale, self.head_dim = attention.layer_idx, attention.scaling, attention.head_dim
        self.norm, after_attention = make_norm(layer.input_layernorm), make_norm(layer.post_attention_layernorm)
        self.query_norm, self.key_norm = (make_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
        # Gemma 3 normalises what attention and MLP add to the residual stream.
        self.is_gemma = hasattr(layer, "pre_feedforward_layernorm")
        self.mlp_norm = make_norm(layer.pre_feedforward_layernorm) if self.is_gemma else after_attention
        self.attention_output_norm = after_attention if self.is_gemma else make_norm(None)
        self.mlp_output_norm = make_norm(getattr(layer, "post_feedforward_layernorm", None))
        self.rotary_type: str | None = attention.layer_type if self.is_gemma else None
        self._window_owner = attention.config if type(layer).__name__.startswith("Mistral") else attention

    @property
    def window(self) -> int | None:
        return getattr(self._window_owner, "sliding_window", None)

    def memory(self, plan: StepPlan, num_kv_heads: int, like: torch.Tensor) -> LayerMemory:
        """The layer's keys and values in a step's cache; the first step allocates them in the type of `like`."""
        memory = plan.cache.layers.get(self.number)
        if memory is None:
            nothing = like.new_empty(num_kv_heads, 0, self.head_dim)
            memory = plan.cache.write(self.number, plan.slot_mapping[:0], nothing, nothing)
        return memory

    def attend(self, plan: StepPlan, query: torch.Tensor, memory: LayerMemory) -> torch.Tensor:
        """Attention of a step, (num_tokens, num_heads * head_dim), for queries (num_tokens, num_heads, head_dim)."""
        plan.layers_seen.append(self.number)
        attended = plan.attention(query, memory.keys, memory.values, self.scale, self.window, None, None)
        return attended.view(len(query), -1)


class RotaryTables:
    """Cosines and sines, (num_positions, head_dim / 2), by the rotary type of layers; they grow with the texts.

    `like` is a tensor that has their type and device.
    """

    def __init__(self, rotary: Any, layers: list[Any], like: torch.Tensor) -> None:
        self._rotary, self._like = rotary, like
        self._types = {layer.rotary_type for layer in layers}
        self._num_positions = 0
        self.tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}

    def cover(self, max_position: int) -> None:
        if max_position < self._num_positions:
            return
        self._num_positions = max(FIRST_POSITIONS, 2 * max_position)
        positions = torch.arange(self._num_positions, device=self._like.device)[None]
        for rotary_type in self._types:
            arguments = () if rotary_type is None else (rotary_type,)
            tables = self._rotary(self._like, positions, *arguments)  # both halves of each are equal
            cos, sin = (table[0, :, : table.shape[2] // 2].contiguous() for table in tables)
            self.tables[rotary_type] = cos, sin
