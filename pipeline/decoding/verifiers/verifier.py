"""What a verifier is: a small pure function of the target's logits and the drafted tokens, over all sequences' nodes.

Every rule accepts the target's own choice (its argmax), so with k = 1, or a threshold no other token reaches, the
relaxed rules are greedy verification.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


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


def log_probabilities(logits: torch.Tensor, parents: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log probability of each node's token after its parent: float32[num_nodes]."""
    return torch.log_softmax(logits, -1, dtype=torch.float32)[parents, token_ids]
