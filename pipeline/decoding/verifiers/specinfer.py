"""Multi-round speculative sampling (SpecInfer: Miao et al., ASPLOS 2024, Algorithm 2)."""

import torch

from laserbatch.pipeline.decoding.verifiers.draws import Draws, SamplingRule, recursive_rejection


class MultiRound(SamplingRule):
    """Independent draws, of one model or of several, tried one after another against what is left of p."""

    def draw(self, p: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        return recursive_rejection(p, draws)
