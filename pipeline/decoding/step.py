"""A step under way, and the stream of texts that it belongs to."""

from collections.abc import Callable
from dataclasses import dataclass

from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.drafters.drafter import Drafter
from laserbatch.pipeline.decoding.model.runner import StepOutput
from laserbatch.pipeline.decoding.requests import StepEvent
from laserbatch.pipeline.decoding.scheduler import Scheduler
from laserbatch.pipeline.decoding.sequence import Sequence
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers.verifier import Verifier


@dataclass(frozen=True)
class Stream:
    """One call of `Engine.generate`: who is live, and how they draft and verify."""

    scheduler: Scheduler
    drafter: Drafter
    verifier: Verifier
    budget: Budget
    on_event: Callable[[StepEvent], None] | None


@dataclass
class Step:
    """What each of some sequences adds to a forward; then its output, or the error of it.

    `number` : of the forward, among all of the engine.
    """

    sequences: list[Sequence]
    feeds: list[Feed]
    trees: TreeBatch
    output: StepOutput | None = None
    error: Exception | None = None
    number: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.trees) + sum(len(feed.chain_ids) for feed in self.feeds)
