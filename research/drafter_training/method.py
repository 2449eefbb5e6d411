"""The interface of methods that train a drafter, and the evaluation of a drafter."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression
from torch import nn

from laserbatch.research.drafter_training.texts import Batch, Target, TrainingText, batches_of
from laserbatch.research.drafters.trained import CONFIDENCES, WEIGHTS_NAME, DrafterCard
from laserbatch.research.learning import save_whole

DEPTHS = 5
BATCH_SIZE = 8
NUM_CANDIDATES = 4  # at each place, acceptance curves are fitted to this many most likely tokens


class Method:
    """A drafter in training; the parameters of `module` that require gradients are trained."""

    module: nn.Module

    def save(self, folder: Path, model_dir: Path) -> None:
        """Write the weights as `drafters/trained.py` reads them; `model_dir` is the folder of the target."""
        save_whole(self.module.state_dict(), folder / WEIGHTS_NAME, {})

    def pace(self, name: str) -> float:
        """The factor of a parameter's learning rate."""
        return 1.0

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch, a scalar."""
        raise NotImplementedError

    def log_probs_by_depth(self, batch: Batch, num_depths: int) -> Iterator[torch.Tensor]:
        """Yield for depths j = 1, 2, ... log probabilities (B, T - j, vocab_size) of token s + j drafted after token s.

        The drafted tokens between them are assumed to be the text's tokens.
        """
        raise NotImplementedError


@torch.no_grad()
def judged(card: DrafterCard, method: Method, target: Target, texts: Sequence[TrainingText]) -> DrafterCard:
    """The card of a drafter with its acceptance on held-back texts under greedy verification."""
    num_drafted, right, num_tokens, num_steps = np.zeros(DEPTHS), np.zeros(DEPTHS), 0, 0
    pairs: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(DEPTHS)]
    method.module.eval()
    for part in batches_of([text for text in texts if len(text.token_ids) > DEPTHS], BATCH_SIZE):
        batch = target.batch(part)
        alive, runs = batch.is_token, torch.zeros_like(batch.tokens)
        for depth, log_q in enumerate(method.log_probs_by_depth(batch, DEPTHS)):
            labels = batch.tokens[:, depth + 1 :]
            alive = alive[:, : labels.shape[1]] & batch.is_token[:, depth + 1 :]
            best = log_q.topk(NUM_CANDIDATES, -1)
            is_right = best.indices == labels[..., None]
            num_drafted[depth] += int(alive.sum())
            right[depth] += int((is_right[..., 0] & alive).sum())
            pairs[depth].append((best.values[alive].exp().cpu().numpy(), is_right[alive].cpu().numpy()))
            alive = alive & is_right[..., 0]
            runs[:, : alive.shape[1]] += alive
        for length, of_text in zip(batch.is_token.sum(1).tolist(), runs.tolist(), strict=True):
            num_tokens, num_steps = num_tokens + length, num_steps + _steps(of_text[:length])
    curves = tuple(_curve(*map(np.concatenate, zip(*of_depth, strict=True))) for of_depth in pairs if of_depth)
    acceptance = (right / np.maximum(num_drafted, 1))[: len(curves)]  # only depths that the drafter has
    tokens_per_step = round(num_tokens / max(1, num_steps), 4)
    results = {"acceptance": tuple(acceptance.round(4).tolist()), "curves": curves, "tokens_per_step": tokens_per_step}
    return card.model_copy(update=results)


def _steps(runs: list[int]) -> int:
    """The number of steps of a text if `runs[s]` drafted tokens after token s are accepted; step 1 writes token 0."""
    num_steps, place = 1, 0
    while place < len(runs) - 1:
        place += runs[place] + 1
        num_steps += 1
    return num_steps


def _curve(confidence: np.ndarray, is_right: np.ndarray) -> tuple[float, ...]:
    """Fit the share of right tokens, nondecreasing, at each of CONFIDENCES; without data, return the confidences."""
    if confidence.size == 0:
        return CONFIDENCES
    fit = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(confidence.ravel(), is_right.ravel())
    return tuple(fit.predict(CONFIDENCES).round(4).tolist())
