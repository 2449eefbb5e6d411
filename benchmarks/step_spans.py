"""Times of the parts of an engine's step; a part's time excludes the parts inside it.

A span reads the clock before and after an existing call, about a hundred times per step, so that it hardly slows a
step. On CUDA each span waits for the device at both ends, and steps are not replayed from graphs. So host and device do
not overlap: the parts are right, but their sum is more than an unwatched step. On a CPU the layers are transformers',
since a fused model has no modules to watch.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface

from laserbatch.pipeline.decoding import acceptance as acceptance_module
from laserbatch.pipeline.decoding import engine as engine_module
from laserbatch.pipeline.decoding.attention.interface import ATTENTION_NAME, slot_attention
from laserbatch.pipeline.decoding.engine import Engine

OTHER = "other host"
MODEL_PARTS = ("qkv", "attention", "attention output", "mlp", "lm_head", "other model")
HOST_PARTS = ("draft", "packing", "paths", "commit", OTHER)
PARTS = (*HOST_PARTS[:2], *MODEL_PARTS, "verification", *HOST_PARTS[2:])
_QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
_OUTPUT = ("o_proj", "out_proj", "dense")


class Spans:
    """Times of named parts without inner parts, summed over the counted steps.

    Parameters
    ----------
    device : spans wait for it if it is CUDA.

    `keeps` decides from a step's live sequences whether the step counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_steps = 0
        self.keeps: Callable[[list], bool] = lambda live: True
        self._waits = device.type == "cuda"
        self._device = device
        self._inner: list[float] = []  # for each open span, the time of its inner spans
        self._step: dict[str, float] = defaultdict(float)

    def timed(self, part: str, call: Callable) -> Callable:
        """The same call, with its time counted as `part`."""

        @functools.wraps(call)
        def wrapped(*args, **kwargs):
            start = self._now()
            self._inner.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                took = self._now() - start
                self._step[part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return wrapped

    def end_step(self, keep: bool) -> None:
        """Add the step's times to the sums, or drop them."""
        if keep:
            self.num_steps += 1
            for part, seconds in self._step.items():
                self.seconds[part] += seconds
        self._step.clear()

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@contextmanager
def watched(engine: Engine) -> Iterator[Spans]:
    """Watch an engine until the block ends."""
    spans = Spans(engine.device)
    undo: list[Callable[[], None]] = []

    def replace(owner, name: str, value: object) -> None:
        had = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, value)
        undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))

    def watch(owner, name: str, part: str) -> None:
        replace(owner, name, spans.timed(part, getattr(owner, name)))

    finish_step, are_kept = spans.timed(OTHER, engine.finish_step), []
    submit_step = spans.timed(OTHER, engine.submit_step)

    def submitted(stream):
        are_kept.append(spans.keeps(stream.scheduler.live))
        return submit_step(stream)

    def finished(*args):
        try:
            return finish_step(*args)
        finally:
            spans.end_step(are_kept.pop())

    watch(engine, "_trees", "draft")
    replace(engine, "submit_step", submitted)
    replace(engine, "finish_step", finished)
    watch(engine.runner, "forward", "packing")
    watch(engine.runner, "_run", "other model")
    buffered = engine.runner.buffered
    if buffered is not None:
        watch(buffered, "run", "other model")
        replace(buffered, "_captures", False)  # spans cannot wait within a capture, nor see the parts of a replay
    watch(engine_module, "verify", "paths")
    watch(acceptance_module, "judge_rows", "verification")
    watch(engine, "_update", "commit")
    replace(engine.runner, "fused", None)
    output_layer = engine.runner.model.get_output_embeddings()
    for name, module in engine.runner.model.named_modules():
        part = _part_of(name.rsplit(".", 1)[-1], module, module is output_layer)
        if part is not None:
            watch(module, "forward", part)
    AttentionInterface.register(ATTENTION_NAME, spans.timed("attention", slot_attention))
    undo.append(lambda: AttentionInterface.register(ATTENTION_NAME, slot_attention))
    try:
        yield spans
    finally:
        for restore in reversed(undo):
            restore()


def _part_of(name: str, module: torch.nn.Module, is_output_layer: bool) -> str | None:
    """The part to which a module's time counts; None: the part of the module around it."""
    if is_output_layer:
        return "lm_head"
    if name in _QKV:
        return "qkv"
    if name in _OUTPUT:
        return "attention output"
    return "mlp" if name == "mlp" else None
