"""Sampling at a temperature as an argmax: each token's logit gets its own Gumbel noise, and the largest is the sample.

The noise is a function of the text's seed, the position and the token, whatever is drafted and whatever shares the
batch. So greedy verification of drafts writes exactly the text that plain sampling writes. A drafted token is accepted
with the probability that the model gives it, as often as by any rule (Gumbel-max trick, Maddison et al. 2014; for
drafts without probabilities, SpecInfer's multi-round rejection accepts as often).
"""

from collections.abc import Sequence

import numpy as np
import torch

from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.model.output_head import StepLogits
from laserbatch.pipeline.decoding.token_tree import TreeBatch

MAX_NOISE_BYTES = 64 << 20  # of a temporary array; for 1,024 rows of 128,000 tokens at once there would be five of 1 GB
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64, as int64


class SampledLogits:
    """The rows of a step, each with its own noise, so that its argmax is a sample of its softmax at a temperature.

    `seeds`, `lengths` : the seed of each sequence, and the number of tokens of its context.

    Each sequence has a row after its last committed token, then one after each node of its tree.
    """

    def __init__(
        self,
        temperature: float,
        rows: StepLogits,
        seeds: Sequence[int],
        lengths: Sequence[int],
        trees: TreeBatch,
    ) -> None:
        self._temperature, self._rows = temperature, rows
        self.device, self.num_rows = rows.device, rows.num_rows
        self._seeds, positions = (
            np.repeat(np.asarray(values, np.int64), trees.sizes + 1) for values in (seeds, lengths)
        )
        positions[np.arange(len(trees)) + trees.tree_of + 1] += trees.depths
        self._positions = positions

    @torch.inference_mode()
    def of(self, rows: np.ndarray) -> torch.Tensor:
        """Logits of some rows, int64[n], over the temperature and with noise: float32 (n, vocab_size)."""
        logits = self._rows.of(rows).float() / self._temperature
        seeds, positions = self._seeds_and_positions(rows)
        return logits + gumbel_noise(seeds, positions, logits.shape[-1])

    def _seeds_and_positions(self, rows: np.ndarray) -> torch.Tensor:
        """Seeds and positions of some rows, int64[n]: int64 (2, n)."""
        return to_device(np.stack((self._seeds[rows], self._positions[rows])), self.device)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel numbers by seed and position, int64[n] each, and token: float32 (n, vocab_size)."""
    noise = torch.empty((len(seeds), vocab_size), device=seeds.device)
    tokens = torch.arange(1, vocab_size + 1, device=seeds.device)
    num_rows = max(1, MAX_NOISE_BYTES // (vocab_size * torch.float64.itemsize))
    for part in (slice(first, first + num_rows) for first in range(0, len(seeds), num_rows)):
        noise[part] = -torch.log(-torch.log(uniform(seeds[part], positions[part], tokens)))
    return noise


def uniform(seeds: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Values strictly between 0 and 1, by seed and position, int64[n] each, and number: float64 (n, len(numbers))."""
    rows = _scrambled(_scrambled(seeds) + positions * _GOLDEN)
    bits = _scrambled(rows[:, None] + numbers * _GOLDEN)
    return ((bits >> 11 & (1 << 53) - 1).double() + 0.5) / (1 << 53)


def _scrambled(values: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser (Steele et al. 2014): int64, which wraps around."""
    values = (values ^ (values >> 30 & (1 << 34) - 1)) * _FIRST
    values = (values ^ (values >> 27 & (1 << 37) - 1)) * _SECOND
    return values ^ (values >> 31 & (1 << 33) - 1)
