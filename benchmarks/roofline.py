"""The roofline: the least time that a run of the engine could take on this device, from rates measured in the same run.

A forward must read every weight and the KV cache of its sequences, and multiply each of its tokens with the weights;
it cannot be faster than the slower of the two. Rates are measured on a copy of memory and a product of two large
matrices. The least time excludes all else: attention's own products, activations, launches, sampling, drafting.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from systems import EngineSystem, Pass

from laserbatch.pipeline.decoding.engine import Engine

NUM_TIMES = 7
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}
MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
USED_SHARE = 16  # one in 16 channels of a widened model is not zero; devices multiply zeros at a higher clock


@dataclass(frozen=True)
class DeviceRates:
    """Memory bytes per second, reads and writes counted, and floating point operations per second of a product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass
class Roofline:
    """Sums the least seconds of the forwards of a run.

    Parameters
    ----------
    rates : the rates of the device.
    num_body_weights, num_head_weights : weights that multiply each token; weights that multiply each row of logits.
    weight_bytes, bytes_per_token : bytes of weights read in every forward; bytes of a token in the KV cache.
    """

    rates: DeviceRates
    num_body_weights: int
    num_head_weights: int
    weight_bytes: int
    bytes_per_token: int
    seconds: float = 0.0

    @classmethod
    def of_engine(cls, engine: Engine, rates: DeviceRates) -> "Roofline":
        """The roofline of an engine's model; input embeddings are not counted, since a look-up costs almost nothing."""
        model = engine.runner.model
        head = model.get_output_embeddings().weight
        embeddings = model.get_input_embeddings().weight
        num_all = sum(parameter.numel() for parameter in model.parameters())
        num_body = num_all - embeddings.numel() - (0 if head is embeddings else head.numel())
        num_bytes = (num_body + head.numel()) * head.element_size()
        return cls(rates, num_body, head.numel(), num_bytes, engine.loaded.bytes_per_token)

    def add(self, num_tokens: int, num_logits: int, num_cached: int) -> None:
        """Count a forward of `num_tokens`, `num_logits` of them with logits, over `num_cached` cached ones."""
        num_bytes = self.weight_bytes + num_cached * self.bytes_per_token
        num_flops = 2 * (num_tokens * self.num_body_weights + num_logits * self.num_head_weights)
        self.seconds += max(num_bytes / self.rates.bytes_per_s, num_flops / self.rates.flops_per_s)

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Count the engine's forwards within the block."""
        forward = engine.runner.forward

        def watched(feeds, trees=None):
            output = forward(feeds, trees)
            self.add(len(output.batch), output.rows.num_rows, int(output.batch.num_committed.sum()))
            return output

        engine.runner.forward = watched
        try:
            yield
        finally:
            del engine.runner.forward  # back to the method of its class


class WatchedPlain:
    """Plain decoding by an engine, which records its share of the roofline in every run.

    Attributes
    ----------
    shares : least time over real time, for each run.
    """

    def __init__(self, engine: Engine, rates: DeviceRates) -> None:
        self._engine, self._rates, self._system = engine, rates, EngineSystem.plain(engine)
        self.shares: list[float] = []

    def run(self, prompts: Sequence[np.ndarray], batch: int, max_new_tokens: int) -> Pass:
        """Run the system and record its share."""
        roofline = Roofline.of_engine(self._engine, self._rates)
        with roofline.watching(self._engine):
            run = self._system.run(prompts, batch, max_new_tokens)
        self.shares.append(roofline.seconds / run.wall_s)
        return run


def measure_device(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Measure the rates of this device: the fastest of a few tries."""
    return DeviceRates(_copied_bytes_per_s(device), _product_flops_per_s(device, dtype))


def _copied_bytes_per_s(device: torch.device) -> float:
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _fastest(lambda: target.copy_(source), device)


def _product_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    size = MATRIX_SIZE[device.type]
    left, right = (torch.zeros(size, size, dtype=dtype, device=device) for _ in range(2))
    used = size // USED_SHARE
    left[:, :used].normal_()
    right[:used, :used].normal_()
    return 2 * size**3 / _fastest(lambda: left @ right, device)


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(NUM_TIMES):
        _wait(device)
        start_s = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
