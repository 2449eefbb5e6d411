"""The losses of small models that draft beams for a recommender (AtSpeed: Lin et al., ICLR 2025, section 3)."""

from dataclasses import dataclass

import torch

from laserbatch.research.recommending.settings import DraftLoss

NUM_ALIGNED = 20  # K of the constrained top-K
STRENGTH = 0.5  # alpha of Eq. 5 and 9; weight of the loss on the target's lists


@dataclass(frozen=True)
class Rows:
    """R places in sequences at which a code is predicted.

    `p` and `q` (R, vocab_size) are logits of target and draft; `labels` int64[R] are the tokens of the codes; `allowed`
    bool (R, vocab_size) marks the codes that the catalogue has there. `least` float[R] is log p(y_K), the target's log
    probability of the code of its list's last item at the same level; 0 for sequences of the log.
    """

    p: torch.Tensor
    q: torch.Tensor
    labels: torch.Tensor
    allowed: torch.Tensor
    least: torch.Tensor


def recommendation_loss(rows: Rows) -> torch.Tensor:
    """Cross entropy of the codes in `labels`: L_Rec."""
    return torch.nn.functional.cross_entropy(rows.q, rows.labels)


def word_loss(rows: Rows) -> torch.Tensor:
    """Cross entropy to the target's distribution (WordKD: Hinton et al. 2015)."""
    return -(torch.softmax(rows.p, -1) * torch.log_softmax(rows.q, -1)).sum(-1).mean()


def variation_loss(rows: Rows) -> torch.Tensor:
    """Total variation distance from the target's distribution (TVDKD: Wen et al. 2023)."""
    return (torch.softmax(rows.p, -1) - torch.softmax(rows.q, -1)).abs().sum(-1).mean() / 2


def strict_loss(rows: Rows, is_constrained: bool = True, is_dense: bool = True) -> torch.Tensor:
    """L_Align-S (Eq. 4): reverse KL minus the density term, over V_c, the draft's most likely allowed codes.

    Ablations: `is_constrained` False takes the whole vocabulary, `is_dense` False leaves out the density term.
    """
    log_p, log_q = (_log_softmax(each, rows.allowed if is_constrained else None) for each in (rows.p, rows.q))
    if is_constrained:
        likeliest = log_q.topk(min(NUM_ALIGNED, log_q.shape[1]), -1).indices
        log_p, log_q = log_p.gather(1, likeliest), log_q.gather(1, likeliest)
    is_allowed = torch.isfinite(log_q) & torch.isfinite(log_p)
    log_p, log_q = log_p.masked_fill(~is_allowed, 0), log_q.masked_fill(~is_allowed, 0)
    q = log_q.exp() * is_allowed
    terms = q * (log_q - log_p)
    if is_dense:
        terms = terms - q * (log_q - rows.least[:, None])
    return terms.sum(-1).mean()


def relaxed_loss(rows: Rows) -> torch.Tensor:
    """L_Align-R (Eq. 8): total variation distance over the target's most likely allowed codes, renormalised."""
    log_p, log_q = (_log_softmax(each, rows.allowed) for each in (rows.p, rows.q))
    likeliest = log_p.topk(min(NUM_ALIGNED, log_p.shape[1]), -1).indices
    p, q = (torch.softmax(each.gather(1, likeliest), -1) for each in (log_p, log_q))
    return (p - q).abs().sum(-1).mean() / 2


OF_LOG = {"sft": recommendation_loss, "wordkd": word_loss, "tvdkd": variation_loss}
OF_LISTS = {"seqkd": recommendation_loss, "atspeed_s": strict_loss, "atspeed_r": relaxed_loss}  # of the target's lists


def draft_loss(kind: DraftLoss, of_logs: Rows, of_lists: Rows | None) -> torch.Tensor:
    """The loss of a step on the log and, for kinds in `OF_LISTS`, on the target's lists."""
    if of_lists is None:
        return OF_LOG[kind](of_logs)
    return STRENGTH * OF_LISTS[kind](of_lists) + (1 - STRENGTH) * recommendation_loss(of_logs)


def _log_softmax(logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    return torch.log_softmax(logits if allowed is None else logits.masked_fill(~allowed, -torch.inf), -1)
