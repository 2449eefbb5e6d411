"""Grammars for guided decoding of a template's answers: they allow what its parser reads, within the token limit.

Grammars are in llguidance's variant of Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import llguidance

from laserbatch.pipeline.decoding.grammar import require_grammar
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import ConfigError, RowError
from laserbatch.pipeline.knowledge.parsers import parse_answer
from laserbatch.pipeline.knowledge.templates import PromptTemplate
from laserbatch.pipeline.validation import line_of

CHARS_PER_TOKEN = 4  # in English; a bound keeps parts in proportion, and decoding closes an answer before its limit
FAIR_SHARES = 2  # a part may have this many times its equal share of the characters, so that others find room
MIN_CHARS, MAX_CHARS = 16, 4000  # characters of a part, whatever the token limit
MAX_ITEMS, MAX_ITEM_CHARS = 8, 60  # limits of a JSON list, unless the template sets `max_items`
_FIRST = r"[\p{L}\p{N}]"  # begins a part of an answer, so that it is not `...` as in the example of a question
# The separators of `json.dumps`, which the shipped templates show to the model.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_of(template: PromptTemplate, max_new_tokens: int) -> str | None:
    """The grammar of answers to a template, of at most `max_new_tokens`; None: its parser takes any text."""
    if template.grammar is not None:
        return template.grammar
    if template.regex is not None:
        in_slashes = template.regex.replace("\\/", "/").replace("/", "\\/")  # as Lark wants it
        return f"start: /{in_slashes}/"
    if template.json_schema is not None:
        return _json_grammar(template.json_schema)
    num_chars = CHARS_PER_TOKEN * max_new_tokens
    if template.parser in ("aspects", "attributes"):  # lines that begin with a head, then an optional space and a text
        first, *others = _heads(template)
        heads = [json.dumps(head, ensure_ascii=False) for head in (first, *(f"\n{head}" for head in others))]
        rules = " ".join(f"{head} LINE" for head in heads)
        return f"start: {rules}\nLINE: / ?{_FIRST}[^\\n]{{0,{_bound(num_chars, len(heads))}}}/\n"
    return _json_grammar(_schema(template, num_chars)) if template.parser == "json" else None


def guiding_grammar(template: PromptTemplate, decoding: DecodingSettings) -> str | None:
    """The grammar that a night's answers must follow; None: the model may write any text."""
    if decoding.guided == "off" or (decoding.thinking == "cut" and decoding.engine == "endpoint"):
        return None
    return grammar_of(template, decoding.max_new_tokens)


def require_form(template: PromptTemplate, path: Path) -> None:
    """Raise ConfigError if the form of answers in a template's file does not compile, or allows no text."""
    grammar = grammar_of(template, 512)
    if grammar is None:
        return
    keys = (key for key in ("grammar", "regex", "json_schema") if getattr(template, key) is not None)
    key = next(keys, "fields" if template.fields else "factors")
    place = f"prompt template {path}, line {line_of(path, [key])}: {key}"
    try:
        require_grammar(grammar)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    start = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    if not any(start.validate_tokens([byte]) for byte in range(256)):
        raise ConfigError(
            f"{place} allows only the empty answer (found {getattr(template, key)!r}); change it so that it allows a "
            "text, or leave it out"
        )
    template = template.model_copy(update={"encode": ()})  # answers of one factor are tried
    for factor, head in zip(template.factors, _heads(template), strict=True) if key == "factors" else ():
        with suppress(RowError):
            if factor in parse_answer(template, f"{head} text").fields:
                continue
        raise ConfigError(
            f"{place}: parser `{template.parser}` would not find {factor!r} in an answer; expected a name in one line "
            "that begins with a letter and does not end with `*` or a space"
        )


def _heads(template: PromptTemplate) -> tuple[str, ...]:
    """The beginnings of the lines of aspects or attributes."""
    is_numbered = template.parser == "aspects"
    return tuple(f"{number}. {name}:" if is_numbered else f"{name}:" for number, name in enumerate(template.factors, 1))


def _schema(template: PromptTemplate, num_chars: int) -> dict[str, Any]:
    """The JSON schema of a template's fields, all of them in their order; an optional list may be empty."""
    properties: dict[str, Any] = {}
    for name, kind in template.fields.items():
        if kind == "text":
            properties[name] = _text(_bound(num_chars, len(template.fields)))
        else:
            least, most = int(name not in template.optional_fields), template.max_items.get(name, MAX_ITEMS)
            properties[name] = {"type": "array", "items": _text(MAX_ITEM_CHARS), "minItems": least, "maxItems": most}
    required = list(template.fields)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f'^{_FIRST}[^"\\\\\\x00-\\x1f]{{0,{most}}}$'}


def _bound(num_chars: int, num_parts: int) -> int:
    """The largest number of characters of each of `num_parts` parts."""
    return max(MIN_CHARS, min(MAX_CHARS, FAIR_SHARES * num_chars // num_parts))


def _json_grammar(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps({"x-guidance": _LAYOUT} | schema, ensure_ascii=False)
