"""Device memory: how much is free, whether a model fits before it is loaded, and how large a KV cache may be."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from laserbatch.pipeline.engine_choice import num_gpus_for, vllm_advice
from laserbatch.pipeline.errors import ModelError

CACHE_SHARE = {"cuda": 0.8, "cpu": 0.5}  # share of the memory that is free after loading; other processes need some
MIN_CACHE_TOKENS = 2048  # a model is loaded only if a KV cache of this size, for one text or two, fits as well
OUT_OF_MEMORY = re.compile(r"CUDA[^\n]*out of memory|_STATUS_ALLOC_FAILED|can't allocate memory")
CUDA_ERROR = re.compile(r"CUDA (driver )?error: |Triton Error \[CUDA\]: ")
# CUDA only refuses a call with such an error; after any other error the process can no longer use its context.
REFUSED_CALL = re.compile(
    r"captur|kernel image|invalid (configuration )?argument|out of resource|too many resources|invalid device"
    r"|STATUS_NOT_SUPPORTED|STATUS_INVALID_VALUE"
)


class DeviceLost(RuntimeError):
    """A CUDA error after which every further call of this process fails: only a new process can go on."""


@dataclass(frozen=True)
class Memory:
    name: str
    free_bytes: int
    total_bytes: int


def num_stored_values(files: list[Path]) -> int:
    """The number of values in safetensors files, without reading them. Raises ModelError: a file cannot be read."""
    num_values = 0
    for file in files:
        try:
            with safe_open(file, "pt") as weights:
                names = weights.keys()
                num_values += sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
        except (SafetensorError, OSError, ValueError) as error:
            advice = "expected a safetensors file. Copy the checkpoint again"
            raise ModelError(f"the weights in {file} cannot be loaded ({error}); {advice}") from error
    return num_values


def cache_bytes_per_token(config, dtype: torch.dtype) -> int:
    """Estimated bytes of a token's keys and values in all layers, from a transformers configuration."""
    num_values = 0
    for layer, num_heads, head_dim in _layer_heads(config):
        num_values += 2 * head_dim * (getattr(layer, "num_key_value_heads", None) or num_heads)
    return num_values * dtype.itemsize


def _layer_heads(config) -> Iterator[tuple[Any, int, int]]:
    """Yield each layer's configuration, as layers may differ, its number of query heads and their size."""
    text = config.get_text_config()
    for layer in getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers:
        num_heads = getattr(layer, "num_attention_heads", None) or 1
        yield layer, num_heads, getattr(layer, "head_dim", None) or text.hidden_size // num_heads


def require_memory(folder: Path, weights_bytes: int, cache_bytes: int, memory: Memory) -> None:
    """Refuse a model that does not fit, before the system kills the process for it.

    Raises ModelError: it does not fit; the message says what is needed, what is free and what to do.
    """
    needed = weights_bytes + cache_bytes
    if needed <= memory.free_bytes:
        return
    advice = "use a quantised checkpoint (fp8, int8, int4) or a smaller model"
    if memory.name.startswith("cuda"):
        split = vllm_advice(max(2, num_gpus_for(weights_bytes, memory.total_bytes)))
        advice += f", or split it over several GPUs: {split}"
    if needed <= memory.total_bytes:
        advice = "end other processes that use this memory, or start fewer workers (cluster.num_workers)"
        advice += ", or name another GPU in CUDA_VISIBLE_DEVICES" * memory.name.startswith("cuda")
    needed_gb, weights_gb, cache_gb, total_gb, free_gb = (
        f"{num_bytes / 1e9:.1f} GB"
        for num_bytes in (needed, weights_bytes, cache_bytes, memory.total_bytes, memory.free_bytes)
    )
    raise ModelError(
        f"{folder} does not fit into the memory of {memory.name}: it needs {needed_gb} (weights {weights_gb}, smallest "
        f"cache {cache_gb}), and {free_gb} of {total_gb} are free; {advice}"
    )


def memory_of(device: torch.device) -> Memory:
    """Free and total memory of a CUDA device, or of the machine (the container's share, where it has less)."""
    if device.type == "cuda":
        return Memory(str(device), *torch.cuda.mem_get_info(device))
    return host_memory()


def host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Memory of the machine that can be had without ending anything: file caches count as free."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _numbers(meminfo).get("MemAvailable:", total // 1024) * 1024
    limit = _numbers(cgroup / "memory.max").get("", total)
    if limit < total:
        held = _numbers(cgroup / "memory.stat")
        used = _numbers(cgroup / "memory.current").get("", 0)
        used -= held.get("active_file", 0) + held.get("inactive_file", 0)
        total, free = limit, min(free, limit - max(0, used))
    return Memory("cpu", free, total)


def _numbers(file: Path) -> dict[str, int]:
    """Read a system file that holds a name and a number per line, or one number; empty if there is no such file."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    numbers = {}
    for words in map(str.split, lines):
        *name, number = words[:2] or [""]
        if number.isdigit():
            numbers["".join(name)] = int(number)
    return numbers


def step_bytes(config, num_decoding: int, num_tokens: int, num_parts: int) -> int:
    """Estimated bytes that steps take besides weights and caches, from a transformers configuration.

    `num_decoding` : tokens of the largest step that only decodes; attention has a partial result of each for each part.
    `num_tokens` : tokens of the largest step, prompts included.
    `num_parts` : number of parts into which the attention cuts the keys of a sequence.
    """
    partial_values, hidden, intermediate = 0, config.get_text_config().hidden_size, 0
    for layer, num_heads, head_dim in _layer_heads(config):
        partial_values = max(partial_values, num_heads * (head_dim + 1))
        intermediate = max(intermediate, int(np.max(getattr(layer, "intermediate_size", None) or 4 * hidden)))
    partial_results = num_decoding * partial_values * num_parts * 4
    activations = num_tokens * (4 * hidden + 3 * intermediate) * 4
    return partial_results + 2 * activations  # twice: captured steps have memory apart from that of eager ones


def cache_bound(device: torch.device, bytes_per_token: int, num_sharing: int = 1, reserved_bytes: int = 0) -> int:
    """The number of tokens that the cache may hold on a device, from the memory that is free now.

    `bytes_per_token` : bytes of a token in all caches that hold the same tokens.
    `num_sharing` : number of engines that take equal parts of the machine's memory or, on a GPU, of the GPU's.
    `reserved_bytes` : memory that the engine will need besides caches.
    """
    on_cuda = device.type == "cuda"
    memory = memory_of(device)
    free_bytes = memory.free_bytes
    if not on_cuda:
        free_bytes //= num_sharing
    elif num_sharing > 1:  # the free memory says nothing while others load
        free_bytes = min(free_bytes, memory.total_bytes // num_sharing - torch.cuda.memory_reserved(device))
    free_bytes -= reserved_bytes
    return max(1, int(free_bytes * CACHE_SHARE["cuda" if on_cuda else "cpu"]) // max(1, bytes_per_token))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of any device ran out, in PyTorch, cuBLAS or Triton."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


def is_device_lost(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that this process can no longer use its CUDA device.

    Illegal accesses, failed launches and uncorrectable memory errors do; a lack of memory and refused calls do not.
    """
    while error is not None:
        is_cuda = isinstance(error, torch.AcceleratorError) or CUDA_ERROR.search(str(error)) is not None
        is_refused = is_out_of_memory(error) or REFUSED_CALL.search(str(error)) is not None
        if isinstance(error, DeviceLost) or (is_cuda and not is_refused):
            return True
        error = error.__cause__ or error.__context__
    return False


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device as a tensor.

    On CUDA the copy is asynchronous, from pinned memory: a copy from ordinary memory would wait until the device has
    finished the forward that it is computing.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
