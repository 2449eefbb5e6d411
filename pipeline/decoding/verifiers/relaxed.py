"""LASER's relaxed rule (section 3.4, Eq. 8)."""

from dataclasses import dataclass

from laserbatch.pipeline.decoding.verifiers.probability import above
from laserbatch.pipeline.decoding.verifiers.top_k import among_top_k
from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts, log_probabilities


@dataclass(frozen=True)
class Relaxed:
    """Accept what is among the k most probable tokens and has more than `min_probability`; LASER's published values."""

    k: int = 2
    min_probability: float = 0.1

    def __call__(self, logits, choices, parents, token_ids) -> NodeVerdicts:
        log_probability = log_probabilities(logits, parents, token_ids)
        likely = among_top_k(logits, choices, parents, token_ids, self.k) & above(log_probability, self.min_probability)
        return NodeVerdicts((token_ids == choices[parents]) | likely, log_probability)
