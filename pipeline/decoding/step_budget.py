"""Chooses the draft nodes that each step verifies, under greedy verification, for the most tokens per second.

Texts then do not depend on the drafts, so the choice may depend on the number of live sequences: a lone sequence gets a
large tree, one of many a small tree. All nodes of a step are ranked together by estimated acceptance. As many are
admitted as give the most tokens per second by the measured cost of steps. The accuracy of the estimates is learned from
the stream itself, for each source.
"""

from collections.abc import Sequence

import numpy as np

from laserbatch.pipeline.decoding.acceptance import Acceptance
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.retrieval_pools.sources import NUM_SOURCES
from laserbatch.retrieval_pools.step_cost import StepCost

PRIOR_TOKENS = 16.0  # weight of the prior that a source's estimates are right, in expected accepted tokens
MEMORY = 0.99  # decay of the counts per step, so that a source that was given up is tried again
MAX_TRUST = 2.0  # estimates are raised by this factor at most


class StepBudget:
    def __init__(self, step_cost: StepCost) -> None:
        self._step_cost = step_cost
        self._expected, self._accepted = np.zeros(NUM_SOURCES), np.zeros(NUM_SOURCES)

    @property
    def trust(self) -> np.ndarray:
        """Ratio of accepted to expected tokens of each source, drawn towards 1: float64[NUM_SOURCES]."""
        return np.minimum((self._accepted + PRIOR_TOKENS) / (self._expected + PRIOR_TOKENS), MAX_TRUST)

    def admit(self, trees: TreeBatch, num_sequences: int, num_context_tokens: float) -> TreeBatch:
        """The part of a step's trees that is worth its time; `num_sequences` sequences write a token each anyway.

        `num_context_tokens` is the mean length of these sequences, prompts included.
        """
        if len(trees) == 0:
            return trees
        probability = np.exp(trees.log_acceptance.astype(np.float64)) * self.trust[trees.source]
        # A node's value is at most its ancestors', so that parents rank first. `fmin` ignores the NaN above roots.
        probability = trees.scan_from_root(np.fmin, np.minimum(probability, 1.0))
        order = np.argsort(-probability, kind="stable")
        num_written = num_sequences + np.concatenate(([0.0], np.cumsum(probability[order])))
        seconds = self._step_cost.seconds_between(num_sequences, np.arange(len(trees) + 1), num_context_tokens)
        keep = np.zeros(len(trees), bool)
        keep[order[: int(np.argmax(num_written / seconds))]] = True
        return trees.select(keep)

    def observe(self, trees: TreeBatch, accepted: Sequence[Acceptance | None]) -> None:
        """Learn from a verified step how accurate the estimates are."""
        self._expected *= MEMORY
        self._accepted *= MEMORY
        if len(trees):
            expected = np.exp(trees.log_acceptance.astype(np.float64))
            self._expected += np.bincount(trees.source, expected, NUM_SOURCES)
            paths = zip(trees.starts.tolist(), accepted, strict=True)
            nodes = np.concatenate(
                [start + acceptance.nodes for start, acceptance in paths if acceptance is not None] or [[]]
            )
            self._accepted += np.bincount(trees.source[nodes.astype(np.int64)], minlength=NUM_SOURCES)
