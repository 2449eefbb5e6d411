"""The interface of an engine to its worker, whichever program computes texts."""

from collections.abc import Iterable, Iterator

from transformers import PreTrainedTokenizerBase

from laserbatch.pipeline.decoding.sequence import GenerationRequest, Outcome
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import ModelFigures
from laserbatch.retrieval_pools.step_cost import StepCost


class TextEngine:
    """A loaded model. The methods with defaults fit engines for which no budget is chosen by the cost of steps."""

    tokenizer: PreTrainedTokenizerBase
    model: ModelFigures
    _num_forwards, _costliest_step_s = 0, 0.0

    def progress(self) -> tuple[int, float]:
        """The number of steps so far, by which a watcher sees that the worker goes on; seconds of the costliest one."""
        return self._num_forwards, self._costliest_step_s

    @property
    def graph_counts(self) -> dict[str, int]:
        """Captures of CUDA graphs, failed captures, replayed and eager steps so far, by name; empty without graphs."""
        return {}

    def generate(
        self, side: Side, requests: Iterable[GenerationRequest], decoding: DecodingSettings,
        budget: Budget | None = None,
    ) -> Iterator[Outcome]:  # fmt: skip
        """Write the texts of all requests by the settings, in any order; `budget` None: the settings' budget."""
        raise NotImplementedError

    def warm_up(self, sides: Iterable[Side]) -> None:
        """Load and compile code by writing texts that are discarded."""

    def usual_tokens(self, side: Side) -> int | None:
        """A number of tokens that nearly no text of the side's pool exceeds; None without such texts."""
        return None

    def cached_step_cost(self) -> StepCost | None:
        """The cost of steps here, as it was measured before; None if it was not."""
        return None

    def measured_step_cost(self, save: bool = True) -> StepCost:
        """Measure the cost of steps here; of workers that measure at the same time, only one saves it."""
        raise AssertionError("no budget is chosen here")
