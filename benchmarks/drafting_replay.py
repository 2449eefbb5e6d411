"""Replaying texts against any drafter, and what the replays say: acceptance with its intervals, times.

Knows no corpus, no pool and no peer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from drafting_corpora import Document

from laserbatch.retrieval_pools.calibration.replay import steps_along

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


class Drafter:
    """What is measured: drafts for one sequence at a time, whose tokens stand in `tokens[:length]`.

    `build_s` and `num_bytes` say what it took to have its pool in memory, or on disk where it lies there.
    """

    name: str
    build_s: float = 0.0
    num_bytes: int = 0

    def begin(self, document: Document) -> None:
        """Start a sequence: its prompt is known."""
        self.tokens = np.concatenate([document.prompt_ids, document.text_ids])
        self.num_prompt = self.length = len(document.prompt_ids)

    def draft(self, max_nodes: int) -> tuple[Sequence[int], Sequence[int]]:
        """Token ids and parents of at most `max_nodes` likely next tokens; parents come first, -1 is the context."""
        raise NotImplementedError

    def advance(self, num_tokens: int) -> None:
        """So many more tokens of the text are known."""
        self.length += num_tokens

    def end(self) -> None:
        """Forget the sequence: nothing of a held-out text stays behind."""


class Tree(NamedTuple):
    """A draft of any drafter: parents come first, -1 is the context."""

    token_ids: Sequence[int]
    parents: Sequence[int]


@dataclass(frozen=True)
class Replay:
    """Drafts along one text: microseconds, tokens drafted and tokens accepted of each."""

    draft_us: list[float]
    num_drafted: list[int]
    num_accepted: list[int]


def replay(drafter: Drafter, document: Document, max_nodes: int) -> Replay:
    """Draft along one text, as `retrieval_pools.calibration.replay` does.

    Only the draft is timed; what a drafter does to learn the prompt and the accepted tokens is not.
    """
    result = Replay([], [], [])
    num_tokens = len(document.text_ids)
    drafter.begin(document)
    for step in steps_along(document.text_ids, lambda _: Tree(*drafter.draft(max_nodes))):
        result.draft_us.append(step.draft_us)
        result.num_drafted.append(len(step.tree.token_ids))
        result.num_accepted.append(len(step.path))
        drafter.advance(min(len(step.path) + 1, num_tokens - step.position))
    drafter.end()
    return result


def mean_accepted(replays: Sequence[Replay]) -> float:
    """AAL: accepted draft tokens of a step, the bonus token not counted, over the steps of all texts."""
    accepted, steps = _per_text(replays)
    return float(accepted.sum() / steps.sum())


@dataclass(frozen=True)
class Interval:
    """A quantity with its bootstrap interval over texts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def accepted_interval(replays: Sequence[Replay], seed: int) -> Interval:
    """AAL, and where it may lie for other texts of the kind."""
    accepted, steps = _resampled(_per_text(replays), seed)
    return _interval(mean_accepted(replays), accepted / steps)


def accepted_ratio(replays: Sequence[Replay], peer: Sequence[Replay], seed: int) -> Interval:
    """AAL over a peer's on the same texts; both are resampled together."""
    own_accepted, own_steps = _resampled(_per_text(replays), seed)
    peer_accepted, peer_steps = _resampled(_per_text(peer), seed)
    peer_mean = mean_accepted(peer)
    value = mean_accepted(replays) / peer_mean if peer_mean else float("inf")
    with np.errstate(divide="ignore", invalid="ignore"):
        return _interval(value, (own_accepted / own_steps) / (peer_accepted / peer_steps))


def _per_text(replays: Sequence[Replay]) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens and steps of each text."""
    return (
        np.array([sum(one.num_accepted) for one in replays]),
        np.array([len(one.num_accepted) for one in replays]),
    )


def _resampled(per_text: tuple[np.ndarray, np.ndarray], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums over as many texts drawn with replacement: float64[NUM_RESAMPLES] each, the same draws for the same seed."""
    num_texts = len(per_text[0])
    chosen = np.random.default_rng(seed).integers(num_texts, size=(NUM_RESAMPLES, num_texts))
    return tuple(values[chosen].sum(axis=1).astype(float) for values in per_text)


def _interval(value: float, samples: np.ndarray) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    samples = samples[np.isfinite(samples)]
    low, high = np.quantile(samples, [tail, 1 - tail]) if len(samples) else (value, value)
    return Interval(value, float(low), float(high))
