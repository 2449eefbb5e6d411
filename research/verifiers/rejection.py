"""Speculative sampling by rejection: for one draw, for several draws, and for draws without replacement.

Leviathan et al. (ICML 2023, Algorithm 1; Chen et al. 2023) judge one draw; SpecInfer (Miao et al., ASPLOS 2024,
Algorithm 2) judges independent draws of one or several models in turn; SpecTr (Sun et al., NeurIPS 2023, Algorithm 3
and section 4.2: K-SEQ) judges all draws of one model with one factor; RSD (Jeon et al. 2024, section 3.1, Algorithm 1)
judges draws without replacement.
"""

import torch

from laserbatch.research.verifiers.draws import Draws

NUM_HALVINGS = 40


def first_draw(p: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept x with min(1, p(x) / q(x)), otherwise sample from max(p - q, 0). Only the first draw of a place counts."""
    is_first = torch.arange(draws.tokens.shape[1], device=p.device) == 0
    return recursive_rejection(p, draws.only(is_first.expand_as(draws.tokens)))


def recursive_rejection(
    p: torch.Tensor, draws: Draws, without_replacement: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept each draw in turn by the ratio of the rest of p to its distribution q (RSD, Algorithm 1).

    After a rejection, the rest of p is max(p - q, 0), normalised. For draws without replacement, q excludes the earlier
    draws of the same place. `SamplingRule.draw` describes parameters and results.
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


def k_seq(p: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the first of k independent draws x of one q with u < p(x) / (rho q(x)), for the smallest valid rho.

    That rho solves 1 - (1 - beta)^k = rho beta, where beta = sum min(q, p / rho) is the acceptance of one draw.
    """
    is_drawn = (draws.tokens >= 0) & (draws.rows >= 0)
    k = is_drawn.sum(1)
    places = torch.nonzero(k)[:, 0]
    drafted = torch.full((len(p),), -1, device=p.device)
    if len(places):
        p_here, count, q = p[places], k[places, None], draws.distribution(places, 0)
        rho = smallest_rho(p_here, q, count)
        beta = accepted_mass(p_here, q, rho)
        tokens = torch.where(is_drawn[places], draws.tokens[places], 0)
        is_accepted = is_drawn[places] & (draws.uniform[places] * rho * q.gather(1, tokens) < p_here.gather(1, tokens))
        first = is_accepted.int().argmax(1, keepdim=True)
        drafted[places] = torch.where(is_accepted.any(1), tokens.gather(1, first)[:, 0], -1)
        share = (1 - (1 - beta) ** count) / beta.clamp_min(torch.finfo(p.dtype).tiny)
        residual = normalised((p_here - torch.minimum(q, p_here / rho) * share).clamp_min(0), p_here)
        p = p.index_put((places,), residual)
    chosen, p = recursive_rejection(p, draws.only(~is_drawn & (drafted < 0)[:, None]))
    return torch.where(drafted >= 0, drafted, chosen), p


def accepted_mass(p: torch.Tensor, q: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """The probability (R, 1) that one draw is accepted, for p and q (R, vocab_size) and rho (R, 1)."""
    return torch.minimum(q, p / rho).sum(1, keepdim=True)


def smallest_rho(p: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The rho (R, 1) of `k_seq`, by bisection between 1 and k, int64 (R, 1)."""
    low, high = torch.ones_like(p[:, :1]), k.to(p.dtype)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        beta = accepted_mass(p, q, middle)
        is_enough = 1 - (1 - beta) ** k <= middle * beta
        low, high = torch.where(is_enough, low, middle), torch.where(is_enough, middle, high)
    return high


def normalised(weights: torch.Tensor, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """Scale rows to sum to 1; a row of zeros, which rounding can leave, is replaced by the row of `otherwise`."""
    total = weights.sum(-1, keepdim=True)
    scaled = weights / total.clamp_min(torch.finfo(weights.dtype).tiny)
    return scaled if otherwise is None else torch.where(total > 0, scaled, otherwise)
