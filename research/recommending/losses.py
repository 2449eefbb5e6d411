"""What small models learn from, that draft beams for a recommender (AtSpeed: Lin et al., ICLR 2025, section 3)."""

from dataclasses import dataclass

import torch

from laserbatch.research.recommending.settings import DraftLoss

OF_LISTS: tuple[DraftLoss, ...] = ("seqkd", "atspeed_s", "atspeed_r")  # learn from the target's own lists too
NUM_ALIGNED = 20  # K of the constrained top-K
STRENGTH = 0.5  # alpha of Eq. 5 and 9


@dataclass(frozen=True)
class Rows:
    """R places of codes in sequences, of which each is to say the next.

    `p` and `q` (R, vocab_size): logits of target and draft; `labels` int64[R] the codes' tokens; `allowed` bool (R,
    vocab_size) what a catalogue has there. `least` float[R]: the target's log probability of the last of its K list's
    code at the same place, log p(y_K); 0 where a sequence is none of a list.
    """

    p: torch.Tensor
    q: torch.Tensor
    labels: torch.Tensor
    allowed: torch.Tensor
    least: torch.Tensor


def recommendation_loss(rows: Rows) -> torch.Tensor:
    """Cross entropy of the codes that came: L_Rec."""
    return torch.nn.functional.cross_entropy(rows.q, rows.labels)


def word_loss(rows: Rows) -> torch.Tensor:
    """Cross entropy to the target's distribution (WordKD: Hinton et al. 2015)."""
    return -(torch.softmax(rows.p, -1) * torch.log_softmax(rows.q, -1)).sum(-1).mean()


def variation_loss(rows: Rows) -> torch.Tensor:
    """Total variation distance from it (TVDKD: Wen et al. 2023)."""
    return (torch.softmax(rows.p, -1) - torch.softmax(rows.q, -1)).abs().sum(-1).mean() / 2


def strict_loss(rows: Rows, is_constrained: bool = True, is_dense: bool = True) -> torch.Tensor:
    """L_Align-S (Eq. 4) over V_c, the likeliest of what the draft may say: reverse KL less the density term.

    `is_constrained` False: over the whole vocabulary; `is_dense` False: without the density term (its ablations).
    """
    log_p, log_q = (_log_softmax(each, rows.allowed if is_constrained else None) for each in (rows.p, rows.q))
    if is_constrained:
        likeliest = log_q.topk(min(NUM_ALIGNED, log_q.shape[1]), -1).indices
        log_p, log_q = log_p.gather(1, likeliest), log_q.gather(1, likeliest)
    is_there = torch.isfinite(log_q) & torch.isfinite(log_p)
    log_p, log_q = log_p.masked_fill(~is_there, 0), log_q.masked_fill(~is_there, 0)
    q = log_q.exp() * is_there
    terms = q * (log_q - log_p)
    if is_dense:
        terms = terms - q * (log_q - rows.least[:, None])
    return terms.sum(-1).mean()


def relaxed_loss(rows: Rows) -> torch.Tensor:
    """L_Align-R (Eq. 8): total variation distance over the likeliest of what the target may say, made one again."""
    log_p, log_q = (_log_softmax(each, rows.allowed) for each in (rows.p, rows.q))
    likeliest = log_p.topk(min(NUM_ALIGNED, log_p.shape[1]), -1).indices
    p, q = (torch.softmax(each.gather(1, likeliest), -1) for each in (log_p, log_q))
    return (p - q).abs().sum(-1).mean() / 2


def draft_loss(kind: DraftLoss, of_logs: Rows, of_lists: Rows | None) -> torch.Tensor:
    """That of a step: of what came in the log, and of the target's lists where the kind learns from them."""
    match kind:
        case "sft":
            return recommendation_loss(of_logs)
        case "wordkd":
            return word_loss(of_logs)
        case "tvdkd":
            return variation_loss(of_logs)
        case "seqkd":
            return (recommendation_loss(of_logs) + recommendation_loss(of_lists)) / 2
        case "atspeed_s":
            return STRENGTH * strict_loss(of_lists) + (1 - STRENGTH) * recommendation_loss(of_logs)
        case "atspeed_r":
            return STRENGTH * relaxed_loss(of_lists) + (1 - STRENGTH) * recommendation_loss(of_logs)


def _log_softmax(logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    return torch.log_softmax(logits if allowed is None else logits.masked_fill(~allowed, -torch.inf), -1)
