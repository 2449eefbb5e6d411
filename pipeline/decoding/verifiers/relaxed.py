"""Greedy verification, which is lossless; LASER's relaxed verification; and each of its two conditions alone."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.plugins import verifier_plugin
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts, Verifier, is_choice, log_softmax


@dataclass(frozen=True)
class Greedy:
    """Accept the target's own choice only: the text is that of plain greedy decoding (LASER, Eq. 4)."""

    def __call__(self, logits, choices, nodes) -> NodeVerdicts:
        return NodeVerdicts(is_choice(choices, nodes), torch.zeros_like(nodes.token_ids, dtype=torch.float32))


@dataclass(frozen=True)
class Relaxed:
    """Accept a token that is among the k most probable and above `min_probability` (LASER, Eq. 8).

    With `min_probability` 0 only the first condition counts (Eq. 7; ties with the k-th are among them), with `k` None
    only the second. With k = 1, or a threshold that no other token reaches, this is greedy verification.
    """

    k: int | None = 2
    min_probability: float = 0.2

    def __call__(self, logits, choices, nodes) -> NodeVerdicts:
        log_probability = log_softmax(logits)[nodes.parents, nodes.token_ids]
        likely = log_probability > (math.log(self.min_probability) if self.min_probability > 0 else -math.inf)
        if self.k is not None:
            likely &= among_top_k(logits, choices, nodes.parents, nodes.token_ids, self.k)
        return NodeVerdicts(is_choice(choices, nodes) | likely, log_probability)


# The rules by their names in the configuration.
NAMED: Mapping[str, Callable[[DecodingSettings], Verifier]] = {
    "greedy": lambda settings: Greedy(),
    "top_k": lambda settings: Relaxed(settings.top_k, 0.0),
    "probability": lambda settings: Relaxed(None, settings.min_probability),
    "relaxed": lambda settings: Relaxed(settings.top_k, settings.min_probability),
}


def verifier_from(settings: DecodingSettings) -> Verifier:
    """The rule that the settings name."""
    made = NAMED.get(settings.verifier) or verifier_plugin(settings.verifier).make
    return made(settings)


def among_top_k(logits, choices, parents, token_ids, k: int) -> torch.Tensor:
    """Whether a token's logit is at least the k-th largest after its parent: bool[num_nodes].

    False for k = 1: the choice itself is accepted anyway, and a token tied with it is not the choice.
    """
    if k == 1:
        return torch.zeros_like(token_ids, dtype=torch.bool)
    if k == 2:  # without sorting
        return logits[parents, token_ids] >= largest_beside(logits, choices)[parents]
    smallest = logits.topk(min(k, logits.shape[-1]), -1).values[:, -1]
    return logits[parents, token_ids] >= smallest[parents]


def largest_beside(logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Each row's largest logit other than its choice's: (num_rows,). `logits` change meanwhile and are restored."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.scatter(1, choices[:, None], -math.inf).amax(-1)
    values, places = logits.numpy(), (np.arange(len(logits)), choices.numpy())  # numpy's maximum is vectorised
    best = values[places]
    values[places] = -np.inf
    largest = values.max(-1)
    values[places] = best
    return torch.from_numpy(largest)
