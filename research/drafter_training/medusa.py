"""Trains Medusa heads on the target's own texts; the target does not change (Cai et al., ICML 2024, section 2.2.1)."""

from collections.abc import Iterator

import torch

from laserbatch.research.drafter_training.method import Method
from laserbatch.research.drafter_training.texts import Batch, Target
from laserbatch.research.drafters.medusa import MedusaHeads

DECAY = 0.8  # the loss of head k has the weight 0.8^k


class Medusa(Method):
    """Trains `num_heads` heads: head k predicts token s + k from the state that predicted token s."""

    def __init__(self, target: Target, num_heads: int) -> None:
        self.module = MedusaHeads(target.embed.weight.shape[1], num_heads).to(target.device)
        self._logits_of, self._num_heads = target.logits_of, num_heads

    def loss(self, batch: Batch) -> torch.Tensor:
        total = batch.features.new_zeros(())
        for number, log_q in enumerate(self.log_probs_by_depth(batch, self._num_heads)):
            labels, is_token = batch.tokens[:, number + 1 :], batch.is_token[:, number + 1 :]
            of_token = -log_q.gather(-1, labels[..., None])[..., 0]
            total = total + DECAY ** (number + 1) * (of_token * is_token).sum() / is_token.sum().clamp_min(1)
        return total

    def log_probs_by_depth(self, batch: Batch, num_depths: int) -> Iterator[torch.Tensor]:
        states = self.module(batch.features)
        for depth in range(1, min(num_depths, self._num_heads) + 1):
            of_depth = states[:, : batch.tokens.shape[1] - depth, depth - 1]
            yield torch.log_softmax(self._logits_of(of_depth), -1)
