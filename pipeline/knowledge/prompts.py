"""From an entity to the token ids that the model reads.

This module owns the order of a prompt (what all entities share first), and the cut of long histories from their
oldest side to a token budget. How chat messages become tokens is `chat_format`; what is asked is `templates`.
"""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from laserbatch.pipeline.errors import ConfigError, RowError
from laserbatch.pipeline.knowledge.chat_format import chat_skeleton, encode_content
from laserbatch.pipeline.knowledge.entities import Entity, HistoryEvent
from laserbatch.pipeline.knowledge.templates import Columns, HistoryLines, PromptTemplate, load_template

__all__ = ["RenderedPrompt", "load_template", "render_prompt"]


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt, ready for the model.

    Parameters
    ----------
    token_ids : int32[n].
    text : the same for people, control tokens written out.
    num_history : events shown.
    num_history_dropped : older events left out for the budget or the template's `max_events`.
    """

    token_ids: np.ndarray
    text: str
    num_history: int
    num_history_dropped: int


def render_prompt(
    template: PromptTemplate, entity: Entity, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> RenderedPrompt:
    """Render one entity, keeping as much of the newest history as the budget allows.

    Parameters
    ----------
    max_prompt_tokens : most tokens of the whole prompt, chat template included.

    Raises
    ------
    RowError : reason "no-title" for an item without one; "too-long" when it does not fit without any history;
        "undecodable" when the text cannot be written in plain tokens.
    """
    if template.side != entity.side:
        raise ConfigError(
            f"the prompt template {template.identity} is for {template.side}s; name one for {entity.side}s as "
            f"knowledge.{entity.side}_template"
        )
    if entity.side == "item" and not str(entity.attributes.get("title", "")).strip():
        raise RowError("no-title: the item has no title, so there is nothing to ask about")
    skeleton = chat_skeleton(tokenizer, template.system is not None, template.chat_options)
    head, events, tail = _blocks(template, entity)

    def encoded(num_shown: int) -> RenderedPrompt:
        user = _content(template, head, events[len(events) - num_shown :], tail)
        contents = {"user": user, "system": (template.system or "").strip()}
        if skeleton.merges_system and contents["system"]:
            contents["user"] = f"{contents['system']}\n\n{user}"
        ids: list[int] = []
        for piece in skeleton.pieces:
            ids.extend(encode_content(tokenizer, contents[piece]) if isinstance(piece, str) else piece)
        text = "".join(
            contents[piece] if isinstance(piece, str) else written
            for piece, written in zip(skeleton.pieces, skeleton.texts, strict=True)
        )
        return RenderedPrompt(np.array(ids, np.int32), text, num_shown, len(entity.history) - num_shown)

    fewest_over, most_fitting = len(events) + 1, -1
    best = None
    while fewest_over - most_fitting > 1:  # all first, then halving
        num_shown = len(events) if fewest_over > len(events) else (fewest_over + most_fitting) // 2
        rendered = encoded(num_shown)
        if len(rendered.token_ids) <= max_prompt_tokens:
            most_fitting, best = num_shown, rendered
        else:
            fewest_over = num_shown
            shortest = len(rendered.token_ids)
    if best is None:
        raise RowError(
            f"too-long: the prompt has {shortest} tokens without any history, the limit is {max_prompt_tokens}"
        )
    return best


def _blocks(template: PromptTemplate, entity: Entity) -> tuple[str, tuple[HistoryEvent, ...], str]:
    """Text before the history, the history's newest events oldest first, text after it."""
    head = [template.instruction.strip()] if template.instruction.strip() else []
    columns = template.attributes
    shown = columns.shown(entity.attributes)
    if shown:
        lines = [
            columns.line.format(label=columns.labels.get(name, name), value=_value(entity.attributes[name], columns))
            for name in shown
        ]
        head.append("\n".join(([columns.heading] if columns.heading else []) + lines))
    newest: tuple[HistoryEvent, ...] = ()
    if template.history is not None:
        newest = entity.history[max(0, len(entity.history) - template.history.max_events) :]
    return "\n".join(head), newest, (template.request or "").strip()


def _content(template: PromptTemplate, head: str, events: tuple[HistoryEvent, ...], tail: str) -> str:
    parts = [head] if head else []
    if template.history is not None:
        lines = [_event(number, event, template.history) for number, event in enumerate(events, start=1)]
        if template.history.heading:
            parts.append(template.history.heading)
        parts.extend(lines or [template.history.none])
    if tail:
        parts.append(tail)
    return "\n".join(parts)


def _event(number: int, event: HistoryEvent, columns: HistoryLines) -> str:
    values = [_value(event.attributes[name], columns) for name in columns.shown(event.attributes)]
    pattern = columns.line_unrated if event.rating is None else columns.line
    if not values:
        pattern = pattern.replace(columns.separator + "{attributes}", "")
    rating = "" if event.rating is None else f"{event.rating:g}"
    title = _plain(event.title, columns.max_value_chars)
    return pattern.format(number=number, title=title, attributes=columns.separator.join(values), rating=rating)


def _value(value: object, columns: Columns) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return _plain(" > ".join(str(part) for part in value if part is not None), columns.max_value_chars)
    return _plain(str(value), columns.max_value_chars)


def _plain(text: str, max_chars: int) -> str:
    """One line: a value cannot start a line of its own and so pass for another."""
    text = " ".join(text.split())
    return text if len(text) <= max_chars else text[: max_chars - 1].rstrip() + "…"
