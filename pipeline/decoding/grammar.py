"""Grammars of texts, and the tokens that they allow next. llguidance compiles them and computes masks.

Where a grammar forces bytes, a mask allows one token, so a text does not depend on where steps end. Before the token
limit would cut an answer, masks allow only tokens that close what is open.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import llguidance
import numpy as np

from laserbatch.pipeline.errors import ConfigError, first_line

MARGIN = 6  # closing begins this many tokens before it must, as one token may open a further part
MAX_SHORTEST = 256  # an answer that closing does not end within this many tokens is cut at its limit


class ThoughtMarks(NamedTuple):
    """The tokens that begin and end the thoughts before an answer; `open_id` is None if the prompt begins them."""

    open_id: int | None
    close_id: int


class Grammars:
    """The grammars of an engine, compiled for its tokenizer.

    Raises ConfigError: llguidance cannot read the tokenizer.

    `vocab_size` : number of columns of the model's logits.
    `end_ids` : the tokens that may end a text where its grammar allows the end.
    """

    def __init__(self, tokenizer, vocab_size: int, end_ids: Iterable[int]) -> None:
        import llguidance.hf  # here: it loads transformers

        end_ids = list(end_ids)
        if not end_ids:
            raise ConfigError("answers cannot be guided: the model has no end token; set `decoding.guided: off`")
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, vocab_size, end_ids)
        except Exception as error:  # it may raise anything
            raise ConfigError(
                f"answers cannot be guided with this model's tokenizer: {first_line(error)}; set `decoding.guided: off`"
            ) from error
        self._end_ids = tuple(end_ids)
        self._closing = _Closing.of(self._tokenizer, end_ids)
        self._compiled: dict[str, tuple[llguidance.LLMatcher, int]] = {}

    def guide(self, grammar: str, max_tokens: int, thoughts: ThoughtMarks | None = None) -> "Guide":
        """The guide of a new text of at most `max_tokens`. Raises ConfigError: the grammar does not compile.

        `thoughts` : as in `GenerationRequest`.
        """
        if grammar not in self._compiled:
            require_grammar(grammar, self._tokenizer)
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            rest = Guide(matcher.deep_copy(), self._closing, self._end_ids, max_tokens, 0).shortest_rest()
            self._compiled[grammar] = matcher, rest if rest < MAX_SHORTEST else -MARGIN
        matcher, shortest = self._compiled[grammar]
        arguments = matcher.deep_copy(), self._closing, self._end_ids, max_tokens, shortest
        return Guide(*arguments) if thoughts is None else ThinkingGuide(*arguments, thoughts)

    def forced_in(self, grammar: str, token_ids: np.ndarray, close_id: int | None = None) -> np.ndarray:
        """Whether each token of a written text, int32[n], was the only one that its grammar allowed: bool[n].

        False up to the token `close_id`, which ends thoughts, and after the first token that the grammar does not
        allow. Raises ConfigError: the grammar does not compile.
        """
        require_grammar(grammar, self._tokenizer)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        is_forced = np.zeros(len(token_ids), bool)
        written = token_ids.tolist()
        first = written.index(close_id) + 1 if close_id in written else 0
        for place, token_id in enumerate(written[first:], first):
            is_forced[place] = token_id in matcher.compute_ff_tokens()[:1]
            if matcher.is_stopped() or not matcher.try_consume_tokens([token_id]):
                break
        return is_forced


class Guide:
    """The state of a text's grammar: the tokens that it allows after the output so far, and after drafts."""

    def __init__(
        self, matcher: llguidance.LLMatcher, closing: "_Closing", end_ids: tuple[int, ...], max_tokens: int,
        shortest: int,
    ) -> None:  # fmt: skip
        self.end_id, self._end_ids = end_ids[0], end_ids
        self._matcher, self._closing = matcher, closing
        self._max_tokens, self._shortest = max_tokens, shortest  # tokens of the text and of the shortest answer
        self._num_before = 0  # tokens of the text before those that the matcher consumes
        self._num_output = 0  # committed tokens that the matcher has consumed
        self._path: list[int] = []  # drafted tokens that it has consumed after them

    @property
    def is_complete(self) -> bool:
        """Whether only the end may follow the committed output."""
        return self._matcher.is_stopped()

    def advance(self, output_ids: np.ndarray) -> None:
        """Consume the committed tokens of the whole output, int32[n]. Raises ValueError: the grammar forbids one."""
        new = output_ids[self._num_output :].tolist()
        if new != self._path and self._move(new) < len(new):
            raise ValueError(f"the grammar forbids token {new[len(self._path)]} before position {len(output_ids)}")
        self._num_output, self._path = len(output_ids), []

    def forced(self, max_tokens: int) -> list[int]:
        """The tokens that must come next, at most `max_tokens`; they are consumed as committed."""
        token_ids: list[int] = []
        while len(token_ids) < max_tokens and (next_ids := self._matcher.compute_ff_tokens()):
            token_ids.append(next_ids[0])
            if not self._matcher.try_consume_tokens(next_ids[:1]):
                raise ValueError(f"the grammar forces token {next_ids[0]}, and forbids it")
        self._num_output += len(token_ids)
        return token_ids

    def num_allowed(self, token_ids: list[int]) -> int:
        """The number of leading tokens of `token_ids` that may follow the committed output; masks are seldom needed."""
        if self._path:
            self._matcher.rollback(len(self._path))
            self._path = []
        for place, token_id in enumerate(token_ids):
            if self._must_close(place):
                mask = np.empty(self._closing.masks.shape[1], np.uint32)
                self._write_allowed(mask, must_close=True)
                if not mask[token_id // 32] >> np.uint32(token_id % 32) & 1:
                    return place
            elif (forced := self._matcher.compute_ff_tokens()) and forced[0] != token_id:
                return place
            if token_id in self._end_ids:  # nothing follows it; the matcher stays in front of it
                return place + (self._matcher.is_stopped() or self._matcher.validate_tokens([token_id]))
            if not self._matcher.try_consume_tokens([token_id]):
                return place
            self._path.append(token_id)
        return len(token_ids)

    def write_mask(self, path: list[int], mask: np.ndarray) -> None:
        """Write the tokens allowed after a drafted path: uint32[ceil(vocab_size / 32)], bit i of word w is 32 w + i.

        Nothing may follow a path that is not allowed itself.
        """
        if self._move(path) < len(path):
            mask[:] = 0
            return
        self._write_allowed(mask, self._must_close(len(path)))

    def shortest_rest(self) -> int:
        """The number of tokens that end the answer if each closes what it can; the matcher is rolled back."""
        mask, num_consumed = np.empty(self._closing.masks.shape[1], np.uint32), 0
        while num_consumed < MAX_SHORTEST and not self._matcher.is_stopped():
            token_ids = self._matcher.compute_ff_tokens()
            if not token_ids:
                usual = (token for token in self._closing.usual if self._matcher.validate_tokens([token]))
                closer = next((token for token in usual if not self._is_text(token)), None)
                token_ids = [] if closer is None else [closer]
            if not token_ids:
                self._write_allowed(mask, must_close=True)
                token_ids = [_first(mask)]
            if token_ids == [self.end_id] or not self._matcher.try_consume_tokens(token_ids):
                break
            num_consumed += len(token_ids)
        self._matcher.rollback(num_consumed)
        return num_consumed

    def _must_close(self, num_drafted: int) -> bool:
        """Whether the answer must be closed after a path of `num_drafted` tokens, which the matcher has consumed."""
        num_left = self._max_tokens - self._num_before - self._num_output - num_drafted
        return num_left <= self._shortest + MARGIN and num_left <= self.shortest_rest() + MARGIN

    def _write_allowed(self, mask: np.ndarray, must_close: bool) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        for closing in self._closing.masks if must_close else ():
            if (allowed := mask & closing).any() and not self._is_text(_first(allowed)):
                mask[:] = allowed
                return

    def _is_text(self, token_id: int) -> bool:
        """Whether a token is a quote or bracket that any word may follow; it is text there, and closes nothing."""
        if token_id not in self._closing.marks:
            return False
        self._matcher.try_consume_tokens([token_id])
        is_text = all(self._matcher.validate_tokens([word]) for word in self._closing.words)
        self._matcher.rollback(1)
        return is_text

    def _move(self, path: list[int]) -> int:
        """Move the matcher along a path as far as the grammar allows; return the number of allowed tokens."""
        pairs = zip(path, self._path, strict=False)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if num_common < len(self._path):
            self._matcher.rollback(len(self._path) - num_common)
        rest = path[num_common:]
        num_consumed = num_common + (self._matcher.try_consume_tokens(rest) if rest else 0)
        self._path = path[:num_consumed]
        return num_consumed


class ThinkingGuide(Guide):
    """The guide of a text with thoughts before the answer: any token is allowed in them, the grammar's after them.

    A model that begins thoughts itself (`ThoughtMarks.open_id`) may as well begin with the answer.
    """

    def __init__(self, matcher, closing, end_ids, max_tokens, shortest, marks: ThoughtMarks) -> None:
        super().__init__(matcher, closing, end_ids, max_tokens, shortest)
        self._marks, self._has_begun = marks, False  # whether the answer has begun

    @property
    def is_complete(self) -> bool:
        return self._has_begun and super().is_complete

    def advance(self, output_ids: np.ndarray) -> None:
        """As `Guide.advance`; also raises ValueError if the thoughts leave no room for an answer."""
        new = output_ids[self._num_before + self._num_output :].tolist()
        if not new:
            return
        if not self._has_begun:
            num_thoughts, self._has_begun = self._thoughts_in(new)
            self._num_before += num_thoughts
            num_left = self._max_tokens - self._num_before
            if self._num_before and self._has_begun and num_left <= self._shortest + MARGIN:
                raise ValueError(
                    f"its thoughts of {self._num_before} tokens leave {num_left}, too few for an answer; raise "
                    "decoding.max_new_tokens"
                )
        if self._has_begun:
            super().advance(output_ids[self._num_before :])

    def forced(self, max_tokens: int) -> list[int]:
        return super().forced(max_tokens) if self._has_begun else []

    def num_allowed(self, token_ids: list[int]) -> int:
        num_thoughts, is_ended = self._thoughts_in(token_ids)
        if not is_ended:
            return len(token_ids)
        with self._after(num_thoughts):
            return num_thoughts + super().num_allowed(token_ids[num_thoughts:])

    def write_mask(self, path: list[int], mask: np.ndarray) -> None:
        num_thoughts, is_ended = self._thoughts_in(path)
        if not is_ended:
            mask[:] = 0xFFFFFFFF
            return
        with self._after(num_thoughts):
            super().write_mask(path[num_thoughts:], mask)
        if (open_id := self._marks.open_id) is not None and self._may_open and not path:
            mask[open_id // 32] |= np.uint32(1 << open_id % 32)

    @property
    def _may_open(self) -> bool:
        """Whether the next token may begin thoughts or the answer."""
        return self._marks.open_id is not None and not self._has_begun and self._num_before == 0

    def _thoughts_in(self, new: list[int]) -> tuple[int, bool]:
        """The number of thought tokens in tokens that follow the committed ones, and whether the thoughts end."""
        if self._has_begun or (self._may_open and new[:1] != [self._marks.open_id]):
            return 0, True
        is_ended = self._marks.close_id in new
        return (new.index(self._marks.close_id) + 1 if is_ended else len(new)), is_ended

    @contextmanager
    def _after(self, num_thoughts: int) -> Iterator[None]:
        """Count drafted thoughts as tokens before the answer."""
        self._num_before += num_thoughts
        yield
        self._num_before -= num_thoughts


@dataclass(frozen=True)
class _Closing:
    """Kinds of tokens that close an answer or a part of it; the first kind that is allowed is taken.

    They are the end itself; a line break; a quote with the bracket behind it; a quote; a bracket; the end of a
    sentence; and, where a part must not be empty, a word.
    """

    masks: np.ndarray  # uint32 (7, num_words)
    usual: tuple[int, ...]  # a few tokens, by kind: computing a mask takes as long as checking dozens
    marks: frozenset[int]  # quotes and brackets
    words: tuple[int, ...]  # two; a part's fixed beginning may allow one of them, but not both

    @classmethod
    def of(cls, tokenizer: llguidance.LLTokenizer, end_ids: list[int]) -> "_Closing":
        texts = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        bits = np.zeros((7, -(-len(texts) // 32) * 32), bool)
        bits[0, end_ids] = True
        for token, text in enumerate(texts):
            starts = text[:1] == b"\n", text[:2] in (b'"]', b'"}'), text == b'"', text[:1] in (b"]", b"}")
            bits[1:, token] = *starts, text == b".", text.decode(errors="replace").strip()[:1].isalnum()
        usual = (b"\n", b'"]', b'"}', b'"', b"]", b"}", b".", b"a", b" a")
        usual_ids = [texts.index(text) for text in usual if text in texts]
        marks = frozenset(np.flatnonzero(bits[2:5].any(axis=0)).tolist())
        words = tuple(texts.index(text) for text in (b"a", b"e") if text in texts)
        return cls(np.packbits(bits, axis=1, bitorder="little").view(np.uint32), (*end_ids, *usual_ids), marks, words)


def _first(mask: np.ndarray) -> int:
    place = int(np.argmax(mask != 0))
    bits = int(mask[place])
    return 32 * place + (bits & -bits).bit_length() - 1


def after_thoughts(grammar: str, thoughts: ThoughtMarks) -> str:
    """The grammar of a text that begins with thoughts, or may do so, for engines without a `ThinkingGuide`."""
    rest = f"/(.|\\n)*/ <[{thoughts.close_id}]>"
    optional = rest if thoughts.open_id is None else f"(<[{thoughts.open_id}]> {rest})?"
    return f"start: {optional} answer\nanswer: %lark {{\n{grammar}\n}}"


def require_grammar(grammar: str, tokenizer: llguidance.LLTokenizer | None = None) -> None:
    """Raise ConfigError, naming the place, if a grammar in llguidance's variant of Lark does not compile."""
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if is_error:
        raise ConfigError(f"the form of answers does not compile: {' '.join(messages).strip()}")
