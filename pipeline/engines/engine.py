"""What a worker asks of an engine, whoever computes texts."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import ModelFigures
from laserbatch.retrieval_pools.step_cost import StepCost


class TextEngine(Protocol):
    """A loaded model that drafts from the night's pools."""

    tokenizer: PreTrainedTokenizerBase
    model: ModelFigures

    @property
    def num_forwards(self) -> int:
        """Steps so far: who watches a worker sees by them that it goes on."""
        ...

    @property
    def costliest_step_s(self) -> float: ...

    @property
    def graph_counts(self) -> dict[str, int]:
        """Captures of CUDA graphs, failed captures, replayed and eager steps so far, by name; empty without graphs."""
        ...

    def generate(
        self,
        side: Side,
        requests: Iterable[GenerationRequest],
        decoding: DecodingSettings,
        budget: Budget | None = None,
    ) -> Iterator[GenerationResult | GenerationFailure]:
        """Write the texts of all requests, as settings say, in any order; `budget` None is that of the settings."""
        ...

    def warm_up(self, sides: Iterable[Side]) -> None:
        """Have code loaded, by texts that are thrown away."""
        ...

    def usual_tokens(self, side: Side) -> int | None:
        """A length that nearly no text of the side's pool exceeds; None where there is none."""
        ...

    def cached_step_cost(self) -> StepCost | None:
        """What steps cost here, as it was measured before; None where it was not."""
        ...

    def measured_step_cost(self, save: bool = True) -> StepCost:
        """What steps cost here, measured now; of workers that measure side by side one saves it."""
        ...


class ExternalEngine:
    """What the engines share that are not ours: they are loaded by others, and nothing is chosen by what steps cost."""

    num_forwards, costliest_step_s = 0, 0.0

    @property
    def graph_counts(self) -> dict[str, int]:
        return {}

    def warm_up(self, sides: Iterable[Side]) -> None:
        """It is warm once it is loaded."""

    def usual_tokens(self, side: Side) -> None:
        return None  # nothing runs on under greedy verification that plain decoding would not

    def cached_step_cost(self) -> StepCost | None:
        return None

    def measured_step_cost(self, save: bool = True) -> StepCost:
        raise AssertionError("no budget is chosen here")
