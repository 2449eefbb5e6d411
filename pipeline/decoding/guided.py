"""Guided decoding: texts keep to a grammar (`GenerationRequest.grammar`), drafted or not.

A verifier judges drafts by the model's own logits, and of the accepted tokens only those stay that the grammar allows.
If the model's choice is not allowed, its row is judged again among allowed tokens only. This is rare, so few masks are
computed; one takes as long as checking a dozen tokens or more. Greedy texts are the same as if logits were always
masked, and samples have the same distribution. Where a grammar allows only one token, it is appended without a forward:
the next step feeds it together with the token before it.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch

from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.grammar import Grammars, Guide
from laserbatch.pipeline.decoding.model.output_head import StepLogits
from laserbatch.pipeline.decoding.sequence import MAX_FORCED, DecodingSequence, GenerationFailure
from laserbatch.pipeline.decoding.token_tree import TreeBatch


class GuidedLogits:
    """The rows of a step, with a logit of minus infinity for tokens that a sequence's grammar forbids.

    Each sequence has a row after its last committed token, then one after each node of its tree.
    """

    def __init__(self, rows: StepLogits, guides: list[Guide | None], trees: TreeBatch) -> None:
        self._rows, self._guides, self._trees = rows, guides, trees
        self.device, self.num_rows = rows.device, rows.num_rows
        self._tree_of = np.repeat(np.arange(len(trees.sizes)), trees.sizes + 1)  # each row's tree
        first_rows = np.cumsum(trees.sizes + 1) - (trees.sizes + 1)
        self._node_of = np.arange(self.num_rows) - first_rows[self._tree_of] - 1  # -1: the last committed token

    @torch.inference_mode()
    def of(self, rows: np.ndarray) -> torch.Tensor:
        """Logits of some rows, int64[n]: (n, vocab_size)."""
        logits = self._rows.of(rows)
        masks = self.masks(rows, logits.shape[-1])
        if self.device.type == "cpu":
            bits = np.unpackbits(masks.view(np.uint8), axis=1, count=logits.shape[-1], bitorder="little")
            return logits.masked_fill_(torch.from_numpy(bits.view(bool)).logical_not_(), -math.inf)
        words = to_device(masks.view(np.int32), self.device)
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self.device)) & 1
        return logits.masked_fill_(bits.flatten(1)[:, : logits.shape[-1]] == 0, -math.inf)

    def masks(self, rows: np.ndarray, vocab_size: int) -> np.ndarray:
        """Masks of the tokens allowed in some rows, all without a grammar: uint32 (n, ceil(vocab_size / 32))."""
        masks = np.full((len(rows), -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        for mask, row in zip(masks, rows.tolist(), strict=True):
            guide = self._guides[self._tree_of[row]]
            if guide is not None:
                guide.write_mask(self._path_to(row), mask)
        return masks

    def _path_to(self, row: int) -> list[int]:
        """The drafted tokens from the last committed one to a row's node."""
        node, first, path = int(self._node_of[row]), int(self._trees.starts[self._tree_of[row]]), []
        while node >= 0:
            path.append(int(self._trees.token_ids[first + node]))
            node = int(self._trees.parents[first + node])
        return path[::-1]


def begin(sequences: Iterable[DecodingSequence], grammars: Grammars) -> None:
    """Give a guide to sequences that have a grammar and no guide yet, and append the tokens that must come first."""
    for sequence in sequences:
        request = sequence.request
        if sequence.guide is None and request.grammar is not None:
            guide = sequence.guide = grammars.guide(request.grammar, sequence.max_new_tokens, request.thoughts)
            sequence.append_forced(guide.forced(_room(sequence)))


def advance(sequences: Iterable[DecodingSequence]) -> dict[DecodingSequence, str | GenerationFailure]:
    """Advance guides by a step's tokens, and append tokens that must come next; return outcomes of texts that end."""
    outcomes: dict[DecodingSequence, str | GenerationFailure] = {}
    for sequence in sequences:
        if (guide := sequence.guide) is None:
            continue
        try:
            guide.advance(sequence.output_ids)
            sequence.append_forced(guide.forced(_room(sequence)))
        except ValueError as error:
            outcomes[sequence] = GenerationFailure(sequence.request.request_id, f"left-form: {error}")
            continue
        if guide.is_complete:
            sequence.end_id = guide.end_id
            outcomes[sequence] = "end_of_text"
    return outcomes


def _room(sequence: DecodingSequence) -> int:
    """The number of tokens that may be appended; the last token is left to the next step."""
    return max(0, min(MAX_FORCED, sequence.num_left - 1))
