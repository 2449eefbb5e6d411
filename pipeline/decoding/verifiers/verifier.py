"""What every rule has in common: what it is asked, what it says, and what it may look at.

A rule is a small pure function of the target's logits, over all sequences' nodes. Every rule accepts the target's own
choice (its argmax). It knows nothing of paths: `acceptance.py` takes the longest one of accepted nodes.
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
    """What a rule says about each drafted node, on the device.

    `accepted` bool[num_nodes]: acceptable after its parent. `log_probability` float32[num_nodes]: of the node's token
    under the target, to choose between paths; zeros where a rule accepts at most one token after each parent.
    """

    accepted: torch.Tensor
    log_probability: torch.Tensor


class Verifier(Protocol):
    """A rule. Its method `may_end(is_loose, trees)`, if it has one, says at which nodes paths may end: bool[n], as
    `is_loose`, the nodes whose token is not the target's choice."""

    def __call__(self, logits: torch.Tensor, choices: torch.Tensor, nodes: DraftedNodes) -> NodeVerdicts:
        """Judge nodes by the target's logits after their parents.

        Parameters
        ----------
        logits : (num_parents, vocab_size), the target's after each place that has drafts behind it.
        choices : int64[num_parents], their argmax.
        """
        ...


def is_choice(choices: torch.Tensor, nodes: DraftedNodes) -> torch.Tensor:
    """Whether a node's token is the target's own choice: bool[num_nodes]."""
    return nodes.token_ids == choices[nodes.parents]


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log probabilities: float32 (num_parents, vocab_size)."""
    return torch.log_softmax(logits, -1, dtype=torch.float32)
