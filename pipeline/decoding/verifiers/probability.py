"""Above a probability."""

import math
from dataclasses import dataclass

import torch

from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts, log_probabilities


@dataclass(frozen=True)
class ProbabilityThreshold:
    """Accept tokens of more than `min_probability` under the target."""

    min_probability: float = 0.1

    def __call__(self, logits, choices, parents, token_ids) -> NodeVerdicts:
        log_probability = log_probabilities(logits, parents, token_ids)
        accepted = (token_ids == choices[parents]) | above(log_probability, self.min_probability)
        return NodeVerdicts(accepted, log_probability)


def above(log_probability: torch.Tensor, min_probability: float) -> torch.Tensor:
    """Whether a probability exceeds a threshold: bool, as `log_probability`."""
    return log_probability > (math.log(min_probability) if min_probability > 0 else -math.inf)
