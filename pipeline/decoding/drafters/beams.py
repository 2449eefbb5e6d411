"""The likeliest continuations by a small model: a chain, or a tree of the best branches at every depth."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.drafters.growing import DraftModel, GrowingTrees
from laserbatch.pipeline.decoding.model.sampling import gumbel_noise
from laserbatch.pipeline.decoding.sequence import Sequence
from laserbatch.pipeline.decoding.token_tree import TreeBatch


@dataclass(frozen=True)
class Beams:
    """`width` tokens a depth, `length` depths deep, those with the likeliest paths; one model's.

    Where texts are sampled the drafts' probabilities have the noise of the target's own tokens, so that models that
    agree draw alike (Daliri et al. 2024, section 3: the draft and the target then agree with probability
    (1 - TV) / (1 + TV) at least), and texts do not depend on the draft.
    """

    width: int
    length: int

    def grow(self, models: SequenceOf[DraftModel], sequences: list[Sequence], temperature: float) -> TreeBatch:
        trees = GrowingTrees(len(sequences))
        tree_of, places = np.arange(len(sequences)), np.full(len(sequences), -1)
        path = np.zeros(len(sequences))
        for depth in range(self.length):
            if len(tree_of) == 0:  # nothing more is likely
                break
            log_q = models[0].log_q(trees.batch(), tree_of, places)
            if temperature:
                log_q = torch.log_softmax(log_q / temperature + self._noise(sequences, tree_of, depth, log_q), -1)
            values, tokens = (found.cpu().numpy() for found in log_q.topk(min(self.width, log_q.shape[-1]), -1))
            scores = path[:, None] + models[0].log_acceptance(depth, values)
            chosen = best_of_trees(tree_of, scores, self.width)
            parents = chosen // scores.shape[1]
            path, new = scores.ravel()[chosen], tokens.ravel()[chosen]
            tree_of, above = tree_of[parents], places[parents]
            places = trees.add(tree_of, above, new, path)
        return trees.batch()

    @staticmethod
    def _noise(sequences: list[Sequence], tree_of: np.ndarray, depth: int, log_q: torch.Tensor) -> torch.Tensor:
        """The noise that the target's tokens at that depth have."""
        own = [(sequences[tree].request.seed, len(sequences[tree].context) + depth) for tree in tree_of.tolist()]
        return gumbel_noise(*torch.tensor(own, device=log_q.device).T, log_q.shape[-1])


def best_of_trees(tree_of: np.ndarray, scores: np.ndarray, count: int) -> np.ndarray:
    """Of each tree's candidates the `count` best, the best first: places in `scores` (n, k) laid flat, int64[m].

    `tree_of` int64[n] : of each row of scores its tree, in rising order. Candidates of -inf are none.
    """
    flat = np.arange(scores.size)
    trees = np.repeat(tree_of, scores.shape[1])
    order = flat[np.lexsort((-scores.ravel(), trees))]
    counts = np.bincount(trees, minlength=int(tree_of.max(initial=-1)) + 1)
    rank = np.arange(len(order)) - (np.cumsum(counts) - counts)[trees[order]]
    return order[(rank < count) & np.isfinite(scores.ravel()[order])]
