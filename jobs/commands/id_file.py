"""Reads a file of ids as editors and spreadsheets write it: one id per line, or a CSV with the column `user_id`.

It does not know whether ids exist; callers check that. An ambiguous file is refused, with the line at fault.
"""

import codecs
import csv
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.tables.csv_files import kind_of_bytes

HEADER = "user_id"
_DELIMITERS = "\t,;"
_ENCODINGS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_EXPECTED = "expected one id per line, or a CSV whose header names a column user_id, in UTF-8"


def read_ids(path: Path, note: Callable[[str], object] = lambda text: None) -> set[str]:
    """The ids of a file, without surrounding blanks, invisible characters and quotes; empty lines are skipped.

    UTF-16 is read if the file begins with its byte order mark. `note` is called with a line that says what was read as
    ids. Raises ConfigError, which names the line, if a line holds several fields, an open quote or a control character,
    or if the file is not text.
    """
    lines = [_trimmed(line) for line in re.split(r"\r\n|\r|\n", _text(path))]
    rows = [(number, line) for number, line in enumerate(lines, 1) if line]
    first = rows[0][1] if rows else ""
    delimiter = next((mark for mark in _DELIMITERS if HEADER in map(_unquoted, first.split(mark))), None)
    if delimiter is None:
        ids_by_line, read_as = [(number, _plain_id(path, number, line)) for number, line in rows], "one per line"
    else:
        ids_by_line, read_as = _of_csv(path, rows, delimiter), f"from the column {HEADER}"
    for number, key in ids_by_line:
        if not key:
            raise ConfigError(f"{path}, line {number}: the id is empty; {_EXPECTED}")
        if any(unicodedata.category(letter) == "Cc" for letter in key):
            raise ConfigError(f"{path}, line {number}: {key!r} holds a control character; {_EXPECTED}")
    ids = {key for _, key in ids_by_line}
    if ids:
        note(f"{path}: read {len(ids):,} ids, {read_as}; the first is {ids_by_line[0][1]!r}")
    return ids


def _text(path: Path) -> str:
    held = path.read_bytes()
    if (kind := kind_of_bytes(held)) is not None:
        raise ConfigError(f"{path} is not text, but {kind}; {_EXPECTED}")
    encoding = next((name for mark, name in _ENCODINGS.items() if held.startswith(mark)), "utf-8")
    try:
        text = held.decode(encoding)
    except UnicodeDecodeError as error:
        line = held[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}, line {line}: not {encoding.removesuffix('-sig').upper()} ({error.reason}); {_EXPECTED}: "
            "`iconv -f LATIN1 -t UTF-8` converts a file from Latin-1"
        ) from None
    if "\0" in text:
        raise ConfigError(f"{path} holds zero bytes, so it is not text, or UTF-16 without its mark; {_EXPECTED}")
    return text


def _of_csv(path: Path, rows: list[tuple[int, str]], delimiter: str) -> list[tuple[int, str]]:
    """The ids of a CSV with their line numbers; the first row is the header."""
    names, ids = [], []
    for number, line in rows:
        try:
            (row,) = csv.reader([line], delimiter=delimiter, strict=True, skipinitialspace=True)
        except csv.Error as error:
            raise ConfigError(f"{path}, line {number}: not a row of a CSV ({error}); {_EXPECTED}") from None
        names = names or [_trimmed(field) for field in row]
        if len(row) != len(names):
            raise ConfigError(f"{path}, line {number}: {len(row)} fields, but the header has {len(names)}")
        ids.append((number, _trimmed(row[names.index(HEADER)])))
    return ids[1:]


def _plain_id(path: Path, number: int, line: str) -> str:
    key = _unquoted(line)
    if key != line:
        return key
    if any(delimiter in line for delimiter in _DELIMITERS):
        raise ConfigError(
            f"{path}, line {number}: {line!r} holds several fields, and no header says which is the id; {_EXPECTED}. "
            "Put an id that holds a comma, a semicolon or a tab in double quotes"
        )
    if line[0] in "\"'" or line[-1] in "\"'":
        raise ConfigError(f"{path}, line {number}: {line!r} has a quote at only one end; {_EXPECTED}")
    return line


def _unquoted(field: str) -> str:
    """A field without the pair of quotes around it; a doubled quote within the pair becomes one."""
    field = _trimmed(field)
    if len(field) < 2 or field[0] != field[-1] or field[0] not in "\"'":
        return field
    quote, inner = field[0], field[1:-1]
    if quote in inner.replace(quote * 2, ""):
        return field  # several quoted fields: "a","b"
    return _trimmed(inner.replace(quote * 2, quote))


def _trimmed(text: str) -> str:
    """Text without surrounding blanks and invisible characters: no-break spaces, zero-width marks."""
    return text.strip("".join(letter for letter in {*text} if letter.isspace() or unicodedata.category(letter) == "Cf"))
