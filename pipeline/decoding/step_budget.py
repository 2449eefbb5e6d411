"""Under greedy verification: how much of a step's drafts is verified, chosen at every step for most tokens a second.

Texts then do not depend on what is drafted, so the choice may depend on how many of them are live: alone a text gets a
large tree, beside others a small one. All nodes of a step are ranked together by estimated acceptance, and as many are
admitted as give the most tokens for their time, by the measured cost of steps. How far estimates hold is learned from
the stream itself, for each source.
"""

from collections.abc import Sequence

import numpy as np

from laserbatch.pipeline.decoding.acceptance import Acceptance
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.retrieval_pools.sources import NUM_SOURCES
from laserbatch.retrieval_pools.step_cost import StepCost

PRIOR_TOKENS = 16.0  # expected acceptances that weigh as much as the belief that a source's estimates are right
MEMORY = 0.99  # of what was seen of a source, from one step to the next: what was given up is tried again
MAX_TRUST = 2.0  # estimates are never taken for more times too low


class StepBudget:
    def __init__(self, step_cost: StepCost) -> None:
        self._step_cost = step_cost
        self._expected, self._accepted = np.zeros(NUM_SOURCES), np.zeros(NUM_SOURCES)

    @property
    def trust(self) -> np.ndarray:
        """Accepted tokens of each source over those expected: float64[NUM_SOURCES]."""
        return np.minimum((self._accepted + PRIOR_TOKENS) / (self._expected + PRIOR_TOKENS), MAX_TRUST)

    def admit(self, trees: TreeBatch, num_sequences: int, num_context_tokens: float) -> TreeBatch:
        """The part of a step's trees that is worth its time, beside so many sequences that write a token each.

        `num_context_tokens` are the mean tokens of a sequence and its prompt.
        """
        if len(trees) == 0:
            return trees
        probability = np.exp(trees.log_acceptance.astype(np.float64)) * self.trust[trees.source]
        # A node is worth no more than those above it, so that parents rank first. `fmin` knows no bound above a root.
        probability = trees.scan_from_root(np.fmin, np.minimum(probability, 1.0))
        order = np.argsort(-probability, kind="stable")
        num_written = num_sequences + np.concatenate(([0.0], np.cumsum(probability[order])))
        seconds = self._step_cost.seconds_between(num_sequences, np.arange(len(trees) + 1), num_context_tokens)
        keep = np.zeros(len(trees), bool)
        keep[order[: int(np.argmax(num_written / seconds))]] = True
        return trees.select(keep)

    def observe(self, trees: TreeBatch, accepted: Sequence[Acceptance | None]) -> None:
        """Learn from a verified step how far estimates hold."""
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
