"""The measured cost of a verify step in an engine, by its number of sequences and of packed tokens."""

import datetime
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, Field, model_validator

from laserbatch.retrieval_pools.errors import PoolError

ROUNDING = 1e-6  # rounding error of a mean number of tokens; it must not pad a step to the next size
MIN_SHARE = 0.1  # share of a step's duration that remains however short its contexts are

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepPoint(BaseModel, frozen=True, extra="forbid"):
    batch_size: int = Field(ge=1, description="Sequences in the step.")
    num_tokens: int = Field(ge=1, description="Packed tokens, including the drafts of all sequences.")
    seconds: float = Field(gt=0, allow_inf_nan=False, description="Duration of the whole step.")


class DraftCost(BaseModel, frozen=True, extra="forbid"):
    """Duration of the one call that drafts for all sequences of a step; it adds to the duration of the verify step."""

    seconds_per_step: Amount = Field(
        default=0.0, description="Duration of the call itself, for any number of sequences."
    )
    seconds: Amount = Field(default=0.0, description="Added by each sequence, even if its draft is empty.")
    seconds_per_token: Amount = Field(default=0.0, description="Added by each draft token.")


class StepCost(BaseModel, frozen=True, extra="forbid"):
    """Step durations by batch size and packed tokens: linear between points and beyond the last, flat before the first.

    Where the engine pads steps, a step costs as much as a step of the padded size.
    """

    name: str = Field(default="step cost of a file", description="What was measured; shown next to every figure.")
    model_id: str | None = Field(default=None, description="The model that was measured, as records of texts name it.")
    steps: tuple[StepPoint, ...] = Field(min_length=1, description="At least two points of each batch size.")
    padded_to: tuple[int, ...] = Field(
        default=(),
        description="Ascending numbers of tokens to which the engine pads a step; a larger step is not padded.",
    )
    draft: DraftCost = Field(default=DraftCost(), description="Cost of drafting; zero where it was not measured.")
    context_tokens: Amount = Field(
        default=0.0, description="Tokens of each text and its prompt before a measured step."
    )
    seconds_per_context_token: Amount = Field(
        default=0.0, description="Added to a step by each further context token of a text."
    )
    seconds_per_draft_context_token: Amount = Field(
        default=0.0,
        description="Added for each pair of a draft token and a further context token, which it attends to.",
    )
    measured_on: datetime.date | None = Field(default=None, description="The day of the measurement.")

    @model_validator(mode="after")
    def _is_a_curve(self) -> "StepCost":
        for batch_size, (num_tokens, _) in self._curves.items():
            if len(num_tokens) < 2:
                raise ValueError(f"batch_size {batch_size} has one point; expected two or more")
            if (np.diff(num_tokens) == 0).any():
                raise ValueError(f"batch_size {batch_size} has two points of the same num_tokens; give their mean")
        return self

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The measured batch sizes, ascending."""
        return tuple(self._curves)

    def seconds(self, batch_size: int, num_tokens: np.ndarray) -> np.ndarray:
        """Duration of steps of `num_tokens` packed tokens; raises PoolError if the batch size was not measured."""
        num_tokens, sizes = np.asarray(num_tokens, float), np.array([*self.padded_to, np.inf])
        padded = sizes[np.searchsorted(sizes, num_tokens - ROUNDING)]
        return self._on_curve(batch_size, np.where(np.isfinite(padded), padded, num_tokens))

    def at_context(self, num_tokens: float) -> "StepCost":
        """The step cost for texts that have `num_tokens` tokens, prompts included."""
        steps = []
        for step in self.steps:
            num_drafted = np.array(step.num_tokens - step.batch_size)
            seconds = self._moved(np.array(step.seconds), step.batch_size, num_drafted, num_tokens)
            steps.append(step.model_copy(update={"seconds": float(seconds)}))
        return StepCost(**dict(self) | {"steps": tuple(steps), "context_tokens": num_tokens})

    def seconds_between(
        self, batch_size: int, num_drafted: np.ndarray, num_context_tokens: float | None = None
    ) -> np.ndarray:
        """Duration of steps with `num_drafted` draft tokens in all, interpolated between the measured batch sizes.

        A batch size outside the measured range costs as much as the nearest measured one with the same number of draft
        tokens per sequence. `num_context_tokens` is the length of each text; by default its length in the measurement.
        """
        sizes = self.batch_sizes
        above = int(np.searchsorted(sizes, batch_size))
        low, high = (sizes[place] for place in np.clip([above - 1, above], 0, len(sizes) - 1))
        share = 0.0 if low == high else (batch_size - low) / (high - low)
        low_s, high_s = (self.seconds(size, size * (1 + num_drafted / batch_size)) for size in (low, high))
        seconds = (1 - share) * low_s + share * high_s
        if num_context_tokens is None:
            return seconds
        return self._moved(seconds, batch_size, num_drafted, num_context_tokens)

    def text_seconds(self, batch_size: int, num_steps: float, num_drafted: float, num_prompt_tokens: float) -> float:
        """A text's share of the seconds of full batches, computed from counts, which no load of the machine changes.

        Each token of its prompt costs as much as a further token in the largest measured step.
        """
        drafted = num_drafted / max(num_steps, 1)
        tokens = np.array([batch_size * (1 + drafted)])
        step = self.seconds(batch_size, tokens)[0] + self.draft_seconds(batch_size, drafted) * (num_drafted > 0)
        most = self._curve(batch_size)[0][-1]
        token_s = np.diff(self._on_curve(batch_size, np.array([most, most + 1])))[0]
        return float(num_steps * step / batch_size + num_prompt_tokens * token_s)

    def draft_seconds(self, batch_size: int, mean_drafted: ArrayLike) -> np.ndarray:
        """Seconds that drafting adds to a step, by the mean number of draft tokens per sequence."""
        sequence_s = self.draft.seconds + self.draft.seconds_per_token * np.asarray(mean_drafted)
        return self.draft.seconds_per_step + batch_size * sequence_s

    def plain_seconds(self, batch_size: int) -> float:
        """Duration of a step of a full batch without drafts."""
        return float(self.seconds(batch_size, np.array([batch_size]))[0])

    def _moved(
        self, seconds: np.ndarray, batch_size: int, num_drafted: np.ndarray, num_context_tokens: float
    ) -> np.ndarray:
        """The duration of steps whose texts have `num_context_tokens` tokens, not the measured `context_tokens`."""
        token_s = self.seconds_per_context_token * batch_size + self.seconds_per_draft_context_token * num_drafted
        added_s = token_s * (num_context_tokens - self.context_tokens)
        return np.maximum(seconds + added_s, MIN_SHARE * seconds)

    def _on_curve(self, batch_size: int, num_tokens: np.ndarray) -> np.ndarray:
        """Duration of steps, where `num_tokens` includes the padding."""
        x, y = self._curve(batch_size)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.interp(num_tokens, x, y) + max(slope, 0.0) * np.maximum(num_tokens - x[-1], 0.0)

    def _curve(self, batch_size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if batch_size not in self._curves:
            sizes = ", ".join(map(str, self.batch_sizes))
            advice = "Use one of these, or measure the cost at this batch size too."
            raise PoolError(f"the step cost {self.name!r} has no batch size {batch_size}; it has {sizes}. {advice}")
        return self._curves[batch_size]

    @cached_property
    def _curves(self) -> dict[int, tuple[tuple[float, ...], tuple[float, ...]]]:
        """Packed tokens and seconds of the points of each batch size, sorted by packed tokens."""
        points = sorted((step.batch_size, step.num_tokens, step.seconds) for step in self.steps)
        by_size = {size: [point[1:] for point in points if point[0] == size] for size, _, _ in points}
        return {size: (x, y) for size, rows in by_size.items() for x, y in [zip(*rows, strict=True)]}
