"""Rules by which drafted tokens are accepted: small pure functions of the target's logits, over all sequences' nodes.

Every rule accepts the target's own choice (its argmax), so with k = 1, or a threshold no other token reaches, the
relaxed rules are greedy verification.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from laserbatch.pipeline.decoding.settings import DecodingSettings


@dataclass(frozen=True)
class NodeVerdicts:
    """What a rule says about each drafted node, on the device.

    `accepted` bool[num_nodes]: acceptable after its parent. `log_probability` float32[num_nodes]: of the node's token
    under the target, to choose between paths; zeros where a rule accepts at most one token after each parent.
    """

    accepted: torch.Tensor
    log_probability: torch.Tensor


class Verifier(Protocol):
    def __call__(
        self, logits: torch.Tensor, choices: torch.Tensor, parents: torch.Tensor, token_ids: torch.Tensor
    ) -> NodeVerdicts:
        """Judge nodes by the target's logits after their parents.

        Parameters
        ----------
        logits : (num_parents, vocab_size), the target's after each place that has drafts behind it.
        choices : int64[num_parents], their argmax.
        parents : int64[num_nodes], the row of each node's parent in `logits`.
        token_ids : int64[num_nodes], the drafted tokens.
        """
        ...


@dataclass(frozen=True)
class Greedy:
    """Accept the target's own choice only: the text is that of plain greedy decoding (LASER, Eq. 4)."""

    def __call__(self, logits, choices, parents, token_ids) -> NodeVerdicts:
        return NodeVerdicts(token_ids == choices[parents], torch.zeros_like(token_ids, dtype=torch.float32))


@dataclass(frozen=True)
class Relaxed:
    """Accept what is among the k most probable tokens and has more than `min_probability` (LASER, Eq. 8).

    With 0 the first is asked alone, tokens tied with the k-th being among them (Eq. 7); without `k` the second alone.
    """

    k: int | None = 2
    min_probability: float = 0.1

    def __call__(self, logits, choices, parents, token_ids) -> NodeVerdicts:
        log_probability = log_probabilities(logits, parents, token_ids)
        likely = above(log_probability, self.min_probability)
        if self.k is not None:
            likely &= among_top_k(logits, choices, parents, token_ids, self.k)
        return NodeVerdicts((token_ids == choices[parents]) | likely, log_probability)


def verifier_from(settings: DecodingSettings) -> Verifier:
    """The rule that the settings name."""
    if settings.verifier == "greedy":
        return Greedy()
    if settings.verifier == "top_k":
        return Relaxed(settings.top_k, 0.0)
    if settings.verifier == "probability":
        return Relaxed(None, settings.min_probability)
    return Relaxed(settings.top_k, settings.min_probability)


def log_probabilities(logits: torch.Tensor, parents: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log probability of each node's token after its parent: float32[num_nodes]."""
    return torch.log_softmax(logits, -1, dtype=torch.float32)[parents, token_ids]


def above(log_probability: torch.Tensor, min_probability: float) -> torch.Tensor:
    """Whether a probability exceeds a threshold: bool, as `log_probability`."""
    return log_probability > (math.log(min_probability) if min_probability > 0 else -math.inf)


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
