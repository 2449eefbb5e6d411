"""FLy: training-free loosely speculative decoding (Li et al., ICLR 2026)."""

import math
from dataclasses import dataclass

from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts, entropy, is_choice, log_softmax


@dataclass(frozen=True)
class Loosely:
    """Accept any token where the target is unsure and then goes on as the draft does.

    The gate: the entropy of the target, as a share of the vocabulary's, is at least `min_entropy`. The window: so many
    of the target's own choices follow the token in the draft; where the draft ends before, it is not accepted.
    """

    min_entropy: float = 0.3
    window: int = 6

    def __call__(self, logits, choices, nodes) -> NodeVerdicts:
        log_p = log_softmax(logits)
        is_open = entropy(log_p) >= self.min_entropy * math.log(logits.shape[-1])
        log_probability = log_p[nodes.parents, nodes.token_ids]
        return NodeVerdicts(is_choice(choices, nodes) | is_open[nodes.parents], log_probability)
