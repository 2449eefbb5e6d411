"""Decoder layers compiled by torch, so that what lies between products and attention is a few kernels and not twenty.

A layer of transformers runs norms, rotary embeddings, gated activations and residual sums as one small kernel after
another. On a GPU each of them reads and writes all hidden states and takes microseconds, also within a CUDA graph; a
step of few tokens spends as long on them as on its weights. `torch.compile` joins them. Attention stays what it is: a
call that the compiler does not look into.

Layers are compiled when they first run, for any number of tokens. What goes wrong then must not stop a night: all
layers go back to what they were. Knows no step, no plan and no store.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from laserbatch.pipeline.decoding.memory.kv_cache import is_out_of_memory
from laserbatch.pipeline.errors import ModelError

logger = logging.getLogger(__name__)

MOST_COMPILING = "4"  # processes side by side; torch would start one for each core in every worker
COMPILERS = {"cpu": ("g++", "clang++"), "cuda": ("gcc", "cc", "clang")}  # Triton's launchers are C, the CPU's loops C++


class CompiledLayers:
    """A model's decoder layers, which run compiled from here on."""

    def __init__(self, layers: list[nn.Module]) -> None:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", MOST_COMPILING)
        compiled = {kind: torch.compile(kind.forward, dynamic=True) for kind in {type(layer) for layer in layers}}
        self.layers = layers
        self._lock = threading.Lock()
        for layer in layers:
            layer.forward = partial(self._run, layer, compiled[type(layer)])

    def _run(self, layer: nn.Module, compiled: Callable, *inputs, **options):
        try:
            return compiled(layer, *inputs, **options)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.restore(error)
            return layer.forward(*inputs, **options)

    def restore(self, error: Exception) -> None:
        """The layers as they were."""
        with self._lock:
            for layer in self.layers:
                vars(layer).pop("forward", None)  # the method of its class again
        lines = str(error).strip().splitlines() or [type(error).__name__]
        logger.warning("the model's layers cannot be compiled (%s); they run as they are", lines[0][:200])


def compile_layers(model: nn.Module) -> CompiledLayers | None:
    """Have a model's decoder layers compiled; None where no list of layers is found in it."""
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    if len(found) != 1:
        logger.info("%s has no single list of %s layers: nothing is compiled", type(model).__name__, num_layers)
        return None
    return CompiledLayers(list(found[0]))


def wants_compiling(choice: str, device: torch.device) -> bool:
    """Whether the setting `decoding.compile` asks for compiled layers on a device.

    Raises
    ------
    ModelError : "on" was asked for, and there is no compiler.
    """
    if choice == "off" or (choice == "auto" and device.type != "cuda"):
        return False
    names = COMPILERS["cuda" if device.type == "cuda" else "cpu"]
    if "CXX" in os.environ or "CC" in os.environ or any(map(shutil.which, names)):
        return True
    if choice == "auto":
        logger.warning("there is no C compiler (%s): the model's layers are not compiled", ", ".join(names))
        return False
    raise ModelError(f"decoding.compile is on, which needs a compiler ({' or '.join(names)}); install one or use auto")
