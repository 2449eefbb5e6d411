"""From what a model wrote to its answer: what comes after the template's own role marks is cut, whichever engine wrote.

Role marks of one token end texts while they are written, and drafts stop at them as at any end token. Those that are
plain text are looked for in finished texts, once: so drafted and plain texts are cut alike, and a step costs no more.
"""

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationResult
from laserbatch.pipeline.knowledge.turns import chat_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLE_MARK = "role_mark"  # the finish reason of a text that a role mark ended


class Answers:
    """Cuts the results of one model.

    Parameters
    ----------
    end_ids : tokens that its configuration names as end tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", end_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._marks = tokenizer, chat_marks(tokenizer)
        # Tokens at which the engine is to end texts, too.
        self.role_ids = {i: text for i, text in self._marks.end_tokens.items() if i not in end_ids}
        self._hidden_ids = np.array(sorted(tokenizer.all_special_ids), np.int32)  # that a result's text does not show

    def answer(self, result: GenerationResult | GenerationFailure) -> GenerationResult | GenerationFailure:
        """A result without what follows a role mark."""
        if isinstance(result, GenerationFailure):
            return result
        if result.end_id in self.role_ids:
            result = replace(result, finish_reason=ROLE_MARK, role_mark=self.role_ids[result.end_id])
        ids = result.token_ids
        shown = self._decoded(ids) if np.isin(ids, self._hidden_ids).any() else result.text
        mark = self._marks.turn_in(shown)
        if mark is None:
            return result
        num_kept = bisect_right(range(len(ids) + 1), mark.start(), key=lambda num: self._length(ids[:num])) - 1
        return replace(
            result,
            token_ids=ids[:num_kept],
            sources=result.sources[:num_kept],
            text=self._decoded(ids[:num_kept], skip_special_tokens=True),
            finish_reason=ROLE_MARK,
            role_mark=mark.group().strip(),
            num_invented=len(ids) - num_kept,
        )

    def _decoded(self, ids: np.ndarray, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)

    def _length(self, ids: np.ndarray) -> int:
        """Characters of some tokens, without a last one that is not whole."""
        return len(self._decoded(ids).rstrip("\ufffd"))
