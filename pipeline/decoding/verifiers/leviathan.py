"""Speculative sampling (Leviathan et al., ICML 2023, Algorithm 1; Chen et al. 2023)."""

import torch

from laserbatch.pipeline.decoding.verifiers.draws import Draws, SamplingRule, recursive_rejection


class Leviathan(SamplingRule):
    """Accept x with min(1, p(x) / q(x)), else draw from what p has more than q. Of several drafts the first counts."""

    def draw(self, p: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        is_first = torch.arange(draws.tokens.shape[1], device=p.device) == 0
        return recursive_rejection(p, draws.only(is_first.expand_as(draws.tokens)))
