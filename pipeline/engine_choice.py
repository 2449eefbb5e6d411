"""Choice of the engine for a model and a machine: laserbatch's own or vLLM (`decoding.engine`).

The choice depends on figures alone. `laserbatch doctor` and the error for a model that is too large both use it. This
module knows no configuration, loads no engine and changes nothing: the user sets `decoding.engine`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MAX_OWN_PARAMETERS = 15e9  # parameters of a model on one GPU; models called 14 B have up to 14.8 billion
MIN_GPU_BATCH = 64  # on an H200, a step of an 8 B model takes 5.2 ms for one text, 7.1 for 64 and 13.5 for 256
MAX_WEIGHTS_SHARE = 0.85  # share of a GPU's memory for weights; the KV cache and activations need the rest


@dataclass(frozen=True)
class EngineChoice:
    """The engine that fits, the reason, and the number of GPUs of one node that hold the weights."""

    engine: Literal["laserbatch", "vllm"]
    reason: str
    tensor_parallel_size: int = 1


def choose_engine(
    *,
    num_parameters: int,
    weights_bytes: int,
    quantization: str | None,
    is_mixture_of_experts: bool,
    device_bytes: int,
    num_gpus: int,
) -> EngineChoice:
    """Choose the engine for a model on a machine with GPUs of `device_bytes`; without one, its CPU writes texts.

    `weights_bytes`: size of the weights in memory, in the dtype of the computation. `quantization`: quantisation method
    of the stored weights, as `quantization_of` names it; None: not quantised.
    """
    if not num_gpus:
        return EngineChoice(
            "laserbatch", "there is no GPU, and on a CPU this engine has all verifiers and drafts faster than vLLM"
        )
    size = num_gpus_for(weights_bytes, device_bytes)
    if size > 1:
        reason = f"the weights take {weights_bytes / 1e9:.1f} GB, too much for one GPU of {device_bytes / 1e9:.1f} GB"
        if size > num_gpus:
            reason += f"; {size} GPUs of this size hold them, and this machine has {num_gpus}"
        return EngineChoice("vllm", reason, size)
    if quantization is not None:
        return EngineChoice("vllm", f"the weights are quantised ({quantization}), and vLLM has fast kernels for them")
    if is_mixture_of_experts:
        return EngineChoice("vllm", "the model is a mixture of experts, and vLLM has fused kernels for experts")
    if num_parameters > MAX_OWN_PARAMETERS:
        reason = f"the model has {num_parameters / 1e9:.1f} B parameters, and laserbatch's engine is for up to 14 B"
        return EngineChoice("vllm", reason)
    reason = "the model fits one GPU, where laserbatch's engine was faster than vLLM with the same drafts (docs/gpu.md)"
    return EngineChoice("laserbatch", reason)


def small_batch(batch_size: int) -> str | None:
    """A sentence on the throughput lost with a batch that is too small for a GPU; None if it is large enough."""
    if batch_size >= MIN_GPU_BATCH:
        return None
    return (
        f"decoding.batch_size is {batch_size}: a GPU step takes hardly longer for 64 texts than for one, so 64 to 256 "
        "write several times as many texts per hour"
    )


def num_gpus_for(num_bytes: int, device_bytes: int) -> int:
    """The number of GPUs that hold `num_bytes` of weights: a power of two, since heads are split evenly."""
    size = 1
    while num_bytes > size * MAX_WEIGHTS_SHARE * device_bytes:
        size *= 2
    return size


def vllm_advice(tensor_parallel_size: int = 1, own_options: Sequence[str] = ()) -> str:
    """A phrase with the options to set, and those to remove, to write texts with vLLM."""
    advice = "set decoding.engine: vllm"
    if tensor_parallel_size > 1:
        advice += f" with decoding.vllm: {{tensor_parallel_size: {tensor_parallel_size}}}"
    if own_options:
        advice += f", without {', '.join(own_options)}"
    return f"{advice} (docs/vllm.md)"
