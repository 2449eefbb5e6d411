"""Recursive rejection sampling (RSD: Jeon et al. 2024, section 3.1, Algorithm 1)."""

import torch

from laserbatch.pipeline.decoding.verifiers.draws import Draws, SamplingRule, recursive_rejection


class RecursiveRejection(SamplingRule):
    """Draws without replacement: what follows a rejected one was drawn from what q has beside it."""

    def draw(self, p: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        return recursive_rejection(p, draws, without_replacement=True)
