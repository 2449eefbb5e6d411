"""Cuts a model's output to its answer: thoughts before it and turns after it are cut, whichever engine wrote it.

Role marks of one token end texts while they are written, and drafts stop at them as at any end token. Role marks that
are plain text are searched for once, in finished texts: so drafted and plain texts are cut alike, at no cost per step.
"""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from laserbatch.pipeline.decoding.grammar import ThoughtMarks
from laserbatch.pipeline.decoding.sequence import GenerationRequest, GenerationResult, Outcome
from laserbatch.pipeline.knowledge.thoughts import has_marks, mark_tokens, opens_thoughts, without_thoughts
from laserbatch.pipeline.knowledge.turns import chat_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ROLE_MARK = "role_mark"  # the finish reason of a text that a role mark ended
UNCLOSED_THOUGHTS = "unclosed_thoughts"  # the finish reason of a text whose thoughts did not end: it has no answer
PROMPT_END_TOKENS = 16  # the end of a prompt that holds the mark with which a chat template opens thoughts


class Answers:
    """Cuts the results of one model; `end_ids` are the tokens that its configuration names as end tokens.

    `thinks` : whether the model may think before an answer even if its prompts do not begin thoughts.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", end_ids: tuple[int, ...], thinks: bool = False) -> None:
        self._tokenizer, self._marks = tokenizer, chat_marks(tokenizer)
        # More tokens at which the engine must end texts.
        self.role_ids = {i: text for i, text in self._marks.end_tokens.items() if i not in end_ids}
        added = tokenizer.added_tokens_decoder
        self._added = {token.content: i for i, token in added.items()}
        special = {i for i, token in added.items() if token.special}
        self._hidden_ids = special.union(tokenizer.all_special_ids)  # tokens that result.text does not show
        self._may_open, self._has_warned = has_marks(tokenizer), False
        self._thinks, self._mark_tokens = thinks, mark_tokens(tokenizer)

    def guided(self, request: GenerationRequest) -> GenerationRequest:
        """The request, with the marks of the thoughts after which its grammar holds, if the model may think first."""
        if request.grammar is None or self._mark_tokens is None:
            return self.unguided_thoughts(request)
        open_id, close_id = self._mark_tokens
        if self._opens_thoughts(request.prompt_ids):
            return replace(request, thoughts=ThoughtMarks(None, close_id))
        return replace(request, thoughts=ThoughtMarks(open_id, close_id)) if self._thinks else request

    def unguided_thoughts(self, request: GenerationRequest) -> GenerationRequest:
        """The request, without its grammar if the model may think first, for engines that cannot guide what follows."""
        if request.grammar is None or not (self._thinks or self._opens_thoughts(request.prompt_ids)):
            return request
        if not self._has_warned:
            logger.warning("answers are not guided, because the model may think first")
            self._has_warned = True
        return replace(request, grammar=None)

    def of(self, results: Iterable[Outcome], prompts: dict[str, np.ndarray]) -> Iterator[Outcome]:
        """Yield an engine's outcomes, with results cut; the prompt of each request is removed from `prompts`."""
        for result in results:
            prompt_ids = prompts.pop(result.request_id)
            yield self.answer(result, prompt_ids) if isinstance(result, GenerationResult) else result

    def answer(self, result: GenerationResult, prompt_ids: np.ndarray) -> GenerationResult:
        """A result without thoughts, and without the tokens from a role mark on."""
        if result.end_id in self.role_ids:
            result = replace(result, finish_reason=ROLE_MARK, role_mark=self.role_ids[result.end_id])
        ids = result.token_ids
        shown = self._decoded(ids) if not self._hidden_ids.isdisjoint(ids.tolist()) else result.text
        is_open = self._opens_thoughts(prompt_ids)
        answer = without_thoughts(
            self._tokenizer, shown, is_open, is_in_prompt=lambda mark: mark in self._decoded(prompt_ids),
            is_quoted=lambda mark: mark in self._added and self._added[mark] not in ids,
        )  # fmt: skip
        turn = self._marks.turn_in(shown, answer.spans[0][0] if answer.spans else 0)
        end = turn.start() if turn else len(shown)
        if answer.open_at is not None and answer.open_at <= end:
            return replace(result, finish_reason=UNCLOSED_THOUGHTS, num_thought_tokens=len(ids))
        if turn is None and answer.spans == ((0, len(shown)),):
            return result
        is_shown = np.zeros(len(ids), bool)
        for first, last in answer.spans:
            if first < end:
                is_shown[self._tokens(ids, first, bisect_left) : self._tokens(ids, min(last, end), bisect_right)] = True
        num_invented = len(ids) - self._tokens(ids, end, bisect_right) if turn else 0
        num_before_turn = len(ids) - num_invented
        result = replace(
            result, token_ids=ids[is_shown], sources=result.sources[is_shown],
            text=self._decoded(ids[is_shown], skip_special_tokens=True),
            num_thought_tokens=num_before_turn - int(is_shown.sum()),
            uncut=(ids[:num_before_turn], result.sources[:num_before_turn]), num_invented=num_invented,
        )  # fmt: skip
        return replace(result, finish_reason=ROLE_MARK, role_mark=turn.group().strip()) if turn else result

    def _opens_thoughts(self, prompt_ids: np.ndarray) -> bool:
        return self._may_open and opens_thoughts(self._tokenizer, self._decoded(prompt_ids[-PROMPT_END_TOKENS:]))

    def _decoded(self, ids: np.ndarray, skip_special_tokens: bool = False) -> str:
        return cast("str", self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens))

    def _tokens(self, ids: np.ndarray, num_chars: int, bisect: Callable[..., int]) -> int:
        """The number of tokens up to `num_chars`: the fewest that reach it (left), or the most within it (right)."""

        def length(num: int) -> int:
            return len(self._decoded(ids[:num]).rstrip("\ufffd"))  # without an incomplete last character

        num = bisect(range(len(ids) + 1), num_chars, key=length)
        return num if bisect is bisect_left else num - 1


def unclosed_thoughts(result: GenerationResult) -> str:
    """The reason why a row whose thoughts did not end has no text."""
    return (
        f"unclosed-thoughts: the model's thoughts did not end within {len(result.token_ids)} tokens, so there is no "
        "answer; raise decoding.max_new_tokens, or set decoding.thinking: off, if the model's chat template has a "
        "switch for thoughts"
    )
