"""Prompts: token ids for the model from the data of an entity that a template shows.

The part that all entities share comes first; the oldest events of long histories are cut to fit a token budget.
`chat_format` turns chat messages into tokens; `templates` has the questions.
"""

import datetime
import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.chat_format import encode_chat
from laserbatch.pipeline.knowledge.templates import AttributeLines, HistoryLines, PromptTemplate
from laserbatch.pipeline.knowledge.values import plain_text, value_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAYOUT_VERSION = 2  # raise it if the same template and values give another prompt; fingerprints contain it
PARTS = ("template", "prompt", "model", "decoding", "attributes", "history")  # of a fingerprint; the first 4 are shared
DIGEST_BYTES = 8  # per part; few, since it is compared only with the same entity's earlier one
NO_TITLE = "no-title: the item has no title, so there is nothing to ask about"
Event = tuple[str, str | None, str | None]  # title, attributes and rating as text; None if there are none


@dataclass(frozen=True)
class RenderedPrompt:
    token_ids: np.ndarray  # int32[n]
    num_history: int  # number of events shown
    num_history_dropped: int  # number of events left out for the token limit or by the template
    messages: tuple[tuple[str, str], ...] = ()  # (role, content) of each; the tokens render them


@dataclass(frozen=True)
class Shown:
    """The data of one entity that a template shows: all that its prompt is made from besides the template."""

    attributes: str | None  # attribute lines; None without attributes
    events: Sequence[Event]  # the events shown, oldest first
    num_events: int  # number of all events, shown or not


def render_shown(
    template: PromptTemplate,
    shown: Shown,
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    date: datetime.date | None = None,
) -> RenderedPrompt:
    """Render a prompt of at most `max_prompt_tokens`, chat tokens included, with as much of the newest history as fits.

    `date` is the night's, for chat templates that print today's date; None: the clock's. Raises RowError: "too-long" if
    not even the newest event fits, "undecodable" if it cannot be written in plain tokens.
    """
    heading = template.attributes.heading if shown.attributes is not None else None
    head, tail = (template.instruction.strip(), heading, shown.attributes), (template.request or "").strip()
    events = shown.events

    @cache
    def encoded(num_shown: int) -> RenderedPrompt:
        user = _content(template, head, events[len(events) - num_shown :], tail)
        ids = encode_chat(tokenizer, user, template.system, template.chat_options, date)
        messages = (("system", template.system), ("user", user)) if template.system else (("user", user),)
        return RenderedPrompt(ids, num_shown, shown.num_events - num_shown, messages)

    def is_too_long(num_shown: int) -> bool:
        return len(encoded(num_shown).token_ids) > max_prompt_tokens

    if not is_too_long(len(events)):
        return encoded(len(events))
    fewest = min(1, len(events))  # a prompt without any would say that nothing happened
    num_shown = bisect_left(range(len(events)), True, lo=fewest, key=is_too_long) - 1
    if num_shown < fewest:
        raise RowError(
            f"too-long: the prompt has {len(encoded(fewest).token_ids)} tokens"
            f"{' with the newest event alone' * fewest}; the limit (knowledge.max_prompt_tokens) is {max_prompt_tokens}"
        )
    return encoded(num_shown)


def count_refused(render: Callable[[Shown], RenderedPrompt], shown: Iterable[Shown]) -> Counter[str]:
    """The number of entities for which `render` raises RowError, by the word that its reason begins with."""
    reasons = Counter[str]()
    for of_entity in shown:
        try:
            render(of_entity)
        except RowError as error:
            reasons[error.reason.partition(":")[0]] += 1
    return reasons


def digest(value: object) -> str:
    """One part of a fingerprint: BLAKE2b of a value that JSON can hold, as 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=DIGEST_BYTES).hexdigest()


def changed_parts(before: str, after: str) -> tuple[str, ...]:
    """The names of `PARTS` that differ between two fingerprints; ("version",) if one has another form."""
    old, new = before.split("-"), after.split("-")
    if len(old) != len(PARTS) or len(new) != len(PARTS):
        return () if before == after else ("version",)
    return tuple(name for name, old_part, new_part in zip(PARTS, old, new, strict=True) if old_part != new_part)


def have_same_tokens(fingerprints: pa.Array, shared: str) -> pa.Array:
    """Whether texts have the tokenizer of a fingerprint that begins with `shared`, by their fingerprints: bool[n].

    They do if the part `prompt`, which covers the tokenizer, is the same, or the part `model`.
    """
    prompt, model = shared.split("-")[1:3]
    return pc.fill_null(pc.match_substring_regex(fingerprints, f"^[^-]*-({prompt}-|[^-]*-{model}-)"), False)


def attribute_line(name: str, value: object, columns: AttributeLines) -> str | None:
    """The line of one attribute; None if its value is empty."""
    text = value_text(value, columns, name)
    label = columns.labels.get(name, name)
    label = plain_text(label, len(label))
    return None if text is None else columns.line.format(label=label, value=text)


def _content(template: PromptTemplate, head: tuple[str | None, ...], events: Sequence[Event], tail: str) -> str:
    history, lines = template.history, []
    if history is not None:
        head = (*head, history.heading)
        lines = [_line(number, event, history) for number, event in enumerate(events, start=1)] or [history.none]
    return "\n".join([*filter(None, head), *lines, *filter(None, (tail,))])


def _line(number: int, event: Event, columns: HistoryLines) -> str:
    title, attributes, rating = event
    pattern = columns.line_unrated if rating is None else columns.line
    if attributes is None:
        pattern = pattern.replace(columns.separator + "{attributes}", "")
    label = rating or ""
    return pattern.format(number=number, title=title, attributes=attributes or "", rating=label, event=label)
