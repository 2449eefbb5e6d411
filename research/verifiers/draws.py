"""Sampling rules: verifiers that sample the target's tokens, given the draft tokens and their distributions.

A rule samples one token after each place of a draft so that the token follows the target's distribution, whatever was
drafted; a draft token is accepted if it is the sample. The draft may depend on sampled tokens only through the draws
that a rule receives. A draft token that was chosen, not sampled, counts as drawn from a distribution of only this
token, after all other draws of its place.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.guided import GuidedLogits
from laserbatch.pipeline.decoding.model.sampling import SampledLogits, gumbel_noise, uniform
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers.relaxed import Greedy

SECOND_SAMPLE_SEED = 0x2545F4914F6CDD1D


@dataclass(frozen=True)
class Draws:
    """The draws after each of R places, at most K.

    `tokens` int64 (R, K) is -1 if there are fewer draws; `rows` int64 (R, K) is each draw's row of `log_q` (num_rows,
    vocab_size), -1 for a chosen token; `uniform` float64 (R, K) is a number between 0 and 1 for each decision.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    log_q: torch.Tensor
    uniform: torch.Tensor

    def distribution(self, places: torch.Tensor, number: int) -> torch.Tensor:
        """The distribution from which draw `number` of some places, int64[n], comes: float32 (n, vocab_size)."""
        tokens, rows = self.tokens[places, number], self.rows[places, number]
        certain = torch.nn.functional.one_hot(tokens, self.log_q.shape[-1]).float()
        return torch.where((rows >= 0)[:, None], self.log_q[rows.clamp_min(0)].exp(), certain)

    def only(self, which: torch.Tensor) -> "Draws":
        """Only the draws selected by `which`, bool (R, K)."""
        return replace(self, tokens=torch.where(which, self.tokens, -1))


Draw = Callable[[torch.Tensor, Draws], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class SamplingRule(Greedy):
    """Accepts a draft token if `draw` returns it.

    `draw` : maps the target's distributions (R, vocab_size) and the draws after each place to accepted draft tokens,
        int64[R], -1 for none, and to the distributions (R, vocab_size) to sample from if none is accepted.
    """

    draw: Draw

    def sampled(self, temperature, rows, seeds, lengths, trees) -> SampledLogits:
        """Rows whose argmax is the sample of this rule; `SampledLogits` describes the parameters.

        A row of `GuidedLogits` is judged after its first sample was forbidden. That depended on the draws and on their
        random numbers, so the second sample uses neither.
        """
        if isinstance(rows, GuidedLogits):
            return SampledLogits(temperature, rows, [seed ^ SECOND_SAMPLE_SEED for seed in seeds], lengths, trees)
        return DrawnLogits(self, temperature, rows, seeds, lengths, trees)


class DrawnLogits(SampledLogits):
    """The rows of a step: each is 1 at the token that a rule samples after it, and 0 elsewhere."""

    def __init__(self, rule: SamplingRule, temperature, rows, seeds, lengths, trees: TreeBatch) -> None:
        super().__init__(temperature, rows, seeds, lengths, trees)
        self._rule = rule
        drawn, q_rows = np.empty(0, np.int64), np.empty(0, np.int64)
        self._log_q = None
        if trees.proposals is not None:
            drawn, q_rows, self._log_q = trees.proposals.nodes, trees.proposals.rows, trees.proposals.log_q
        chosen = np.setdiff1d(np.arange(len(trees)), drawn)
        nodes = np.concatenate((drawn, chosen))
        q_rows = np.concatenate((q_rows, np.full(len(chosen), -1)))
        after = (trees.starts + np.arange(trees.num_trees) + 1)[trees.tree_of[nodes]] + trees.parents[nodes]  # the row
        order = np.argsort(after, kind="stable")
        counts = np.bincount(after, minlength=rows.num_rows)
        numbers = np.arange(len(nodes)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._tokens, self._q_rows = (np.full((rows.num_rows, counts.max(initial=0)), -1) for _ in range(2))
        self._tokens[after[order], numbers] = trees.token_ids[nodes[order]]
        self._q_rows[after[order], numbers] = q_rows[order]

    @torch.inference_mode()
    def of(self, rows: np.ndarray) -> torch.Tensor:
        """The values of rows int64[n], float32 (n, vocab_size); NaN for rows whose target logits are not finite."""
        p = torch.softmax(self._rows.of(rows).float() / self._temperature, -1)
        is_finite = p.isfinite().all(-1)
        seeds, positions = self._seeds_and_positions(rows)
        tokens, q_rows = to_device(np.stack((self._tokens[rows], self._q_rows[rows])), self.device)
        log_q = p.new_empty((1, p.shape[-1])) if self._log_q is None else self._log_q
        numbers = -torch.arange(1, tokens.shape[1] + 1, device=tokens.device)  # Gumbel noise uses those above 0
        draws = Draws(tokens, q_rows, log_q, uniform(seeds, positions, numbers))
        drafted, residual = self._rule.draw(torch.where(is_finite[:, None], p, 1 / p.shape[-1]), draws)
        resampled = (residual.log() + gumbel_noise(seeds, positions, p.shape[-1])).argmax(-1)
        result = torch.zeros_like(p).scatter_(1, torch.where(drafted >= 0, drafted, resampled)[:, None], 1.0)
        return result.masked_fill_(~is_finite[:, None], torch.nan)
