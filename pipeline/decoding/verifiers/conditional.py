"""AASD's conditional verification (alignment-augmented speculative decoding, section 3.3)."""

from dataclasses import dataclass

import torch

from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts, entropy, is_choice, log_softmax
from laserbatch.retrieval_pools.sources import SOURCE_OUTPUT


@dataclass(frozen=True)
class Conditional:
    """Accept what is likely, the likelier the less sure the target is: p(x) >= min(alpha H(p) + beta, max p) (Eq. 4-6).

    What was drafted from the text's own output must be the target's choice: a loop would follow itself.
    """

    alpha: float = 0.1
    beta: float = 0.1

    def __call__(self, logits, choices, nodes) -> NodeVerdicts:
        log_p = log_softmax(logits)
        threshold = torch.minimum(self.alpha * entropy(log_p) + self.beta, log_p.amax(-1).exp())
        log_probability = log_p[nodes.parents, nodes.token_ids]
        is_likely = (log_probability.exp() >= threshold[nodes.parents]) & (nodes.sources != SOURCE_OUTPUT)
        return NodeVerdicts(is_choice(choices, nodes) | is_likely, log_probability)
