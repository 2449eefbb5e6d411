"""Shapes of trees that models grow: most likely continuations, independent chains, and samples without replacement.

SpecInfer and SpecTr draft several chains, Leviathan et al. a single one; samples without replacement are RSD's (Jeon et
al. 2024, section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.model.sampling import gumbel_noise
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.research.drafters.model_drafter import DraftModel, GrowingTrees, draft_noise, on_host


@dataclass(frozen=True)
class Beams:
    """At each of `length` depths, the `width` tokens whose paths have the highest estimated acceptance, by one model.

    If texts are sampled, the same noise is added to the draft's log probabilities as to the target's, so that similar
    distributions draw the same token (Daliri et al. 2024, section 3: draft and target then agree with probability
    (1 - TV) / (1 + TV) at least), and texts do not depend on the draft.
    """

    width: int
    length: int

    def grow(self, models: Sequence[DraftModel], sequences: list[DecodingSequence], temperature: float) -> TreeBatch:
        trees = GrowingTrees(len(sequences))
        tree_of, places = np.arange(len(sequences)), np.full(len(sequences), -1)
        path = np.zeros(len(sequences))
        for depth in range(self.length):
            if len(tree_of) == 0:  # no candidate is left
                break
            log_q = models[0].log_q(trees.batch(), tree_of, places)
            if temperature:
                of_trees = [(sequences[t].request.seed, len(sequences[t].context) + depth) for t in tree_of.tolist()]
                seeds, positions = to_device(np.array(of_trees), log_q.device).T.contiguous()
                noise = gumbel_noise(seeds, positions, log_q.shape[-1])
                log_q = torch.log_softmax(log_q / temperature + noise, -1)
            values, tokens = on_host(*log_q.topk(min(self.width, log_q.shape[-1]), -1))
            scores = path[:, None] + models[0].log_acceptance(depth, values)
            chosen = best_of_trees(tree_of, scores, self.width)
            parents = chosen // scores.shape[1]
            path, new = scores.ravel()[chosen], tokens.ravel()[chosen]
            tree_of, above = tree_of[parents], places[parents]
            places = trees.add(tree_of, above, new, path)
        return trees.batch()


@dataclass(frozen=True)
class Chains:
    """`width` chains of `length` tokens, sampled independently from the models in turn; equal prefixes share nodes."""

    width: int
    length: int

    def grow(self, models: Sequence[DraftModel], sequences: list[DecodingSequence], temperature: float) -> TreeBatch:
        trees = GrowingTrees(len(sequences))
        tree_of = np.repeat(np.arange(len(sequences)), self.width)
        chain = np.tile(np.arange(self.width), len(sequences))
        places = np.full(len(tree_of), -1)  # the last node of each chain
        for depth in range(self.length):
            so_far = trees.batch()
            log_q = torch.cat(
                [
                    model.log_q(so_far, tree_of[chain % len(models) == number], places[chain % len(models) == number])
                    for number, model in enumerate(models)
                ]
            )
            rows = np.empty(len(chain), np.int64)  # the row of `log_q` of each chain
            rows[np.argsort(chain % len(models), kind="stable")] = np.arange(len(chain))
            log_q = torch.log_softmax(log_q / temperature, -1)
            noise = draft_noise(sequences, tree_of, depth, chain, log_q)
            tokens = (log_q[to_device(rows, log_q.device)] + noise).argmax(-1).cpu().numpy()
            distinct, first, of_chain = np.unique(
                np.stack((tree_of, places, tokens)), axis=1, return_index=True, return_inverse=True
            )
            order = np.argsort(first)  # in the order in which they were drawn
            new = np.empty(len(first), np.int64)
            of_tree, above, of_token = distinct[:, order]
            new[order] = trees.add(of_tree, above, of_token, np.zeros(len(first)))
            places = new[of_chain.ravel()]
            trees.drawn(tree_of, places, rows, log_q)
        return trees.batch()


@dataclass(frozen=True)
class Branching:
    """RSD-C: each node at depth l gets `branching[l]` children by Gumbel-top-k (Eq. 5 to 8)."""

    branching: tuple[int, ...]

    def grow(self, models: Sequence[DraftModel], sequences: list[DecodingSequence], temperature: float) -> TreeBatch:
        trees = GrowingTrees(len(sequences))
        tree_of, places = np.arange(len(sequences)), np.full(len(sequences), -1)
        for depth, count in enumerate(self.branching):
            log_q = torch.log_softmax(models[0].log_q(trees.batch(), tree_of, places) / temperature, -1)
            noisy = log_q + draft_noise(sequences, tree_of, depth, places + 1, log_q)
            tokens = noisy.topk(min(count, noisy.shape[-1]), -1).indices.cpu().numpy()
            rows = np.repeat(np.arange(len(tree_of)), tokens.shape[1])
            tree_of, above = tree_of[rows], places[rows]
            places = trees.add(tree_of, above, tokens.ravel(), np.zeros(len(rows)))
            trees.drawn(tree_of, places, rows, log_q)
        return trees.batch()


@dataclass(frozen=True)
class StochasticBeams:
    """RSD-S: at each of `length` depths, `width` tokens; their paths are sampled without replacement (Eq. 9 to 11)."""

    width: int
    length: int

    def grow(self, models: Sequence[DraftModel], sequences: list[DecodingSequence], temperature: float) -> TreeBatch:
        trees = GrowingTrees(len(sequences))
        tree_of, places = np.arange(len(sequences)), np.full(len(sequences), -1)
        phi = psi = np.zeros(len(sequences))  # log probability of each path, and its perturbed and truncated value
        for depth in range(self.length):
            log_q = torch.log_softmax(models[0].log_q(trees.batch(), tree_of, places) / temperature, -1)
            phi, psi = to_device(np.stack((phi, psi)), log_q.device)
            of_path = phi[:, None] + log_q.double()
            perturbed = of_path + draft_noise(sequences, tree_of, depth, places + 1, log_q)
            best = perturbed.topk(min(self.width, log_q.shape[-1]), -1)
            scores = truncated(psi[:, None], best.values)
            scores, of_best, tokens = on_host(scores, of_path.gather(1, best.indices), best.indices)
            chosen = best_of_trees(tree_of, scores, self.width)
            rows = chosen // scores.shape[1]
            phi, psi, tokens = (values.ravel()[chosen] for values in (of_best, scores, tokens))
            tree_of, above = tree_of[rows], places[rows]
            places = trees.add(tree_of, above, tokens, np.zeros(len(chosen)))
            trees.drawn(tree_of, places, rows, log_q)
        return trees.batch()


def best_of_trees(tree_of: np.ndarray, scores: np.ndarray, count: int) -> np.ndarray:
    """The `count` best candidates of each tree, best first: indices into the flattened `scores` (n, k), int64[m].

    `tree_of` int64[n] : the tree of each row of scores, ascending. A score of -inf is not a candidate.
    """
    flat = np.arange(scores.size)
    trees = np.repeat(tree_of, scores.shape[1])
    order = flat[np.lexsort((-scores.ravel(), trees))]
    counts = np.bincount(trees, minlength=int(tree_of.max(initial=-1)) + 1)
    rank = np.arange(len(order)) - (np.cumsum(counts) - counts)[trees[order]]
    return order[(rank < count) & np.isfinite(scores.ravel()[order])]


def truncated(bound: torch.Tensor, perturbed: torch.Tensor) -> torch.Tensor:
    """T(u, phi) of Eq. 10: -log(exp(-u) - exp(-max phi) + exp(-phi)), so that the largest becomes u.

    Computed as in Kool et al. 2019, appendix B.3, without a difference of large numbers. `bound` (n, 1), `perturbed`
    (n, k) with each row's largest first.
    """
    largest = perturbed[:, :1]
    v = bound - perturbed + torch.log1p(-torch.exp(perturbed - largest))  # -inf at the largest
    return bound - v.clamp_min(0) - torch.log1p(torch.exp(-v.abs()))
