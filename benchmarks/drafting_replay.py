"""Replaying texts against a drafter, and what the replays say: acceptance with its intervals, times.

A draft is compared with how the text really goes on, as a greedy verifier would whose model had written that text: the
longest path of the tree that agrees is accepted, one more token is the verifier's own (the bonus), and the next draft
starts behind it. Knows no corpus, no pool and no peer.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from drafting_corpora import Document

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


@dataclass(frozen=True)
class Replay:
    """Drafts along one text: microseconds, tokens drafted and tokens accepted of each."""

    draft_us: list[float]
    num_drafted: list[int]
    num_accepted: list[int]


def replay(drafter: Drafter, document: Document, max_nodes: int) -> Replay:
    """Draft along one text. Every step ends with a bonus token, the last one with the end token, which is not drafted.

    Only the draft is timed; what a drafter does to learn the prompt and the accepted tokens is not.
    """
    result = Replay([], [], [])
    truth = document.text_ids.tolist()
    drafter.begin(document)
    position = 0
    while position <= len(truth):
        start_ns = time.perf_counter_ns()
        token_ids, parents = drafter.draft(max_nodes)
        result.draft_us.append((time.perf_counter_ns() - start_ns) / 1e3)
        accepted = num_right(token_ids, parents, truth[position : position + max_nodes])
        result.num_drafted.append(len(token_ids))
        result.num_accepted.append(accepted)
        drafter.advance(min(accepted + 1, len(truth) - position))
        position += accepted + 1
    drafter.end()
    return result


def num_right(token_ids: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the longest path of a draft that the text really takes."""
    children = {}
    for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        children[int(parent), int(token)] = node
    node, depth = -1, 0
    for token in truth:
        if (node := children.get((node, int(token)))) is None:
            break
        depth += 1
    return depth


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
