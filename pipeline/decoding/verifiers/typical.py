"""Medusa's typical acceptance (Cai et al., ICML 2024, section 2.3.1)."""

import math
from dataclasses import dataclass

import torch

from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts, entropy, is_choice, log_softmax


@dataclass(frozen=True)
class Typical:
    """Accept what is not unlikely for how sure the target is: p(x) > min(epsilon, delta exp(-H(p))).

    `epsilon`, a probability that always suffices; delta is its square root, as the paper advises. Where the target is
    unsure, H being large, less suffices.
    """

    epsilon: float = 0.1

    def __call__(self, logits, choices, nodes) -> NodeVerdicts:
        log_p = log_softmax(logits)
        threshold = (math.sqrt(self.epsilon) * torch.exp(-entropy(log_p))).clamp(max=self.epsilon)
        log_probability = log_p[nodes.parents, nodes.token_ids]
        is_typical = log_probability.exp() > threshold[nodes.parents]
        return NodeVerdicts(is_choice(choices, nodes) | is_typical, log_probability)
