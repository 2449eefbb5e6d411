"""Among the k most probable tokens (LASER, Eq. 7)."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts, log_probabilities


@dataclass(frozen=True)
class TopK:
    """Accept the k most probable tokens, and those tied with the k-th."""

    k: int = 2

    def __call__(self, logits, choices, parents, token_ids) -> NodeVerdicts:
        accepted = (token_ids == choices[parents]) | among_top_k(logits, choices, parents, token_ids, self.k)
        return NodeVerdicts(accepted, log_probabilities(logits, parents, token_ids))


def among_top_k(logits, choices, parents, token_ids, k: int) -> torch.Tensor:
    """Whether a token's logit is at least the k-th largest after its parent: bool[num_nodes].

    For k = 1 none is: the choice itself is accepted anyway, and a tie with it is not the choice.
    """
    if k == 1:
        return torch.zeros_like(token_ids, dtype=torch.bool)
    if k == 2:  # without sorting
        return logits[parents, token_ids] >= largest_beside(logits, choices)[parents]
    smallest = logits.topk(min(k, logits.shape[-1]), -1).values[:, -1]
    return logits[parents, token_ids] >= smallest[parents]


def largest_beside(logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Each row's largest logit but that of its choice: (num_rows,). What it does to logits meanwhile it undoes."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.scatter(1, choices[:, None], -math.inf).amax(-1)
    values, places = logits.numpy(), (np.arange(len(logits)), choices.numpy())  # numpy's maximum is vectorised
    best = values[places]
    values[places] = -np.inf
    largest = values.max(-1)
    values[places] = best
    return torch.from_numpy(largest)
