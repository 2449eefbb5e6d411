"""Trains a small model with the target's tokenizer, by distillation on the target's own texts."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from laserbatch.pipeline.decoding.model.folder import load_tokenizer
from laserbatch.research.drafter_training.method import Method
from laserbatch.research.drafter_training.texts import Batch, Target


class Small(Method):
    """Trains a Llama by the cross entropy to the target's distribution (Kim and Rush 2016, 3.1)."""

    def __init__(self, target: Target, config: LlamaConfig) -> None:
        self._model = LlamaForCausalLM(config)
        self.module = nn.Module.to(self._model, target.device)
        self._target = target

    def save(self, folder: Path, model_dir: Path) -> None:
        self._model.save_pretrained(folder)
        load_tokenizer(model_dir).save_pretrained(folder)
        if (model_dir / "generation_config.json").is_file():
            shutil.copyfile(model_dir / "generation_config.json", folder / "generation_config.json")

    def loss(self, batch: Batch) -> torch.Tensor:
        p = torch.softmax(self._target.logits_of(batch.features[:, :-1]), -1)
        of_token = -(p * self._log_q(batch)).sum(-1)
        return (of_token * batch.is_token).sum() / batch.is_token.sum()

    def log_probs_by_depth(self, batch: Batch, num_depths: int) -> Iterator[torch.Tensor]:
        log_q = self._log_q(batch)
        for depth in range(1, num_depths + 1):
            yield log_q[:, depth:]

    def _log_q(self, batch: Batch) -> torch.Tensor:
        """Log probabilities of each token given the tokens before it: (B, T, vocab_size)."""
        logits = self.module(**batch.inputs, logits_to_keep=batch.tokens.shape[1] + 1).logits
        return torch.log_softmax(logits[:, :-1].float(), -1)
