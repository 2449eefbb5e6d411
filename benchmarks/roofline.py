"""The least time that a run of the engine could take on this device: the roofline, from rates measured beside it.

A forward must read every weight and the KV cache of its sequences, and multiply each of its tokens with the weights;
it cannot be faster than the slower of the two. Rates are of a copy of memory and of a product of two large matrices.
What is neither (attention's own products, activations, launches, sampling, drafting) has no share in the least time.
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
USED_SHARE = 16  # of a widened model's channels one in so many is not zero, and zeros are multiplied at a higher clock


@dataclass(frozen=True)
class DeviceRates:
    """Bytes a second of memory, read and written counted, and floating point operations a second of a product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass
class Roofline:
    """Sums over the forwards of a run.

    Parameters
    ----------
    rates : of the device.
    num_body_weights, num_head_weights : that each token meets; that each wanted row of logits meets.
    weight_bytes, bytes_per_token : read in every forward; of the KV cache.
    """

    rates: DeviceRates
    num_body_weights: int
    num_head_weights: int
    weight_bytes: int
    bytes_per_token: int
    seconds: float = 0.0

    @classmethod
    def of_engine(cls, engine: Engine, rates: DeviceRates) -> "Roofline":
        """For an engine's model; embeddings are looked up, which costs next to nothing."""
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

        def watched(feeds, trees):
            output = forward(feeds, trees)
            self.add(len(output.batch), output.rows.num_rows, int(output.batch.num_committed.sum()))
            return output

        engine.runner.forward = watched
        try:
            yield
        finally:
            del engine.runner.forward  # the method of its class again


class WatchedPlain:
    """Plain decoding by an engine, whose share of the roofline is kept for every run.

    Attributes
    ----------
    shares : least time over real time.
    """

    def __init__(self, engine: Engine, rates: DeviceRates) -> None:
        self._engine, self._rates, self._system = engine, rates, EngineSystem.plain(engine)
        self.shares: list[float] = []

    def run(self, prompts: Sequence[np.ndarray], batch: int, max_new_tokens: int) -> Pass:
        """The system's own run."""
        roofline = Roofline.of_engine(self._engine, self._rates)
        with roofline.watching(self._engine):
            run = self._system.run(prompts, batch, max_new_tokens)
        self.shares.append(roofline.seconds / run.wall_s)
        return run


def measure_device(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Rates of this device now; the fastest of a few tries."""
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
