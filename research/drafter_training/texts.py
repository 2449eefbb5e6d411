"""Batches of texts to train on, with the hidden states and logits of the target."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from laserbatch.pipeline.decoding.model.output_head import OutputHead
from laserbatch.research.learning import batches_by_length, padded

MAX_TEXT_TOKENS = 512  # longer texts are cut for training
HELD_BACK_EVERY = 10  # one text in this many is held back


@dataclass(frozen=True)
class TrainingText:
    """A prompt, int32[m], and the answer of the target, int32[n]."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray


@dataclass
class Batch:
    """B texts of at most T tokens.

    `tokens` is int64 (B, T), `is_token` bool (B, T). `prompts`, int64 (B, P), are padded on the left; `is_prompt` is
    bool (B, P). `features` are the target's hidden states, from `features_by`.
    """

    tokens: torch.Tensor
    is_token: torch.Tensor
    prompts: torch.Tensor
    is_prompt: torch.Tensor
    features: torch.Tensor = field(init=False)

    @property
    def inputs(self) -> dict[str, torch.Tensor | bool]:
        """The arguments of a transformers model for each prompt followed by its text."""
        ids, mask = torch.cat((self.prompts, self.tokens), 1), torch.cat((self.is_prompt, self.is_token), 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions, "use_cache": False}

    def features_by(self, body: torch.nn.Module) -> torch.Tensor:
        """Last hidden states, float32 (B, T + 1, hidden_size); state i predicts token i."""
        return body(**self.inputs).last_hidden_state.float()[:, self.prompts.shape[1] - 1 :]


def held_back(texts: Sequence[TrainingText]) -> tuple[list[TrainingText], list[TrainingText]]:
    """Split texts into texts to train on and texts, at least one, that are held back for the evaluation."""
    judged = list(texts[::HELD_BACK_EVERY])
    return [text for number, text in enumerate(texts) if number % HELD_BACK_EVERY], judged


def batches_of(texts: Sequence[TrainingText], size: int, seed: int | None = None) -> list[list[TrainingText]]:
    """Batch texts of similar length; `seed` shuffles the batches."""
    numbered = batches_by_length([len(text.token_ids) for text in texts], size)
    batches = [[texts[number] for number in numbers] for numbers in numbered]
    if seed is None:
        return batches
    return [batches[place] for place in np.random.default_rng(seed).permutation(len(batches))]


class Target:
    """A transformers model in memory, with frozen weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.embed = cast("torch.nn.Embedding", model.get_input_embeddings())
        self._head = OutputHead(model)
        self.device = self.embed.weight.device

    @torch.no_grad()
    def batch(self, texts: Sequence[TrainingText]) -> Batch:
        texts = [TrainingText(text.prompt_ids, text.token_ids[:MAX_TEXT_TOKENS]) for text in texts]
        prompts = padded([text.prompt_ids for text in texts], left=True)
        tensors = *padded([text.token_ids for text in texts]), *prompts
        batch = Batch(*(each.to(self.device) for each in tensors))
        batch.features = batch.features_by(self._head.body)
        return batch

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """Logits, float32 (..., vocab_size), of last hidden states (..., hidden_size)."""
        return self._head.logits_of(states.flatten(0, -2)).float().unflatten(0, states.shape[:-1])
