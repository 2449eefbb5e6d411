"""Which models are of the kind that our own layers compute: Llama's, with a few differences.

A model is known by the classes of all its modules, so that another version of one, or a module that somebody watches,
leaves the model to transformers' layers.
"""

from torch import nn

KNOWN_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
COMMON_PARTS = ("Embedding", "ModuleList", "SiLU", "SiLUActivation")


def is_of_kind(model: nn.Module, kinds: tuple[str, ...], other_parts: tuple[str, ...]) -> bool:
    """Whether all modules of a causal language model are the parts of one of the kinds, and none has a hook."""
    kind = type(model).__name__.removesuffix("ForCausalLM")
    parts = {*COMMON_PARTS, *other_parts, *(f"{kind}{part}" for part in KNOWN_PARTS)}
    return kind in kinds and all(
        type(module).__name__ in parts and not module._forward_hooks and not module._forward_pre_hooks
        for module in model.modules()
    )
