"""Parsers that extract fields from the model's text, by fixed rules; a text that these cannot mend is refused.

Repairs of JSON, each counted under its name: `json-around` (prose or a code fence around it is cut off), `json-cut`
(the token limit ended it: open parts are closed), `json-syntax` (quotes, commas), `json-shape` (a list in place of an
object with one list, a list in place of a text, or a text in place of a list).
"""

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from laserbatch.pipeline.errors import ConfigError, RowError
from laserbatch.pipeline.knowledge.templates import PromptTemplate

MIN_ENTRIES = 4  # shorter lists are never loops; in a loop, more than half of the entries repeat earlier ones
_AT_LINE = re.compile(r"^[ \t]*(?:[#*>\-]+[ \t]*)*\(?(\d{1,2})[.):\]．、）](?!\d)[ \t*]*", re.MULTILINE)
_INLINE = re.compile(r"(?:^|(?<=\s))\(?(\d{1,2})[.)][ \t*]+(?=[A-Z])")
_LABEL = re.compile(r"^\**([^:：\n]{1,60}?)\**[ \t]*(?:[:：–—]| - )\**[ \t]*")
_LETTER = re.compile(r"[^\W\d_]")
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # JSON may escape what no text may have
_HEADING = re.compile(r"^\**([^:\n]{1,60}?)\**[ \t]*\n")
_JSON_NAME = re.compile(r"""["']([^"'\\\n]*)["']\s*:""")
_BULLET = re.compile(r"^[ \t]*(?:[-*•#>]+[ \t]*|\(?\d{1,2}[.)][ \t]*)?")


class Parsed(NamedTuple):
    """An answer's fields, name -> text, and the names of the repairs that they needed."""

    fields: dict[str, str]
    repairs: tuple[str, ...] = ()


def parse_answer(template: PromptTemplate, text: str, is_cut: bool = False) -> Parsed:
    """The fields of an answer by the template's parser: aspects or attributes by name, fields of JSON, or `text`.

    `is_cut`: the token limit ended the answer. Raises RowError with the reason `unparsable` (nothing of the requested
    form), `missing-field` (also if no part has a text that `encode` names), `wrong-type`, `duplicate-field`, or `loops`
    (a list, or three fields or more, repeat the same text).
    """
    parsed = _parsed(template, text, is_cut)
    if template.encode and not any(parsed.fields.get(name, "").strip() for name in template.encode):
        raise RowError(
            f"missing-field: the answer has no text for {' or '.join(template.encode)}, which `encode` in the template "
            "names"
        )
    if wrong := _UNWRITABLE.search("".join(chain.from_iterable(parsed.fields.items()))):
        raise RowError(f"undecodable: the answer has {wrong.group()!r}, which is no character")
    return parsed


def _parsed(template: PromptTemplate, text: str, is_cut: bool) -> Parsed:
    if not text.strip():
        raise RowError("unparsable: the text is empty")
    if template.parser == "free":
        return Parsed({"text": text.strip()})
    if template.parser in ("aspects", "attributes"):
        fields = (_aspects if template.parser == "aspects" else _attributes)(text, template.factors)
        if not any(map(_LETTER.search, fields.values())):
            name, value = next(iter(fields.items()))
            raise RowError(f"unparsable: no field has a letter; {name} is {value[:20]!r}")
        return _with_different_fields(Parsed(fields))
    if template.parser == "json":
        return _with_different_fields(_json_fields(template, text, is_cut))
    return Parsed(_custom_fields(template, text))


def _with_different_fields(parsed: Parsed) -> Parsed:
    values = [value.strip(" .,;*").casefold() for value in parsed.fields.values()]
    if len(values) > 2 and len(set(values)) == 1:  # two may well be alike
        raise RowError(f"loops: all {len(values)} fields say {next(iter(parsed.fields.values()))[:20]!r}")
    return parsed


def _aspects(text: str, factors: tuple[str, ...]) -> dict[str, str]:
    """Numbered aspects, `1. Genre: ...`; a number without a name takes the name of the factor with that number."""
    marks = list(_AT_LINE.finditer(text))
    inline = list(_INLINE.finditer(text))
    if len(marks) < 2 <= len(inline):
        marks = inline
    canonical = {factor.lower(): factor for factor in factors}
    fields: dict[str, str] = {}
    for place, mark in enumerate(marks):
        end = marks[place + 1].start() if place + 1 < len(marks) else len(text)
        number, body = int(mark.group(1)), text[mark.end() : end].strip()
        label = _label(body, factors) or _heading(body, factors)
        if label:
            name, body = label.group(1).strip(" *"), body[label.end() :].strip()
            name = canonical.get(name.lower(), name)
        else:
            name = factors[number - 1] if 1 <= number <= len(factors) else f"aspect {number}"
        if name and body:
            fields[name] = f"{fields[name]} {body}" if name in fields else body
    if not fields:
        raise RowError("unparsable: the answer has no numbered aspect with a text")
    return fields


def _label(body: str, factors: tuple[str, ...]) -> re.Match[str] | None:
    """Match a name before a colon or dash; a factor's whole name, which may have those in it, takes precedence."""
    named = "|".join(re.escape(factor) for factor in sorted(factors, key=len, reverse=True))
    return re.match(rf"\**({named})\**[ \t]*[:：]\**[ \t]*", body, re.IGNORECASE) or _LABEL.match(body)


def _heading(body: str, factors: tuple[str, ...]) -> re.Match[str] | None:
    """Match a factor's name alone on its line."""
    heading = _HEADING.match(body)
    names = {factor.lower() for factor in factors}
    return heading if heading and heading.group(1).strip(" *").lower() in names else None


def _attributes(text: str, factors: tuple[str, ...]) -> dict[str, str]:
    """Lines `Name: value` with the requested names, in any kind of list; other lines are ignored."""
    canonical = {factor.lower(): factor for factor in factors}
    fields: dict[str, str] = {}
    for line in re.split(r"\r\n?|\n", text):
        body = _BULLET.sub("", line, count=1)
        label = _label(body, factors)
        if label is None:
            continue
        name = canonical.get(label.group(1).strip(" *").lower())
        if name is not None and body[label.end() :].strip(" *"):
            fields.setdefault(name, body[label.end() :].strip(" *"))
    if not fields:
        raise RowError(f"unparsable: the answer has no line `Name: value` for {', '.join(factors)}")
    return fields


def _json_fields(template: PromptTemplate, text: str, is_cut: bool) -> Parsed:
    content, repairs = _json_of(text, is_cut)
    lists = [name for name, kind in template.fields.items() if kind == "list"]
    if isinstance(content, list) and len(template.fields) == len(lists) == 1:
        content, repairs = {lists[0]: content}, (*repairs, "json-shape")
    if not isinstance(content, dict):
        raise RowError(f"unparsable: the answer has no JSON object with {', '.join(template.fields)}")
    if repairs and repairs[-1] in ("json-cut", "json-syntax"):  # the repair leaves one of two equal names
        names = [name.strip().lower() for name in _JSON_NAME.findall(text)]
        _require_different(name for name in names if name in {field.lower() for field in template.fields})
    by_name = {str(name).strip().lower(): value for name, value in content.items()}
    fields: dict[str, str] = {}
    for name, kind in template.fields.items():
        value = by_name.get(name.lower())
        if value in (None, []) or (isinstance(value, str) and not value.strip()):
            if name in template.optional_fields:
                continue
            raise RowError(f"missing-field: the answer has no {name!r}")
        as_text, is_as_requested = _text_of(name, kind, value)
        fields[name] = as_text
        repairs += () if is_as_requested or "json-shape" in repairs else ("json-shape",)
    return Parsed(fields, repairs)


def _text_of(name: str, kind: str, value: Any) -> tuple[str, bool]:
    """A field as text, and whether it had the requested kind. Raises RowError if it has neither kind."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value).strip(), kind == "text" and isinstance(value, str)
    parts = []
    if isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        parts = [str(part).strip() for part in value if str(part).strip()]
    if not parts:
        raise RowError(f"wrong-type: {name!r} is {json.dumps(value, ensure_ascii=False)[:60]}; expected a {kind}")
    different = list(dict.fromkeys(parts))
    if len(parts) >= MIN_ENTRIES and 2 * len(different) < len(parts):
        raise RowError(f"loops: only {len(different)} of the {len(parts)} entries of {name!r} differ")
    return ", ".join(different), kind == "list"


def _json_of(text: str, is_cut: bool) -> tuple[Any, tuple[str, ...]]:
    """Parse the JSON in a text. Returns it, or None if there is none, and the names of the repairs."""
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    if not starts:
        return None, ()
    body, repairs = text[min(starts) :], () if not text[: min(starts)].strip() else ("json-around",)
    try:
        # Line breaks within texts are allowed.
        content, end = json.JSONDecoder(strict=False, object_pairs_hook=_json_object).raw_decode(body)
        return content, repairs or (("json-around",) if body[end:].strip() else ())
    except (ValueError, RecursionError):
        pass
    import json_repair

    try:
        content = json_repair.loads(body, skip_json_loads=True)
    except (ValueError, RecursionError):
        return None, ()
    content = content if isinstance(content, dict | list) and content else None
    return content, (*repairs, "json-cut" if is_cut else "json-syntax")


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _require_different(name.strip().lower() for name, _ in pairs)
    return dict(pairs)


def _require_different(names: Iterable[str]) -> None:
    """Raise RowError if a name of an answer's JSON occurs twice, since only one of its values could be kept."""
    name, num = next(iter(Counter(names).most_common(1)), ("", 0))
    if num > 1:
        raise RowError(f"duplicate-field: the answer has {name!r} {num} times; expected it once")


def _custom_fields(template: PromptTemplate, text: str) -> dict[str, str]:
    """Parse with `parse(text)` of the user's file next to the template: name -> text. Its errors refuse the text."""
    parse = load_parser(template.parser_path)
    try:
        fields = parse(text)
    except ValueError as error:
        raise RowError(f"unparsable: {error}") from None
    except Exception as error:  # one text is no reason to end a night
        raise RowError(f"unparsable: {template.parser} raised {type(error).__name__}: {error}") from None
    if not isinstance(fields, dict) or not all(isinstance(v, str) for pair in fields.items() for v in pair):
        raise RowError(f"unparsable: {template.parser} returned {type(fields).__name__}; expected names with texts")
    if not fields:
        raise RowError(f"unparsable: {template.parser} found nothing in the answer")
    return fields


@lru_cache(maxsize=8)
def load_parser(path: Path) -> Callable[[str], Any]:
    """The function `parse` of a Python file. Raises ConfigError if it cannot be loaded."""
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not callable(module.parse):
            raise TypeError("parse is not a function")
        return module.parse
    except (Exception, SystemExit) as error:  # the user's program may raise anything, and end itself
        raise ConfigError(
            f"the parser {path} cannot be used: {type(error).__name__}: {error}; expected `def parse(text)` that "
            "returns a dict of texts by name"
        ) from None
