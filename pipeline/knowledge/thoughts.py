"""Finds where in a text the thoughts that a reasoning model writes before its answer begin and end.

Some chat templates open thoughts in the prompt, so that a text has only their end; other models open them themselves.
Marks that a tokenizer or its chat template has (`<think>`, `[THINK]`, channels of gpt-oss) count anywhere in a text.
Marks of other models count only if a text begins with one that its prompt does not ask for.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAME = (
    r"(?:(?!begin|start|end)[\w-]+[:_])?"
    r"(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|analysis|scratchpad|rationale|cot|monologue)"
)
_BAR = "[|｜]"
_OPEN = (
    rf"<{_BAR}?{_NAME}{_BAR}?>|\[{_NAME}\]|◁{_NAME}▷"
    rf"|<{_BAR}?(?:begin|start)(?:[_▁]of)?[_▁]{_NAME}{_BAR}?>|<{_BAR}?{_NAME}[_▁](?:begin|start){_BAR}?>"
    r"|<\|inner_prefix\|>|<\|channel>\s*thought|<\|channel\|>(?!final)\w[^<]*<\|message\|>"
    r"|<\|open\|>think<\|sep\|>|Here is my thought process:|Here are my reasoning steps:"
)
_CLOSE = (
    rf"<{_BAR}?/{_NAME}{_BAR}?>|\[/{_NAME}\]|◁/{_NAME}▷"
    rf"|<{_BAR}?end(?:[_▁]of)?[_▁]{_NAME}{_BAR}?>|<{_BAR}?{_NAME}[_▁]end{_BAR}?>|<\|inner_suffix\|>|<channel\|>"
    r"|(?:<\|end\|>)?(?:<\|start\|>assistant)?<\|channel\|>final[^<]*<\|message\|>"
    r"|<\|close\|>think<\|sep\|>(?:\s*<\|open\|>response<\|sep\|>)?|Here is my response:|\[BEGIN FINAL RESPONSE\]"
)
_MARK = re.compile(rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})", re.IGNORECASE)
_FORMS = ("<", "[", "◁", "Here ")  # each mark contains one of these
_OPENS_AT_END = re.compile(rf"(?:{_OPEN})\s*$", re.IGNORECASE)
# Names of pairs, for tokens of marks that a template need not write, and for marks without a common word.
_PARTS = {"<|channel|>": "channel", "<|channel>": "channel", "<channel|>": "channel", "<|open|>": "think<|sep|>"}
_PHRASES = {"here is my": "here is my", "here are my": "final response", "final response": "final response"}
_WRAPPED = re.compile(r"\s*<\|?(?:begin_of_)?(answer|final_answer|response|output|solution)\|?>", re.IGNORECASE)
_SIDE = re.compile(r"[/|｜]|(?:begin|start|end)(?:[_▁]of)?[_▁]|[_▁](?:begin|start|end|prefix|suffix)(?=[|>])")


@dataclass(frozen=True)
class AnswerSpans:
    """The parts of a text that are not thoughts."""

    spans: tuple[tuple[int, int], ...]  # start and end in characters
    open_at: int | None = None  # start of thoughts that do not end


def is_thought_mark(text: str) -> bool:
    """Whether a token's text begins or ends thoughts, or is part of a mark that does."""
    return _MARK.fullmatch(text) is not None or text in _PARTS


def opens_thoughts(tokenizer: "PreTrainedTokenizerBase", prompt_end: str) -> bool:
    """Whether a prompt with this end lets the model continue within thoughts."""
    mark = _OPENS_AT_END.search(prompt_end)
    return mark is not None and _is_own(tokenizer, mark.group().strip())


def mark_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, int] | None:
    """The ids of the marks that begin and end a model's thoughts; None if it has no such pair of single tokens."""
    ids: dict[str, dict[str, int]] = {"open": {}, "close": {}}
    for i, token in tokenizer.added_tokens_decoder.items():
        if mark := _MARK.fullmatch(token.content):
            ids[str(mark.lastgroup)].setdefault(_pair(mark.group()), i)
    return next(((i, ids["close"][pair]) for pair, i in ids["open"].items() if pair in ids["close"]), None)


def has_marks(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template can open thoughts."""
    return bool(tokenizer.chat_template and _own_pairs(tokenizer))


def without_thoughts(
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    is_open: bool,
    is_in_prompt: Callable[[str], bool],
    is_quoted: Callable[[str], bool] = lambda mark: False,
) -> AnswerSpans:
    """The parts of a text, with its control tokens, that are not thoughts; `is_open`: the prompt opened thoughts.

    `is_in_prompt`: whether the prompt contains a mark, and so asks for it. `is_quoted`: whether an apparent mark is
    plain text, as in a title of the tables.
    """
    if not is_open and not any(form in text for form in _FORMS):  # nearly all texts
        return AnswerSpans(((0, len(text)),))
    first = _MARK.match(text, len(text) - len(text.lstrip()))
    foreign = _pair(first.group()) if first and first["open"] and not is_in_prompt(first.group()) else None
    spans: list[tuple[int, int]] = []
    begin, open_at, wrapped = 0, 0 if is_open else None, None
    for mark in _MARK.finditer(text):
        if is_quoted(mark.group()) or (_pair(mark.group()) != foreign and not _is_own(tokenizer, mark.group())):
            continue
        if mark["open"]:
            if open_at is None:
                spans, open_at = [*spans, (begin, mark.start())], mark.start()
            continue
        spans = [] if open_at is None else spans  # a closing mark alone: the prompt opened the thoughts
        wrapped = _WRAPPED.match(text, mark.end())
        wrapped = None if wrapped and is_in_prompt(wrapped.group().strip()) else wrapped
        rest = wrapped.end() if wrapped else mark.end()
        open_at, begin = None, len(text) - len(text[rest:].lstrip())
    if open_at is None:
        wrapping = rf"<\|?(?:/|end_of_){wrapped[1] if wrapped else '(?!)'}\|?>"
        end = re.compile(rf"\s*(?:{wrapping}|\[END FINAL RESPONSE\])", re.IGNORECASE).search(text, begin)
        spans = [*spans, (begin, end.start() if end else len(text))]
    if len(spans) > 1:
        spans = [span for span in spans if text[slice(*span)].strip()]
    return AnswerSpans(tuple(spans), open_at)


def _pair(mark: str) -> str:
    """The name that the opening and the closing mark of a pair have in common."""
    mark = mark.lower()
    common = {part: part for part in _PARTS.values()} | _PHRASES
    return next((pair for part, pair in common.items() if part in mark), None) or _SIDE.sub("", mark)


def _is_own(tokenizer: "PreTrainedTokenizerBase", mark: str) -> bool:
    """Whether a mark, or the mark that it pairs with, is one of the tokenizer or its chat template."""
    return _pair(mark) in _own_pairs(tokenizer)


@lru_cache(maxsize=32)
def _own_pairs(tokenizer: "PreTrainedTokenizerBase") -> frozenset[str]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    texts = [*added, str(tokenizer.chat_template or "")]
    pairs = {_pair(mark.group()) for text in texts for mark in _MARK.finditer(text)}
    return frozenset(pairs | {pair for part, pair in _PARTS.items() if any(part in text for text in texts)})
