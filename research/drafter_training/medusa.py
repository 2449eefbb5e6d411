"""Trains Medusa heads on the target's own texts (Cai et al., ICML 2024).

Medusa-1 does not change the target (section 2.2.1). Medusa-2 adapts the target to its heads (2.2.2) by a LoRA adapter;
self-distillation (2.3.2) keeps the adapted model close to the target.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from laserbatch.pipeline.decoding.model.output_head import OutputHead
from laserbatch.research.drafter_training.method import Method
from laserbatch.research.drafter_training.texts import Batch, Target
from laserbatch.research.drafters.medusa import MedusaHeads
from laserbatch.research.drafters.trained import WEIGHTS_NAME
from laserbatch.research.learning import save_whole, with_lora

DECAY = 0.8  # the loss of head k has the weight 0.8^k
HEADS_WEIGHT = 0.2  # weight of the heads' loss relative to the divergence of the adapted model from the target
RANK, ALPHA, ADAPTER_PACE = 16, 8, 0.1
ADAPTER_NAME = "adapter"


class Medusa(Method):
    """Trains `num_heads` heads: head k predicts token s + k from the state that predicted token s."""

    def __init__(self, target: Target, num_heads: int) -> None:
        self.module = self.heads = MedusaHeads(target.embed.weight.shape[1], num_heads).to(target.device)
        self._logits_of, self._num_heads = target.logits_of, num_heads

    def loss(self, batch: Batch) -> torch.Tensor:
        return self._loss_of(batch, batch.features)

    def _loss_of(self, batch: Batch, features: torch.Tensor) -> torch.Tensor:
        total = features.new_zeros(())
        for number, log_q in enumerate(self._log_probs(batch, features, self._num_heads)):
            labels, is_token = batch.tokens[:, number + 1 :], batch.is_token[:, number + 1 :]
            of_token = -log_q.gather(-1, labels[..., None])[..., 0]
            total = total + DECAY ** (number + 1) * (of_token * is_token).sum() / is_token.sum().clamp_min(1)
        return total

    def log_probs_by_depth(self, batch: Batch, num_depths: int) -> Iterator[torch.Tensor]:
        return self._log_probs(batch, batch.features, num_depths)

    def _log_probs(self, batch: Batch, features: torch.Tensor, num_depths: int) -> Iterator[torch.Tensor]:
        states = self.heads(features)
        for depth in range(1, min(num_depths, self._num_heads) + 1):
            of_depth = states[:, : batch.tokens.shape[1] - depth, depth - 1]
            yield torch.log_softmax(self._logits_of(of_depth), -1)


class Medusa2(Medusa):
    """Trains the heads together with an adapter of the target. Raises ConfigError if peft is not installed."""

    def __init__(self, target: Target, num_heads: int) -> None:
        super().__init__(target, num_heads)
        self._tuned = with_lora(copy.deepcopy(target.model), RANK, ALPHA)
        self._body = OutputHead(cast("PreTrainedModel", self._tuned.get_base_model())).body
        self.module = nn.ModuleDict({"heads": self.heads, "tuned": self._tuned})

    def save(self, folder: Path, model_dir: Path) -> None:
        save_whole(self.heads.state_dict(), folder / WEIGHTS_NAME, {})
        self._tuned.peft_config["default"].base_model_name_or_path = model_dir.name
        self._tuned.save_pretrained(str(folder / ADAPTER_NAME), save_embedding_layers=False)

    def pace(self, name: str) -> float:
        return ADAPTER_PACE if "lora" in name else 1.0

    def loss(self, batch: Batch) -> torch.Tensor:
        features = batch.features_by(self._body)
        log_p, log_q = (torch.log_softmax(self._logits_of(each[:, :-1]), -1) for each in (batch.features, features))
        moved = (log_p.exp() * (log_p - log_q)).sum(-1)[batch.is_token].mean()
        return moved + HEADS_WEIGHT * self._loss_of(batch, features)

    def log_probs_by_depth(self, batch: Batch, num_depths: int) -> Iterator[torch.Tensor]:
        return self._log_probs(batch, batch.features_by(self._body), num_depths)
