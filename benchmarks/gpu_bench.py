"""Shared state of the items of `gpu_phases.py`: the large model on its device, its engines, and fatal errors."""

import argparse
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from gpu_rows import Rows
from roofline import DeviceRates, measure_device
from widen import load_widened

from laserbatch.pipeline.decoding.device_memory import is_out_of_memory
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import LoadedModel
from laserbatch.pipeline.decoding.settings import DecodingSettings

FUSED = ("fused", "cuda_layers")  # the model's attributes for fused layers on a CPU and on CUDA
FATAL_WORDS = ("CUDA error", "illegal memory access", "unspecified launch failure", "device-side assert")


@dataclass
class Bench:
    """The options, the model on its device and the rows' file, shared by all items."""

    options: argparse.Namespace
    rows: Rows
    max_cache_tokens: int | None

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def dtype(self) -> str:
        return "bfloat16" if self.device.type == "cuda" else "float32"

    @cached_property
    def loaded(self) -> LoadedModel:
        """The large model, checked; loading it adds a row with the time and memory that it took."""
        start_s = time.perf_counter()
        loaded = load_widened(self.options.model, self.options.geometry, self.dtype, self.device.type)
        num_billions = loaded.num_parameters / 1e9
        facts = {"load_s": time.perf_counter() - start_s, "billion_parameters": num_billions, "dtype": self.dtype}
        self.rows.add("load", "model", **facts, fused=fused_name(loaded.model), **memory_now(self.device))
        return loaded

    @cached_property
    def rates(self) -> DeviceRates:
        """The rates of this device, read from the rows if an earlier item measured them."""
        for row in self.rows.read():
            if row.get("phase") == "load" and "bytes_per_s" in row:
                return DeviceRates(row["bytes_per_s"], row["flops_per_s"])
        return measure_device(self.device, getattr(torch, self.dtype))

    def engine(self, batch: int, loaded: LoadedModel | None = None, **options) -> Engine:
        """A new engine; the caller must not hold the previous one."""
        release_memory(self.device)
        settings = DecodingSettings(
            batch_size=batch,
            attention=self.options.attention or ("triton" if self.device.type == "cuda" else "auto"),
            max_cache_tokens=self.max_cache_tokens,
            **options,
        )
        if self.options.no_fused:
            set_fused(self.loaded.model, dict.fromkeys(FUSED))
        engine = Engine(loaded or self.loaded, settings)
        buffered = engine.runner.buffered
        if buffered is not None and self.options.no_graphs:
            buffered._captures = False
        return engine


def fused_of(model) -> dict[str, object]:
    """The layers that replace the model's own, by attribute."""
    return {name: getattr(model, name, None) for name in FUSED}


def set_fused(model, layers: Mapping[str, object]) -> None:
    """Set the model's fused layers; new engines use them."""
    for name, value in layers.items():
        if hasattr(model, name):
            setattr(model, name, value)


def fused_name(model) -> str:
    """The class name of the model's fused layers, or "none"; for a row."""
    return next((type(layers).__name__ for layers in fused_of(model).values() if layers is not None), "none")


def release_memory(device: torch.device) -> None:
    """Collect garbage and return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def memory_now(device: torch.device) -> dict[str, float]:
    """The gigabytes that torch's tensors take on the device now and took at most."""
    if device.type != "cuda":
        return {}
    return {"memory_gb": torch.cuda.memory_allocated() / 1e9, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def is_fatal(error: BaseException) -> bool:
    """Whether the error loses the CUDA context: everything after it fails or is wrong."""
    if is_out_of_memory(error) or "out of memory" in str(error):
        return False
    return any(words in str(error) for words in FATAL_WORDS)
