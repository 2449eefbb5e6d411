"""The memory of a device: what is free, whether a model fits it before it is loaded, how much a KV cache may take."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from laserbatch.pipeline.engine_choice import num_gpus_for, vllm_advice
from laserbatch.pipeline.errors import ModelError

CACHE_SHARE = {"cuda": 0.8, "cpu": 0.5}  # of the memory that is free after loading; others want some of a machine's
MIN_CACHE_TOKENS = 2048  # of KV cache, without which loading is not worth while: one text or two


@dataclass(frozen=True)
class Memory:
    """Memory of a device, in bytes."""

    name: str
    free_bytes: int
    total_bytes: int


def num_stored_values(files: list[Path]) -> int:
    """Values of all tensors in safetensors files; no tensor is read. Raises ModelError: a file is none."""
    num_values = 0
    for file in files:
        try:
            with safe_open(file, "pt") as weights:
                names = weights.keys()
                num_values += sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
        except Exception as error:
            raise ModelError(f"the weights in {file} cannot be loaded: not a safetensors file ({error})") from error
    return num_values


def cache_bytes_per_token(config, dtype: torch.dtype) -> int:
    """Estimate of a token's keys and values in all layers, from a transformers configuration."""
    text = config.get_text_config()
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers  # heads may differ by layer
    num_values = 0
    for layer in layers:
        num_heads = getattr(layer, "num_attention_heads", None) or 1
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // num_heads
        num_values += 2 * head_dim * (getattr(layer, "num_key_value_heads", None) or num_heads)
    return num_values * dtype.itemsize


def require_memory(folder: Path, weights_bytes: int, cache_bytes: int, memory: Memory) -> None:
    """Refuse a model that does not fit, before the system ends the process for it.

    Raises ModelError: naming what is needed, what is there and what to do.
    """
    needed = weights_bytes + cache_bytes
    if needed <= memory.free_bytes:
        return
    advice = "use a quantised checkpoint (fp8, int8, int4) or a smaller model"
    if memory.name.startswith("cuda"):
        split = vllm_advice(max(2, num_gpus_for(weights_bytes, memory.total_bytes)))
        advice += f", or split it over several GPUs: {split}"
    if needed <= memory.total_bytes:
        advice = "end what holds the rest, name another GPU in CUDA_VISIBLE_DEVICES, or start fewer workers"
    needed_gb, weights_gb, cache_gb, total_gb, free_gb = (
        f"{num_bytes / 1e9:.1f} GB"
        for num_bytes in (needed, weights_bytes, cache_bytes, memory.total_bytes, memory.free_bytes)
    )
    raise ModelError(
        f"{folder} does not fit {memory.name}: it needs {needed_gb} (weights {weights_gb}, the least cache "
        f"{cache_gb}), of {total_gb} there are {free_gb} free; {advice}"
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
        used = (
            _numbers(cgroup / "memory.current").get("", 0) - held.get("active_file", 0) - held.get("inactive_file", 0)
        )
        total, free = limit, min(free, limit - max(0, used))
    return Memory("cpu", free, total)


def _numbers(file: Path) -> dict[str, int]:
    """What a file of the system says, a name and a number each line, or a number alone; nothing without the file."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    found = {}
    for words in map(str.split, lines):
        *name, number = words[:2] or [""]
        if number.isdigit():
            found["".join(name)] = int(number)
    return found


def cache_bound(device: torch.device, bytes_per_token: int, num_sharing: int = 1) -> int:
    """Tokens that the cache may hold on a device, from the memory that is free now.

    `num_sharing` : engines of one machine, which take equal parts of its memory. A GPU is never shared.
    """
    on_cuda = device.type == "cuda"
    free_bytes = memory_of(device).free_bytes // (1 if on_cuda else num_sharing)
    return max(1, int(free_bytes * CACHE_SHARE["cuda" if on_cuda else "cpu"]) // max(1, bytes_per_token))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, torch's of any device included."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the array on a device.

    On CUDA it comes from pinned memory and is not waited for: a copy from ordinary memory would first let the device
    finish the forward that it is computing. That branch has not been run on a GPU yet.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
