"""The contract of verification rules: the nodes to judge, the target's logits, and the verdicts.

A rule is a small pure function of the target's logits, over all sequences' nodes. Every rule accepts the target's own
choice (its argmax). It knows nothing of paths: `acceptance.py` takes the longest path of accepted nodes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class DraftedNodes:
    """The nodes to judge, on the device.

    `parents` int64[num_nodes]: the row of each node's parent in the logits; `token_ids` int64[num_nodes]; `sources`
    int64[num_nodes]: where each token was drafted from, a code of `retrieval_pools.sources`.
    """

    parents: torch.Tensor
    token_ids: torch.Tensor
    sources: torch.Tensor


@dataclass(frozen=True)
class NodeVerdicts:
    """A rule's verdicts on the drafted nodes, on the device.

    `accepted` bool[num_nodes]: whether the node may follow its parent. `log_probability` float32[num_nodes]: the log
    probability of its token under the target, which decides between paths; 0 if a rule accepts one token per parent.
    """

    accepted: torch.Tensor
    log_probability: torch.Tensor


class Verifier(Protocol):
    """A rule. Its optional method `may_end(is_loose, trees)` says at which nodes paths may end, bool[n]; `is_loose`,
    bool[n], marks nodes whose token is not the target's choice."""

    def __call__(self, logits: torch.Tensor, choices: torch.Tensor, nodes: DraftedNodes) -> NodeVerdicts:
        """Judge nodes by the target's logits after their parents.

        Parameters
        ----------
        logits : (num_parents, vocab_size), the target's logits after each token that nodes follow.
        choices : int64[num_parents], their argmax.
        """
        ...


def is_choice(choices: torch.Tensor, nodes: DraftedNodes) -> torch.Tensor:
    """Whether a node's token is the target's own choice: bool[num_nodes]."""
    return nodes.token_ids == choices[nodes.parents]


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log probabilities: float32 (num_parents, vocab_size)."""
    return torch.log_softmax(logits, -1, dtype=torch.float32)
