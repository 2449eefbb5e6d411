"""Texts to train on, in batches, with what the target says of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.model.output_head import OutputHead

MOST_TOKENS = 512  # of a text; what comes behind is left out
HELD_BACK_EVERY = 10  # of the texts one in so many is held back


@dataclass(frozen=True)
class TrainingText:
    """A prompt, int32[m], and what the target answered, int32[n]."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray


@dataclass(frozen=True)
class Batch:
    """B texts of at most T tokens, and the target's states.

    `tokens` int64 (B, T) and `is_token` bool (B, T). `features` (B, T + 1, hidden_size): the target's last hidden
    states, of which number i chose token i: that of the prompt's last token first. `prompts` int64 (B, P), padded on
    the left, `is_prompt` bool (B, P).
    """

    tokens: torch.Tensor
    is_token: torch.Tensor
    features: torch.Tensor
    prompts: torch.Tensor
    is_prompt: torch.Tensor


def held_back(texts: Sequence[TrainingText]) -> tuple[list[TrainingText], list[TrainingText]]:
    """Texts to train on, and those to judge by, at least one."""
    judged = list(texts[::HELD_BACK_EVERY])
    return [text for number, text in enumerate(texts) if number % HELD_BACK_EVERY], judged


def batches_of(texts: Sequence[TrainingText], size: int, seed: int | None = None) -> list[list[TrainingText]]:
    """All texts, those of like length together; `seed` shuffles."""
    order = np.argsort([len(text.token_ids) for text in texts], kind="stable")
    batches = [[texts[place] for place in order[start : start + size]] for start in range(0, len(order), size)]
    if seed is None:
        return batches
    return [batches[place] for place in np.random.default_rng(seed).permutation(len(batches))]


class Target:
    """A model of transformers in memory, which is not trained."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self.embed = model.get_input_embeddings()
        head = OutputHead(model)
        self.logits_of, self._body = head.logits_of, head.body
        self.device = self.embed.weight.device

    @torch.no_grad()
    def batch(self, texts: Sequence[TrainingText]) -> Batch:
        """Some texts with their states."""
        texts = [TrainingText(text.prompt_ids, text.token_ids[:MOST_TOKENS]) for text in texts]
        prompts, is_prompt = _padded([text.prompt_ids for text in texts], left=True)
        tokens, is_token = _padded([text.token_ids for text in texts], left=False)
        ids, mask = torch.cat((prompts, tokens), 1).to(self.device), torch.cat((is_prompt, is_token), 1).to(self.device)
        features = features_of(self._body, ids, mask)[:, prompts.shape[1] - 1 :]
        moved = (each.to(self.device) for each in (tokens, is_token, prompts, is_prompt))
        tokens, is_token, prompts, is_prompt = moved
        return Batch(tokens, is_token, features, prompts, is_prompt)


def features_of(body: torch.nn.Module, ids: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
    """Last hidden states float32 (B, n, hidden_size) of ids, int64 (B, n), that are padded on either side."""
    positions = (is_token.cumsum(1) - 1).clamp_min(0)
    inputs = {"input_ids": ids, "attention_mask": is_token.long(), "position_ids": positions}
    return body(**inputs, use_cache=False).last_hidden_state.float()


def _padded(rows: Sequence[np.ndarray], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 and bool (len(rows), longest)."""
    longest = max(map(len, rows))
    ids, is_real = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), bool)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[number, place], is_real[number, place] = row, True
    return torch.from_numpy(ids), torch.from_numpy(is_real)
