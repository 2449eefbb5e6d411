"""Speculative sampling by rejection: of one chain, of several draws, of draws without replacement.

Leviathan et al. (ICML 2023, Algorithm 1; Chen et al. 2023) judge one draw, SpecInfer (Miao et al., ASPLOS 2024,
Algorithm 2) independent ones of one model or several, RSD (Jeon et al. 2024, section 3.1, Algorithm 1) those of a tree
whose branches were drawn without replacement.
"""

import torch

from laserbatch.pipeline.decoding.verifiers.draws import Draws


def first_draw(p: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept x with min(1, p(x) / q(x)), else draw from what p has more than q. Of several drafts the first counts."""
    is_first = torch.arange(draws.tokens.shape[1], device=p.device) == 0
    return recursive_rejection(p, draws.only(is_first.expand_as(draws.tokens)))


def recursive_rejection(
    p: torch.Tensor, draws: Draws, without_replacement: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each draw in turn is accepted by its ratio of what is left of p to its own distribution q (RSD, Algorithm 1).

    What is left after a rejection is p - q where that is positive. Of draws without replacement q is what earlier draws
    of the same place left of it. Parameters and results as `SamplingRule.draw` has them.
    """
    drafted = torch.full((len(p),), -1, device=p.device)
    for number in range(draws.tokens.shape[1]):
        places = torch.nonzero((draws.tokens[:, number] >= 0) & (drafted < 0))[:, 0]
        tokens, q = draws.tokens[places, number], draws.distribution(places, number)
        if without_replacement and number:
            earlier = draws.tokens[places, :number]
            is_like = draws.rows[places, :number] == draws.rows[places, number : number + 1]
            gone = torch.zeros_like(q).scatter_add_(1, earlier.clamp_min(0), (is_like & (earlier >= 0)).float())
            q = normalised(q.masked_fill(gone > 0, 0.0))
        left, at = p[places], tokens[:, None]
        is_accepted = draws.uniform[places, number] * q.gather(1, at)[:, 0] < left.gather(1, at)[:, 0]
        drafted[places[is_accepted]] = tokens[is_accepted]
        p = p.index_put((places,), torch.where(is_accepted[:, None], left, normalised((left - q).clamp_min(0), left)))
    return drafted, p


def normalised(weights: torch.Tensor, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """Rows that sum to 1; a row of zeros, which rounding can leave, becomes that of `otherwise`."""
    total = weights.sum(-1, keepdim=True)
    scaled = weights / total.clamp_min(torch.finfo(weights.dtype).tiny)
    return scaled if otherwise is None else torch.where(total > 0, scaled, otherwise)
