"""From the model's text to the fields that are kept of it."""

import re

from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.templates import PromptTemplate

_AT_LINE = re.compile(r"^[ \t]*(?:[#*>\-]+[ \t]*)*\(?(\d{1,2})[.):\]][ \t*]*", re.MULTILINE)
_INLINE = re.compile(r"(?:^|(?<=\s))\(?(\d{1,2})[.)][ \t*]+(?=[A-Z])")
_LABEL = re.compile(r"^\**([^:\n]{1,60}?)\**[ \t]*(?::|[–—]| - )\**[ \t]*")
_HEADING = re.compile(r"^\**([^:\n]{1,60}?)\**[ \t]*\n")


def parse_knowledge(template: PromptTemplate, text: str) -> dict[str, str]:
    """The answer's fields: aspect -> text for the `aspects` parser, in the order written; {"text": text} for `free`.

    Raises RowError, "unparsable: ...", for an empty text, or one without a numbered aspect where they are asked for.
    """
    if not text.strip():
        raise RowError("unparsable: the text is empty")
    if template.parser == "free":
        return {"text": text.strip()}
    return _aspects(text, template.factors)


def _aspects(text: str, factors: tuple[str, ...]) -> dict[str, str]:
    """Numbered aspects, `1. Genre: ...`; a number alone takes the name of the factor asked for under it."""
    marks = list(_AT_LINE.finditer(text))
    inline = list(_INLINE.finditer(text))
    if len(marks) < 2 <= len(inline):
        marks = inline
    fields: dict[str, str] = {}
    for place, mark in enumerate(marks):
        end = marks[place + 1].start() if place + 1 < len(marks) else len(text)
        number, body = int(mark.group(1)), text[mark.end() : end].strip()
        label = _LABEL.match(body) or _heading(body, factors)
        if label:
            name, body = label.group(1).strip(" *"), body[label.end() :].strip()
        else:
            name = factors[number - 1] if 1 <= number <= len(factors) else f"aspect {number}"
        if name and body:
            fields[name] = f"{fields[name]} {body}" if name in fields else body
    if not fields:
        raise RowError("unparsable: no numbered aspect with a text in the answer")
    return fields


def _heading(body: str, factors: tuple[str, ...]) -> re.Match[str] | None:
    """A factor's name alone on its line."""
    heading = _HEADING.match(body)
    known = {factor.lower() for factor in factors}
    return heading if heading and heading.group(1).strip(" *").lower() in known else None
