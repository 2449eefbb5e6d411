"""What a verify step costs, by its packed tokens: measured here, or elsewhere and read from a file."""

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, ValidationError, model_validator

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.validation import Strict, explain, read_yaml

if TYPE_CHECKING:  # the engine reads costs; it need not load what replays
    from laserbatch.retrieval_pools.calibration.replay import Tally

EXAMPLE = (
    "steps: [{batch_size: 16, num_tokens: 16, seconds: 0.0043}, {batch_size: 16, num_tokens: 256, seconds: 0.0064}]"
)
MAX_AGE_DAYS = 30  # drivers, kernels and neighbours change
ROUNDING = 1e-6  # of a mean number of tokens, which must not lift a step to the next size


class StepPoint(Strict):
    """One measured step."""

    batch_size: int = Field(ge=1, description="Sequences in the step.")
    num_tokens: int = Field(ge=1, description="Packed tokens, the drafts of all sequences among them.")
    seconds: float = Field(gt=0, description="Duration of the whole step.")


class DraftCost(Strict):
    """What drafting takes beside the step that verifies: of one call for all its sequences."""

    seconds_per_step: float = Field(0.0, ge=0, description="Of the call itself, however many sequences it is for.")
    seconds: float = Field(0.0, ge=0, description="Of each sequence, for a draft that finds nothing.")
    seconds_per_token: float = Field(0.0, ge=0, description="Of each draft token.")


class StepCost(Strict):
    """Step durations by batch size and packed tokens: linear between points, flat before the first, and going on.

    Where the engine pads steps, a step costs what one of the size that it is padded to costs.
    """

    name: str = Field("step cost of a file", description="What was measured: shown beside every figure.")
    steps: tuple[StepPoint, ...] = Field(min_length=1, description="At least two points of each batch size.")
    padded_to: tuple[int, ...] = Field(
        (), description="Ascending numbers of tokens to which the engine pads a step; a larger step is not padded."
    )
    draft: DraftCost = Field(DraftCost(), description="Of drafting; nothing where it was not measured.")
    measured_on: datetime.date | None = Field(None, description="The day of the measurement.")

    @model_validator(mode="after")
    def _is_a_curve(self) -> "StepCost":
        for batch_size in self.batch_sizes:
            points = self._points(batch_size)
            numbers = [point.num_tokens for point in points]
            if len(points) < 2:
                raise ValueError(f"batch_size {batch_size} has one point; expected two or more")
            if len(set(numbers)) < len(numbers):
                raise ValueError(f"batch_size {batch_size} has two points of the same num_tokens; give their mean")
        return self

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Those that have a curve, ascending."""
        return tuple(sorted({point.batch_size for point in self.steps}))

    def seconds(self, batch_size: int, num_tokens: np.ndarray) -> np.ndarray:
        """Duration of steps of so many packed tokens; raises ConfigError where the batch size was not measured."""
        return self._on_curve(batch_size, self._padded(np.asarray(num_tokens, float)))

    def _padded(self, num_tokens: np.ndarray) -> np.ndarray:
        """The sizes to which steps are padded."""
        if not self.padded_to:
            return num_tokens
        place = np.searchsorted(self.padded_to, num_tokens - ROUNDING)
        sizes = np.array(self.padded_to, float)
        return np.where(place < len(sizes), sizes[np.minimum(place, len(sizes) - 1)], num_tokens)

    def _on_curve(self, batch_size: int, num_tokens: np.ndarray) -> np.ndarray:
        """Duration of steps that are not padded any more."""
        points = self._points(batch_size)
        if not points:
            known = ", ".join(map(str, self.batch_sizes))
            raise ConfigError(
                f"the step cost {self.name!r} has no batch size {batch_size}; it has {known}. Measure it."
            )
        x = np.array([point.num_tokens for point in points], float)
        y = np.array([point.seconds for point in points])
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.interp(num_tokens, x, y) + max(slope, 0.0) * np.maximum(num_tokens - x[-1], 0.0)

    def tokens_per_s(self, batch_size: int, sums: "Tally") -> np.ndarray:
        """Tokens written a second by a full batch; prompts are not counted, only the steps that write."""
        num_tokens = batch_size * (1 + sums.mean_drafted)
        seconds = self.seconds(batch_size, num_tokens) + self.draft_seconds(batch_size, sums.mean_drafted)
        return batch_size * sums.tokens_per_step / seconds

    def text_seconds(self, batch_size: int, num_steps: float, num_drafted: float, num_prompt_tokens: float) -> float:
        """Seconds of a full batch that a text takes its share of, by counts that no load changes.

        Tokens of its prompt count as further ones of the largest step that was measured.
        """
        drafted = num_drafted / max(num_steps, 1)
        tokens = np.array([batch_size * (1 + drafted)])
        step = self.seconds(batch_size, tokens)[0] + self.draft_seconds(batch_size, drafted) * (num_drafted > 0)
        most = max(point.num_tokens for point in self._points(batch_size))
        of_token = np.diff(self._on_curve(batch_size, np.array([most, most + 1])))[0]
        return float(num_steps * step / batch_size + num_prompt_tokens * of_token)

    def draft_seconds(self, batch_size: int, mean_drafted: np.ndarray) -> np.ndarray:
        """Seconds that drafting adds to a step, by draft tokens a sequence."""
        of_one = self.draft.seconds + self.draft.seconds_per_token * np.asarray(mean_drafted)
        return self.draft.seconds_per_step + batch_size * of_one

    def plain_seconds(self, batch_size: int) -> float:
        """Duration of a step of a full batch without drafts."""
        return float(self.seconds(batch_size, np.array([batch_size]))[0])

    def _points(self, batch_size: int) -> list[StepPoint]:
        points = [point for point in self.steps if point.batch_size == batch_size]
        return sorted(points, key=lambda point: point.num_tokens)


def read_step_cost(path: Path) -> StepCost:
    """A step cost from YAML or JSON.

    Raises ConfigError: the file is not there, is neither, or does not hold what `StepCost` describes.
    """
    data = read_yaml(path, "step cost", f"expected such as `{EXAMPLE}`")
    try:
        return StepCost.model_validate(data)
    except ValidationError as error:
        found = explain(error, StepCost)
        raise ConfigError(f"{path} is not a step cost: {found}. Expected such as `{EXAMPLE}`") from None
