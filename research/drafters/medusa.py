"""Medusa heads: head k predicts the k-th token ahead from a hidden state of the target (Cai et al., ICML 2024, 2.1)."""

import numpy as np
import torch
from torch import nn

from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.drafters.drafter import Observation
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.research.drafters.model_drafter import DraftModel


class MedusaHeads(nn.Module):
    """Residual blocks, one for each token ahead; the target's output layer reads their results.

    A block starts as the identity, with zero weights, as in section 2.2.1.
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        blocks = [nn.Linear(hidden_size, hidden_size) for _ in range(num_heads)]
        for block in blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """States (..., num_heads, hidden_size) of the first, second, ... token after the token that each hidden state
        (..., hidden_size) predicts."""
        return torch.stack([hidden + nn.functional.silu(block(hidden)) for block in self.blocks], -2)


class MedusaModel(DraftModel):
    """Medusa heads as a draft model; the prediction of a head does not depend on the drafted path.

    `logits_of` is the target's output layer, from (n, hidden_size) to (n, vocab_size).
    """

    observes = "decode"

    def __init__(self, heads: MedusaHeads, logits_of, log_acceptance=None) -> None:
        self._heads, self._logits_of = heads, logits_of
        self.log_acceptance = log_acceptance or self.log_acceptance
        self._hidden: dict[DecodingSequence, torch.Tensor] = {}  # the state that predicted the last token

    def has_room(self, sequence: DecodingSequence) -> bool:
        return sequence in self._hidden

    def begin(self, sequences: list[DecodingSequence]) -> None:
        states = self._heads(torch.stack([self._hidden[sequence] for sequence in sequences]))
        logits = self._logits_of(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        self._log_q = torch.log_softmax(logits.float(), -1)

    def log_q(self, trees: TreeBatch, tree_of: np.ndarray, places: np.ndarray) -> torch.Tensor:
        """Log probabilities from the heads; -inf for all tokens at depths without a head."""
        depths = np.zeros(len(places), np.int64)
        if len(trees):
            depths[places >= 0] = trees.depths[(trees.starts[tree_of] + places)[places >= 0]]
        device, deepest = self._log_q.device, self._log_q.shape[1] - 1
        log_q = self._log_q[to_device(tree_of, device), to_device(np.minimum(depths, deepest), device)]
        return log_q.masked_fill(to_device(depths > deepest, device)[:, None], -torch.inf)

    @torch.inference_mode()
    def observe(self, observation: Observation) -> None:
        last = np.flatnonzero(np.diff(observation.sequence_of, append=-1))  # the last token of each sequence
        for place in last.tolist():
            sequence = observation.sequences[observation.sequence_of[place]]
            if observation.positions[place] == len(sequence.context) - 2:  # it predicted the last token
                self._hidden[sequence] = observation.hidden[place].clone()

    def forget(self, sequence: DecodingSequence) -> None:
        self._hidden.pop(sequence, None)
