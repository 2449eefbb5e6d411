"""What a worker asks of an engine, whoever computes texts."""

from collections.abc import Iterable, Iterator

from transformers import PreTrainedTokenizerBase

from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import ModelFigures
from laserbatch.retrieval_pools.step_cost import StepCost


class TextEngine:
    """A loaded model. What is not abstract here holds for engines of others: nothing is chosen by what steps cost."""

    tokenizer: PreTrainedTokenizerBase
    model: ModelFigures
    _num_forwards, _costliest_step_s = 0, 0.0

    @property
    def num_forwards(self) -> int:
        """Steps so far: who watches a worker sees by them that it goes on."""
        return self._num_forwards

    @property
    def costliest_step_s(self) -> float:
        return self._costliest_step_s

    @property
    def graph_counts(self) -> dict[str, int]:
        """Captures of CUDA graphs, failed captures, replayed and eager steps so far, by name; empty without graphs."""
        return {}

    def generate(
        self,
        side: Side,
        requests: Iterable[GenerationRequest],
        decoding: DecodingSettings,
        budget: Budget | None = None,
    ) -> Iterator[GenerationResult | GenerationFailure]:
        """Write the texts of all requests, as settings say, in any order; `budget` None is that of the settings."""
        raise NotImplementedError

    def warm_up(self, sides: Iterable[Side]) -> None:
        """Have code loaded, by texts that are thrown away."""

    def usual_tokens(self, side: Side) -> int | None:
        """A length that nearly no text of the side's pool exceeds; None where there is none."""
        return None

    def cached_step_cost(self) -> StepCost | None:
        """What steps cost here, as it was measured before; None where it was not."""
        return None

    def measured_step_cost(self, save: bool = True) -> StepCost:
        """What steps cost here, measured now; of workers that measure side by side one saves it."""
        raise AssertionError("no budget is chosen here")
