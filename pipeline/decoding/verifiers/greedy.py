"""Greedy verification: the text is that of plain greedy decoding (LASER, Eq. 4)."""

from dataclasses import dataclass

import torch

from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts


@dataclass(frozen=True)
class Greedy:
    """Accept the target's own choice only."""

    def __call__(self, logits, choices, parents, token_ids) -> NodeVerdicts:
        return NodeVerdicts(token_ids == choices[parents], torch.zeros_like(token_ids, dtype=torch.float32))
