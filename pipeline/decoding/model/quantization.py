"""Checkpoints whose weights are stored in fewer bits, as transformers loads them.

transformers picks the quantiser that a configuration names and keeps its weights as they are; here is what it leaves
open: which library to install, how much memory such a model holds, and how many parameters it has.
"""

import copy

import torch
from transformers import AutoModelForCausalLM

from laserbatch.pipeline.errors import first_line

PACKAGES = {
    "torchao": "torchao",
    "compressed-tensors": "compressed-tensors",
    "fp8": "accelerate",
    "fbgemm_fp8": "fbgemm-gpu accelerate",
    "bitsandbytes": "bitsandbytes accelerate",
    "gptq": "gptqmodel optimum",
    "awq": "gptqmodel",
    "hqq": "hqq accelerate",
    "quanto": "optimum-quanto accelerate",
    "mxfp4": "kernels accelerate",
}  # fmt: skip
# Kernels of packed weights may round otherwise with another number of tokens, whatever the type of activations.
TOLERANCE = 0.05
# These are unpacked by their library when they first run: they save disk, not memory.
_UNPACKED_WHEN_RUN = ("compressed-tensors",)


def quantization_of(config) -> str | None:
    """The method by which a configuration says its weights are quantised; None for plain weights."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    if method is None:
        return "bitsandbytes"  # the one whose older configurations name no method
    return str(getattr(method, "value", method))


def why_not_loaded(method: str, error: Exception) -> str:
    """What to say of a quantised checkpoint that could not be loaded."""
    reason = f"its weights are quantised with {method}, which does not load here ({first_line(error)})"
    if isinstance(error, ImportError):
        return f"{reason}; install what it needs: pip install {PACKAGES.get(method, method)}"
    return f"{reason}; use the unquantised checkpoint, or a machine that has what it needs"


def is_unpacked_when_run(method: str | None, device: torch.device) -> bool:
    """Whether a checkpoint's weights take their plain size in memory once the model has run."""
    return method in _UNPACKED_WHEN_RUN or (method == "fp8" and device.type == "cpu")


def num_parameters_of(config) -> int:
    """Parameters of the plain model that a configuration describes: packed values cannot be counted one by one."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain)
    return sum(parameter.numel() for parameter in model.parameters())


def resident_bytes(model: torch.nn.Module) -> int:
    """Memory that a model's weights and buffers take, packed ones as they are packed."""
    seen: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in _parts(tensor):
            seen[id(part)] = part.numel() * part.element_size()
    return sum(seen.values())


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of which one of a quantiser's own is made."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]
