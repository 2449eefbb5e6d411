"""The contract of drafters: a drafter proposes tokens, the verifier decides."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from laserbatch.pipeline.decoding.model.output_head import HiddenRows
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, TreeBatch

Observes = Literal["nothing", "decode", "prefill"]


@dataclass(frozen=True)
class Observation:
    """The target's results in a committed step; the tensors are valid until the next forward.

    `sequences` took part, with the drafts `trees`. The n committed tokens, in text order within each sequence, have
    `sequence_of` int64[n], an index in `sequences`; `positions` int32[n] in its text; `hidden` (n, hidden_size), the
    target's last hidden states, which its output layer reads. `rows` has logits: row `starts[i]` after the token before
    the tree of sequence i, row `starts[i] + 1 + j` after node j of that tree.
    """

    sequences: list[DecodingSequence]
    trees: TreeBatch
    sequence_of: np.ndarray
    positions: np.ndarray
    hidden: torch.Tensor
    rows: HiddenRows
    starts: np.ndarray


class Drafter:
    """Proposes tokens that may follow the last committed token of a sequence. A class defines `draft` or `draft_all`.

    Attributes
    ----------
    observes : the steps that `observe` gets. "nothing": none; "decode": all, but a prefix that several prompts share is
        computed once and shown once; "prefill": all, and each prompt is computed whole.
    """

    observes: Observes = "nothing"

    def draft(self, sequence: DecodingSequence) -> TokenTree:
        """A tree of at most `token_tree.MAX_NODES` tokens; may be empty. Must not change the sequence."""
        return EMPTY_TREE

    def draft_all(self, sequences: list[DecodingSequence], max_depths: list[int]) -> TreeBatch:
        """A tree for each sequence; nodes deeper than its entry of `max_depths`, the room in its text, are cut."""
        return TreeBatch.of([self.draft(sequence) for sequence in sequences])

    def observe(self, observation: Observation) -> None:
        """Called after a step whose tokens were committed, for the steps that `observes` names."""

    def forget(self, sequence: DecodingSequence) -> None:
        """Drop the state of a sequence that has ended."""


class NoDrafter(Drafter):
    """Proposes nothing: plain decoding, one token a step."""
