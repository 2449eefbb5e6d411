"""The form of a template's answers as a grammar for guided decoding: what its parser reads, and no longer than fits.

Grammars are in llguidance's variant of Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

import json
from pathlib import Path
from typing import Any

import llguidance

from laserbatch.pipeline.decoding.grammar import require_grammar
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.templates import PromptTemplate
from laserbatch.pipeline.validation import line_of

CHARS_PER_TOKEN = 4  # of English; a bound keeps parts in proportion, and decoding closes an answer before its limit
FAIR_SHARES = 2  # of an answer's characters that one part may take, so that the others find room
MIN_CHARS, MAX_CHARS = 16, 4000  # of a part, whatever the token limit
MAX_ITEMS, MAX_ITEM_CHARS = 8, 60  # of a list in JSON, where the template does not say how many
_FIRST = r"[\p{L}\p{N}]"  # a part of an answer is not `...`, as the example in a question is
# The separators of `json.dumps`, which the shipped templates show to the model.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_of(template: PromptTemplate, max_new_tokens: int) -> str | None:
    """What answers to a template may be, in texts of at most so many tokens; None: its parser takes any text."""
    if template.grammar is not None:
        return template.grammar
    if template.regex is not None:
        in_slashes = template.regex.replace("\\/", "/").replace("/", "\\/")  # as Lark wants it
        return f"start: /{in_slashes}/"
    if template.json_schema is not None:
        return _json_grammar(template.json_schema)
    num_chars = CHARS_PER_TOKEN * max_new_tokens
    if template.parser == "aspects":
        return _lines(tuple(f"{number}. {name}:" for number, name in enumerate(template.factors, 1)), num_chars)
    if template.parser == "attributes":
        return _lines(tuple(f"{name}:" for name in template.factors), num_chars)
    if template.parser == "json":
        return _json_grammar(_schema(template, num_chars))
    return None


def guiding_grammar(template: PromptTemplate, decoding: DecodingSettings) -> str | None:
    """The grammar that a night holds answers to; None: the model may write any text, or is to think first."""
    if decoding.guided == "off" or decoding.thinking == "cut":
        return None
    return grammar_of(template, decoding.max_new_tokens)


def require_form(template: PromptTemplate, path: Path) -> None:
    """Raises ConfigError: the form of answers in the file of a template does not compile, or allows no text."""
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
            f"{place} allows no answer but the empty one (found {getattr(template, key)!r}); have it allow a text, or "
            "leave it out"
        )


def _lines(heads: tuple[str, ...], num_chars: int) -> str:
    """Lines that begin with given words and end in a text each, before which the model may write a space."""
    rules = " ".join(
        f"{json.dumps(head, ensure_ascii=False)} LINE" for head in (heads[0], *(f"\n{h}" for h in heads[1:]))
    )
    return f"start: {rules}\nLINE: / ?{_FIRST}[^\\n]{{0,{_bound(num_chars, len(heads))}}}/\n"


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
    """Characters that one of some parts may have."""
    return max(MIN_CHARS, min(MAX_CHARS, FAIR_SHARES * num_chars // num_parts))


def _json_grammar(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps({"x-guidance": _LAYOUT} | schema, ensure_ascii=False)
