"""Trains EAGLE's head (Li et al., ICML 2024, section 3.2), also by HASS (Zhang et al., ICLR 2025, section 3).

While drafting, a head reads features that it predicted itself; training on the target's features alone never shows it
such features. HASS trains over several steps, each on the features that the step before predicted ("harmonized context
alignment"), and on the target's most likely tokens ("harmonized objective distillation").
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaConfig

from laserbatch.research.drafter_training.method import Method
from laserbatch.research.drafter_training.texts import Batch, Target
from laserbatch.research.drafters.eagle import EagleHead

STEPS_NAME = "laserbatch_steps"
CLASS_WEIGHT = 0.1  # weight of the cross entropy relative to the features' loss (EAGLE, Eq. 5)
NUM_LIKELIEST = 10  # K of HASS's top-K distillation (its Eq. 1)
ALIGNED_STEPS = 3
_steps: list[tuple[torch.Tensor, ...]] = []  # keys and values of the previous steps over the same tokens


def steps_attention(module, query, key, value, attention_mask, scaling=None, **_) -> tuple[torch.Tensor, None]:
    """Attention in step j of several steps over the same tokens: (B, n, num_heads, head_dim).

    The query at position t attends to its own step's key at t, the previous step's key at t - 1, and so on, as in the
    draft of the j-th token. Further back it attends to the first step's keys, which come from the target's features.
    """
    num_folded = query.shape[1] // key.shape[1]
    _steps.append(tuple(each.repeat_interleave(num_folded, 1) for each in (key, value)))
    num_back, n = len(_steps) - 1, query.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    first_keys, first_values = _steps[0]
    places = torch.arange(n, device=query.device)
    is_seen = places[:, None] - places[None, :] >= num_back
    scores = [(query @ first_keys.transpose(-1, -2) * scale).masked_fill(~is_seen, -torch.inf)]
    for back in range(num_back):  # from the current step back to the second
        keys = _steps[-1 - back][0].roll(back, 2)
        step_scores = (query * keys).sum(-1, keepdim=True) * scale
        scores.append(step_scores.masked_fill((places < back)[:, None], -torch.inf))
    weights = torch.softmax(torch.cat(scores, -1), -1)
    mixed = weights[..., :n] @ first_values
    for back in range(num_back):
        mixed = mixed + weights[..., n + back, None] * _steps[-1 - back][1].roll(back, 2)
    return mixed.transpose(1, 2), None


AttentionInterface.register(STEPS_NAME, steps_attention)


class Eagle(Method):
    """Trains the head over `num_steps` steps: one step is EAGLE, more are HASS's context alignment.

    `distils` : add HASS's loss of the target's most likely tokens.
    """

    def __init__(self, target: Target, config: LlamaConfig, num_steps: int, distils: bool) -> None:
        config._attn_implementation = STEPS_NAME
        self.module = EagleHead(config).to(target.device)
        self._target, self._num_steps, self._distils = target, num_steps, distils

    def loss(self, batch: Batch) -> torch.Tensor:
        target_features, is_token = batch.features[:, 1:], batch.is_token
        p = torch.softmax(self._target.logits_of(target_features), -1)
        likeliest = p.topk(NUM_LIKELIEST, -1)
        total = target_features.new_zeros(())
        for predicted in self._steps_of(batch, self._num_steps):
            log_q = torch.log_softmax(self._target.logits_of(predicted), -1)
            of_features = F.smooth_l1_loss(predicted, target_features, reduction="none").mean(-1)
            loss = of_features - CLASS_WEIGHT * (p * log_q).sum(-1)
            if self._distils:
                loss = loss - (likeliest.values * log_q.gather(-1, likeliest.indices)).sum(-1)
            total = total + (loss * is_token).sum() / is_token.sum().clamp_min(1)
        return total

    def log_probs_by_depth(self, batch: Batch, num_depths: int) -> Iterator[torch.Tensor]:
        last = batch.tokens.shape[1] - 1
        for depth, predicted in enumerate(self._steps_of(batch, num_depths)):
            yield torch.log_softmax(self._target.logits_of(predicted[:, depth:last]), -1)

    def _steps_of(self, batch: Batch, num_steps: int) -> Iterator[torch.Tensor]:
        """Yield each step's predicted features (B, T, hidden_size) of the next tokens, from the step before's."""
        embeddings = self._target.embed(batch.tokens).float()
        features, positions = batch.features[:, :-1], torch.arange(batch.tokens.shape[1], device=self._target.device)
        _steps.clear()
        for _ in range(num_steps):
            predicted = self.module(embeddings, features, positions[None])
            yield predicted
            features = torch.cat((batch.features[:, :1], predicted[:, :-1].detach()), 1)
