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
    """What the target computed in a step that has been committed; its tensors hold until the next forward.

    `sequences` took part, with `trees`. The n tokens that stay, of each sequence in text order: `sequence_of` int64[n],
    `positions` int32[n] in its text, and `hidden` (n, hidden_size), the target's last hidden states, which its output
    layer reads. `rows` has logits after each sequence's last committed token, row `starts[i]`, and after node j of its
    tree, row `starts[i] + 1 + j`.
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
        """A tree for each sequence, which has room for so many tokens of a draft; deeper ones are cut."""
        return TreeBatch.of([self.draft(sequence) for sequence in sequences])

    def observe(self, observation: Observation) -> None:
        """Called after a step whose tokens were committed, for the steps that `observes` names."""

    def forget(self, sequence: DecodingSequence) -> None:
        """Drop what is held for a sequence that has ended."""


class NoDrafter(Drafter):
    """Proposes nothing: plain decoding, one token a step."""
