"""K-SEQ selection (SpecTr: Sun et al., NeurIPS 2023, Algorithm 3 and section 4.2)."""

import torch

from laserbatch.pipeline.decoding.verifiers.draws import Draws
from laserbatch.pipeline.decoding.verifiers.rejection import normalised, recursive_rejection

NUM_HALVINGS = 40


def k_seq(p: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of k independent draws x of one q with u < p(x) / (rho q(x)), rho as small as it may be.

    Which is where 1 - (1 - beta)^k = rho beta, beta being the acceptance of one draw, sum min(q, p / rho).
    """
    is_drawn = (draws.tokens >= 0) & (draws.rows >= 0)
    k = is_drawn.sum(1)
    places = torch.nonzero(k)[:, 0]
    drafted = torch.full((len(p),), -1, device=p.device)
    if len(places):
        own, count, q = p[places], k[places, None], draws.distribution(places, 0)
        rho = smallest_rho(own, q, count)
        beta = accepted_mass(own, q, rho)
        tokens = torch.where(is_drawn[places], draws.tokens[places], 0)
        is_accepted = is_drawn[places] & (draws.uniform[places] * rho * q.gather(1, tokens) < own.gather(1, tokens))
        first = is_accepted.int().argmax(1, keepdim=True)
        drafted[places] = torch.where(is_accepted.any(1), tokens.gather(1, first)[:, 0], -1)
        share = (1 - (1 - beta) ** count) / beta.clamp_min(torch.finfo(p.dtype).tiny)
        residual = normalised((own - torch.minimum(q, own / rho) * share).clamp_min(0), own)
        p = p.index_put((places,), residual)
    chosen, p = recursive_rejection(p, draws.only(~is_drawn & (drafted < 0)[:, None]))
    return torch.where(drafted >= 0, drafted, chosen), p


def accepted_mass(p: torch.Tensor, q: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """How often one draw is accepted: (R, 1) of (R, vocab_size) twice and (R, 1)."""
    return torch.minimum(q, p / rho).sum(1, keepdim=True)


def smallest_rho(p: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """By halving between 1 and k, int64 (R, 1): (R, 1)."""
    low, high = torch.ones_like(p[:, :1]), k.to(p.dtype)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        beta = accepted_mass(p, q, middle)
        is_enough = 1 - (1 - beta) ** k <= middle * beta
        low, high = torch.where(is_enough, low, middle), torch.where(is_enough, middle, high)
    return high
