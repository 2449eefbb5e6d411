"""A file of ids, an id a line or the column `user_id` of a CSV, as editors, spreadsheets and databases write it.

It knows no workspace: whether somebody has an id is for the caller to find out. A file whose form leaves open what its
ids are is refused by line.
"""

import codecs
import csv
import re
import unicodedata
from pathlib import Path

from laserbatch.pipeline.errors import ConfigError

HEADER = "user_id"
_DELIMITERS = "\t,;"
_BYTE_ORDER_MARKS = (  # UTF-32's first, since UTF-16's is the begin of it
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_EXPECTED = "expected an id a line, or a CSV whose header names a column user_id, in UTF-8"


def read_ids(path: Path) -> set[str]:
    """The ids of a file, without blanks, invisible characters and quotes around them; empty lines are none.

    UTF-16 and UTF-32 are read where the file begins with their byte order mark. Raises ConfigError, which names the
    line, where a line holds several fields, an open quote or a control character, or the file is no such text.
    """
    lines = [_trimmed(line) for line in re.split(r"\r\n|\r|\n", _text(path))]
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line]
    if not numbered:
        return set()
    delimiter = _delimiter(numbered[0][1])
    if delimiter is not None or _unquoted(numbered[0][1]) == HEADER:
        rows = [(number, _fields(path, number, line, delimiter or ",")) for number, line in numbered]
        (_, names), *rows = rows
        for number, row in rows:
            if len(row) != len(names):
                raise ConfigError(f"{path}, line {number}: {len(row)} fields, but the header has {len(names)}")
        column = names.index(HEADER)
        found = [(number, row[column]) for number, row in rows]
    else:
        found = [(number, _one_id(path, number, line)) for number, line in numbered]
    for number, key in found:
        if not key:
            raise ConfigError(f"{path}, line {number}: the id is empty; {_EXPECTED}")
        if any(unicodedata.category(letter) == "Cc" for letter in key):
            raise ConfigError(f"{path}, line {number}: {key!r} holds a control character; {_EXPECTED}")
    return {key for _, key in found}


def _text(path: Path) -> str:
    held = path.read_bytes()
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if held.startswith(mark)), "utf-8")
    try:
        text = held.decode(encoding)
    except UnicodeDecodeError as error:
        line = held[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}, line {line}: not {encoding.removesuffix('-sig').upper()} ({error.reason}); {_EXPECTED}: "
            "`iconv -f LATIN1 -t UTF-8` converts a file from Latin-1"
        ) from None
    if "\0" in text:
        raise ConfigError(
            f"{path}: the file holds zero bytes, so it is no text, or UTF-16 without its mark; {_EXPECTED}"
        )
    return text


def _delimiter(first: str) -> str | None:
    """That of a CSV whose header names the column; None where the first line is no such header."""
    for delimiter in _DELIMITERS:
        if delimiter in first and HEADER in [_unquoted(name) for name in first.split(delimiter)]:
            return delimiter
    return None


def _fields(path: Path, number: int, line: str, delimiter: str) -> list[str]:
    try:
        (row,) = csv.reader([line], delimiter=delimiter, strict=True, skipinitialspace=True)
    except csv.Error as error:
        raise ConfigError(f"{path}, line {number}: not a row of a CSV ({error}); {_EXPECTED}") from None
    return [_trimmed(name) for name in row]


def _one_id(path: Path, number: int, line: str) -> str:
    key = _unquoted(line)
    if key != line:
        return key
    if any(delimiter in line for delimiter in _DELIMITERS):
        raise ConfigError(
            f"{path}, line {number}: {line!r} holds several fields, and no header says which is the id; {_EXPECTED}. "
            "An id that holds a comma, a semicolon or a tab is to stand in double quotes"
        )
    if line[0] in "\"'" or line[-1] in "\"'":
        raise ConfigError(f"{path}, line {number}: {line!r} has a quote at one end alone; {_EXPECTED}")
    return line


def _unquoted(field: str) -> str:
    """A field without a pair of quotes around it; a doubled quote within double quotes is one."""
    field = _trimmed(field)
    if len(field) < 2 or field[0] != field[-1] or field[0] not in "\"'":
        return field
    quote, inner = field[0], field[1:-1]
    if quote in inner.replace(quote * 2, ""):
        return field  # several quoted fields: "a","b"
    return _trimmed(inner.replace(quote * 2, quote))


def _trimmed(text: str) -> str:
    """Text without blanks and characters that nobody sees around it: no-break spaces, zero-width marks."""
    begin, end = 0, len(text)
    while begin < end and _is_unseen(text[begin]):
        begin += 1
    while end > begin and _is_unseen(text[end - 1]):
        end -= 1
    return text[begin:end]


def _is_unseen(letter: str) -> bool:
    return letter.isspace() or unicodedata.category(letter) in ("Cf", "Zs")
