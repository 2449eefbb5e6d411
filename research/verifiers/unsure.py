"""Rules that depend on the target's entropy: Medusa's typical acceptance, AASD's conditional rule, FLy's loose rule."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts, is_choice, log_softmax
from laserbatch.retrieval_pools.sources import SOURCE_OUTPUT


@dataclass(frozen=True)
class Typical:
    """Accept tokens that are likely enough for the target's entropy: p(x) > min(epsilon, delta exp(-H(p))).

    Cai et al., ICML 2024, section 2.3.1.

    A token above the probability `epsilon` is always accepted; delta is its square root, as the paper advises. If the
    target is unsure, so that H is large, a lower probability suffices.
    """

    epsilon: float = 0.1

    def __call__(self, logits, choices, nodes) -> NodeVerdicts:
        log_p = log_softmax(logits)
        threshold = (math.sqrt(self.epsilon) * torch.exp(-entropy(log_p))).clamp(max=self.epsilon)
        log_probability = log_p[nodes.parents, nodes.token_ids]
        is_typical = log_probability.exp() > threshold[nodes.parents]
        return NodeVerdicts(is_choice(choices, nodes) | is_typical, log_probability)


@dataclass(frozen=True)
class AASD:
    """Accept likely tokens; the threshold rises with the entropy: p(x) >= min(alpha H(p) + beta, max p) (Eq. 4-6).

    AASD: alignment-augmented speculative decoding, section 3.3.

    Tokens drafted from the text's own output must be the target's choice; otherwise loops would sustain themselves.
    """

    alpha: float = 0.1
    beta: float = 0.1

    def __call__(self, logits, choices, nodes) -> NodeVerdicts:
        log_p = log_softmax(logits)
        threshold = torch.minimum(self.alpha * entropy(log_p) + self.beta, log_p.amax(-1).exp())
        log_probability = log_p[nodes.parents, nodes.token_ids]
        is_likely = (log_probability.exp() >= threshold[nodes.parents]) & (nodes.sources != SOURCE_OUTPUT)
        return NodeVerdicts(is_choice(choices, nodes) | is_likely, log_probability)


@dataclass(frozen=True)
class FLy:
    """Accept any token if the target is unsure and then continues as the draft does (Li et al., ICLR 2026).

    The target is unsure if its entropy, as a share of the maximum, log(vocab_size), is at least `min_entropy`. The next
    `window` tokens of the draft must be the target's choices; if the draft ends before, the token is not accepted.
    """

    min_entropy: float = 0.3
    window: int = 6

    def __call__(self, logits, choices, nodes) -> NodeVerdicts:
        log_p = log_softmax(logits)
        is_open = entropy(log_p) >= self.min_entropy * math.log(logits.shape[-1])
        log_probability = log_p[nodes.parents, nodes.token_ids]
        return NodeVerdicts(is_choice(choices, nodes) | is_open[nodes.parents], log_probability)

    def may_end(self, is_loose: np.ndarray, trees: TreeBatch) -> np.ndarray:
        """Whether, on the path to each node, a window without loose nodes follows each loose node: bool[n]."""
        depths = trees.depths.astype(np.uint64)
        bits = np.where(is_loose, np.left_shift(np.uint64(1), depths - np.uint64(1)), 0)
        at = trees.scan_from_root(np.bitwise_or, bits)  # bit d - 1: loose at depth d
        is_behind = at >> np.maximum(trees.depths - self.window, 0).astype(np.uint64) == 0
        for distance in range(1, self.window + 1):
            is_behind &= at & (at >> np.uint64(distance)) == 0
        return is_behind


def entropy(log_probabilities: torch.Tensor) -> torch.Tensor:
    """The entropy, in nats, of each row of log probabilities: float32[num_parents]."""
    return torch.special.entr(log_probabilities.exp()).sum(-1)
