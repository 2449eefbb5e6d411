"""What every way to draft has in common: a drafter proposes and never decides."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from laserbatch.pipeline.decoding.model.output_head import HiddenRows
from laserbatch.pipeline.decoding.sequence import Sequence
from laserbatch.pipeline.decoding.token_tree import EMPTY_TREE, TokenTree, TreeBatch


@dataclass(frozen=True)
class Observation:
    """What the target computed in a step that has been committed; its tensors hold until the next forward.

    `sequences` took part, with `trees`. The n tokens that stay, of each sequence in text order: `sequence_of` int64[n],
    `positions` int32[n] in its text, and `hidden` (n, hidden_size), the target's last hidden states, which its output
    layer reads. `rows` has logits after each sequence's last committed token, row `starts[i]`, and after node j of its
    tree, row `starts[i] + 1 + j`.
    """

    sequences: list[Sequence]
    trees: TreeBatch
    sequence_of: np.ndarray
    positions: np.ndarray
    hidden: torch.Tensor
    rows: HiddenRows
    starts: np.ndarray


class Drafter:
    """Proposes what may follow sequences' last committed tokens. A class has `draft_all`, or only `draft`.

    `sees` : what of the target's work it is shown: "nothing"; "texts", all steps, but not what is computed once for
        prompts that begin alike; "prompts", whole ones, so that each is computed for itself.
    """

    sees: Literal["nothing", "texts", "prompts"] = "nothing"

    def draft(self, sequence: Sequence) -> TokenTree:
        """A tree of at most `token_tree.MAX_NODES` tokens; may be empty. Must not change the sequence."""
        return EMPTY_TREE

    def draft_all(self, sequences: list[Sequence], max_depths: list[int]) -> TreeBatch:
        """A tree for each sequence, which has room for so many tokens of a draft; deeper ones are cut."""
        return TreeBatch.of([self.draft(one) for one in sequences])

    def observe(self, observation: Observation) -> None:
        """Look at a step, whose tokens have become part of the texts. Called where `sees` says so."""

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""


class NoDrafter(Drafter):
    """Proposes nothing: plain decoding, one token a step."""
