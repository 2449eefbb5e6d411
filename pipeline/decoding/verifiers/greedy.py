"""Verification without loss."""

from dataclasses import dataclass

import torch

from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts, is_choice


@dataclass(frozen=True)
class Greedy:
    """Accept the target's own choice only: the text is that of plain greedy decoding (LASER, Eq. 4)."""

    def __call__(self, logits, choices, nodes) -> NodeVerdicts:
        return NodeVerdicts(is_choice(choices, nodes), torch.zeros_like(nodes.token_ids, dtype=torch.float32))
