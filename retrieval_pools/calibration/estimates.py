"""Counts of replays by text, and what they say of other texts of the kind: values with their bootstrap intervals.

Texts are resampled, not steps: the steps of a text are alike. All tallies of one `Bootstrap` are resampled by the same
draws, so that a ratio of two is paired text by text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laserbatch.retrieval_pools.calibration.replay import Replay

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A quantity with its 95 % bootstrap interval over texts."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: np.ndarray) -> "Estimate":
        """Of float64[1 + n]: what was measured, then what n resamples gave; those that are no number are left out."""
        resampled = samples[1:][np.isfinite(samples[1:])]
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(resampled, [tail, 1 - tail]) if len(resampled) else (samples[0], samples[0])
        return cls(float(samples[0]), float(low), float(high))


@dataclass(frozen=True)
class Tally:
    """Counts of replays by text, float64[num_texts] each; sums over resampled texts have the same form.

    Attributes
    ----------
    num_steps : verify steps, the one that only ends the text among them.
    num_drafted, num_accepted : draft tokens, and those of them that the text goes along.
    """

    num_steps: np.ndarray
    num_drafted: np.ndarray
    num_accepted: np.ndarray

    @classmethod
    def of(cls, replays: Sequence[Replay]) -> "Tally":
        """Of one replay a text."""
        return cls(
            np.array([one.num_steps for one in replays], float),
            np.array([sum(one.num_drafted) for one in replays], float),
            np.array([sum(one.num_accepted) for one in replays], float),
        )

    def __len__(self) -> int:
        return len(self.num_steps)

    @property
    def mean_drafted(self) -> np.ndarray:
        """Draft tokens of a step."""
        return self.num_drafted / self.num_steps

    @property
    def tokens_per_step(self) -> np.ndarray:
        """What a text grows by in a step, bonus token included; 1 is plain decoding."""
        return 1 + self.num_accepted / self.num_steps


class Bootstrap:
    """Draws with replacement from `num_texts` texts, at least 1; the same for the same seed."""

    def __init__(self, num_texts: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        draws = generator.multinomial(num_texts, np.full(num_texts, 1 / num_texts), NUM_RESAMPLES)
        self._weights = np.vstack([np.ones(num_texts), draws])  # (1 + NUM_RESAMPLES, num_texts)

    def totals(self, values: np.ndarray) -> np.ndarray:
        """Sum of a value of each text, then over each draw of texts: float64[1 + NUM_RESAMPLES]."""
        return self._weights @ values

    def sums(self, tally: Tally) -> Tally:
        """The same of every count of a tally."""
        return Tally(*map(self.totals, (tally.num_steps, tally.num_drafted, tally.num_accepted)))
