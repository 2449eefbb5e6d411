"""The text of a table's values in prompts.

A value has the same text in whatever type an exporter stored it, and different values have different texts. The only
exceptions are texts longer than `max_value_chars`, which are cut: a change after the cut changes no prompt.
"""

import datetime
import json
import math
import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.knowledge.templates import Columns
from laserbatch.pipeline.tables.columns import no_date
from laserbatch.pipeline.tables.schema import is_list, is_text

SMALLEST_PLAIN, LARGEST_PLAIN = 1e-12, 1e21  # numbers beyond these are written with an exponent
PATH, SET = " > ", ", "
MAX_COMPOSED = 8  # more than the characters that NFC makes one: 4 at most, such as a vowel with three marks
SUBSECOND_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
YES_OR_NO = frozenset(("yes", "no", "true", "false"))  # mean nothing without their column's name
_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
# A list of texts that an exporter wrote as one text: JSON, or Python's form of a list, tuple or set.
_LISTED = re.compile(rf"[\[({{]\s*{_QUOTED}(?:\s*,\s*{_QUOTED})*\s*,?\s*[\])}}]", re.DOTALL)


def value_text(value: object, columns: Columns, name: str) -> str | None:
    """A value of a column as prompts show it, in one line; None for null, NaN, blank text and empty lists."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float | np.floating | Decimal):
        return None if math.isnan(value) else number_text(value)
    if isinstance(value, datetime.datetime):
        is_aware = value.tzinfo is not None
        value = time_text(str(value.astimezone(datetime.UTC).replace(tzinfo=None) if is_aware else value))
    parts = value if isinstance(value, list | tuple) else _listed(value)
    if parts is not None:
        value = list_text(parts, name in columns.paths, columns.max_value_chars)
    return None if value is None else plain_text(str(value), columns.max_value_chars) or None


def event_value(value: object, columns: Columns, name: str) -> str | None:
    """A value of an item's column in a line of history: without the column's name, except for a yes or no."""
    text = value_text(value, columns, name)
    is_named = text is not None and text.casefold() in YES_OR_NO
    return plain_text(f"{name}: {text}", columns.max_value_chars) if is_named else text


def number_text(value: int | float | np.floating | Decimal) -> str:
    """A number in full: the shortest digits that only it has in its type, without trailing zeros.

    Whole numbers below `LARGEST_PLAIN` have the same text in every type.
    """
    if isinstance(value, Decimal):
        text = f"{value:f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return "0" if text == "-0" else text
    if isinstance(value, int):
        return str(value)
    size = abs(float(value))
    if size < LARGEST_PLAIN and value == int(value):
        return str(int(value))
    if SMALLEST_PLAIN <= size < LARGEST_PLAIN:
        text = str(value)
        return text if "e" not in text else np.format_float_positional(value, trim="-")
    return np.format_float_scientific(value, trim="-", exp_digits=1) if math.isfinite(value) else str(value)


def time_text(text: str) -> str:
    """A time in ISO form: seconds without trailing zeros; only the day for midnight."""
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.removesuffix(" 00:00:00")


def list_text(parts: Iterable[object], is_path: bool, max_chars: int) -> str:
    """A path in its order; any other list as a sorted set, since exporters write a set in varying order.

    Of each part, at least the first `max_chars` are there.
    """
    between = PATH if is_path else SET
    texts = (_in_one_line(str(part), max_chars) for part in parts if part is not None)
    # Quotes keep one part with a comma apart from two parts.
    texts = [json.dumps(text, ensure_ascii=False) if between.strip() in text or text[0] == '"' else text
             for text in texts if text]  # fmt: skip
    return between.join(texts if is_path else sorted(set(texts), key=lambda text: (text.casefold(), text)))


def plain_text(text: str, max_chars: int) -> str:
    """One line in NFC, of at most `max_chars`: a value cannot begin a new line and so pass for another value."""
    text = _in_one_line(text, max_chars)
    return text if len(text) <= max_chars else text[: max_chars - 1].rstrip() + "…"


def num_longer(values: pa.ChunkedArray, max_chars: int) -> int:
    """The number of texts, or lists of texts, that have more than `max_chars` characters in one line."""
    if is_list(values.type) and is_text(values.type.value_type):
        values = pc.binary_join(values.cast(pa.large_list(pa.large_string())), pa.scalar(SET, pa.large_string()))
    elif not is_text(values.type):
        return 0
    long = values.filter(pc.greater(pc.utf8_length(values), max_chars))
    in_one_line = pc.utf8_trim_whitespace(pc.replace_substring_regex(long, r"\s+", " "))
    return pc.sum(pc.greater(pc.utf8_length(in_one_line), max_chars)).as_py() or 0


def _in_one_line(text: str, max_chars: int) -> str:
    """The text in one line and in NFC, or its beginning, of more than `max_chars`.

    Time to normalise grows with the square of a run of combining marks: a million take a quarter of an hour.
    """
    return unicodedata.normalize("NFC", " ".join(text.split())[: MAX_COMPOSED * (max_chars + 1)])


def python_values(values: pa.Array) -> list[object]:
    """Values for `value_text`, without loss of digits; times in UTC."""
    kind = values.type
    if pt.is_floating(kind) and kind != pa.float64():
        return list(values.to_numpy(zero_copy_only=False))
    if pt.is_duration(kind):
        digits = SUBSECOND_DIGITS[kind.unit]
        counts = values.cast(pa.int64()).to_pylist()
        return [n if n is None else f"{number_text(Decimal(n).scaleb(-digits))} seconds" for n in counts]
    if not pt.is_temporal(kind) or pt.is_interval(kind):
        return values.to_pylist()
    values = pc.if_else(pc.fill_null(no_date(values), False), None, values)
    if pt.is_timestamp(kind):
        values = values.cast(pa.timestamp(kind.unit))  # times with a zone become UTC
    return [text if text is None else time_text(text) for text in values.cast(pa.string()).to_pylist()]


def _listed(value: object) -> list[str] | None:
    """The parts of a text that lists texts; None for any other value."""
    if not isinstance(value, str) or not _LISTED.fullmatch(text := value.strip()):
        return None
    try:
        return json.loads(text)
    except ValueError:  # not JSON, but Python's form
        quoted = re.findall(_QUOTED, text, re.DOTALL)
        return [
            re.sub(r"\\(.)", lambda escaped: " " if escaped[1] in "nrt" else escaped[1], item[1:-1]) for item in quoted
        ]
