"""A file of ids, as editors, spreadsheets and databases write it: an id a line, a CSV, JSON lines or Parquet.

It knows no workspace: whether somebody has an id is for the caller to find out. A file whose form leaves open what its
ids are is refused by line.
"""

import codecs
import csv
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.tables.csv_faults import kind_of_bytes
from laserbatch.pipeline.tables.schema import id_type, plain_ids

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


def read_ids(path: Path, note: Callable[[str], object] = lambda text: None) -> set[str]:
    """The ids of a file, without blanks, invisible characters and quotes around them; empty lines are none.

    UTF-16 and UTF-32 are read where the file begins with their byte order mark. `note` is called with what was taken
    for an id. Raises ConfigError, which names the line, where a line holds several fields, an open quote or a control
    character, or the file is no such text.
    """
    if path.suffix == ".parquet" or path.read_bytes()[:4] == b"PAR1":
        found, taken = _of_parquet(path)
    else:
        found, taken = _of_text(path)
    for number, key in found:
        if not key:
            raise ConfigError(f"{path}, line {number}: the id is empty; {_EXPECTED}")
        if any(unicodedata.category(letter) == "Cc" for letter in key):
            raise ConfigError(f"{path}, line {number}: {key!r} holds a control character; {_EXPECTED}")
    ids = {key for _, key in found}
    if ids:
        note(f"{path}: read as ids: {taken}; {len(ids):,} in all, the first {found[0][1]!r}")
    return ids


def _of_text(path: Path) -> tuple[list[tuple[int, str]], str]:
    """The ids of a text file with their lines, and a description of what was read as an id."""
    lines = [_trimmed(line) for line in re.split(r"\r\n|\r|\n", _text(path))]
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line]
    if not numbered:
        return [], ""
    if (found := _of_json(path, numbered)) is not None:
        return found, f"the {HEADER} or the value of each JSON line"
    delimiter = _delimiter(numbered[0][1])
    if delimiter is not None or _unquoted(numbered[0][1]) == HEADER:
        rows = [(number, _fields(path, number, line, delimiter or ",")) for number, line in numbered]
        (_, names), *rows = rows
        for number, row in rows:
            if len(row) != len(names):
                raise ConfigError(f"{path}, line {number}: {len(row)} fields, but the header has {len(names)}")
        column = names.index(HEADER)
        return [(number, row[column]) for number, row in rows], f"the column {HEADER}"
    if (found := _only_column(path, numbered)) is not None:
        return found, "the only column that holds anything, from the first line on"
    return [(number, _one_id(path, number, line)) for number, line in numbered], "a line each"


def _only_column(path: Path, numbered: list[tuple[int, str]]) -> list[tuple[int, str]] | None:
    """The ids of a CSV without a header whose other columns are all empty; None for another file."""
    first = numbered[0][1]
    for delimiter in _DELIMITERS:
        if delimiter in first and first.startswith(delimiter) != first.endswith(delimiter):
            rows = [(number, _fields(path, number, line, delimiter)) for number, line in numbered]
            columns = {column for _, row in rows for column, field in enumerate(row) if field}
            if len(columns) == 1 and len({len(row) for _, row in rows}) == 1:
                return [(number, row[min(columns)]) for number, row in rows]
    return None


def _of_json(path: Path, numbered: list[tuple[int, str]]) -> list[tuple[int, str]] | None:
    """The ids of JSON lines or of a JSON list; None if the file does not begin as one."""
    first = numbered[0][1]
    if first[0] not in "{[":
        return None
    values: list[tuple[int, object]] = []
    try:
        if first[0] == "[":
            values = [(numbered[0][0], value) for value in json.loads("\n".join(line for _, line in numbered))]
        else:
            for number, line in numbered:
                values.append((number, json.loads(line)))
    except ValueError as error:
        if not values:
            return None  # an id that begins so
        number = numbered[len(values)][0]
        raise ConfigError(f"{path}, line {number}: not JSON, as the lines before it ({error}); {_EXPECTED}") from None
    found = []
    for number, value in values:
        key = value.get(HEADER) if isinstance(value, dict) else value
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise ConfigError(f"{path}, line {number}: {value!r} has no {HEADER} that is a text or a whole number")
        found.append((number, _trimmed(str(key))))
    return found


def _of_parquet(path: Path) -> tuple[list[tuple[int, str]], str]:
    """The ids of a Parquet file with their rows, counted from 1, and a description of what was read as an id."""
    try:
        schema = pq.read_schema(path)
        name = HEADER if HEADER in schema.names else schema.names[0]
        if name != HEADER and len(schema.names) > 1:
            raise ConfigError(f"{path} has no column {HEADER}, but several: {', '.join(schema.names)}")
        if id_type(schema.field(name).type) is None:
            raise ConfigError(f"{path}, column {name}: {schema.field(name).type} is no id; expected text or integers")
        keys = plain_ids(pq.read_table(path, columns=[name])[name]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from None
    ids = [(row, "" if key is None else _trimmed(str(key))) for row, key in enumerate(keys, 1)]
    return ids, f"the column {name}"


def _text(path: Path) -> str:
    held = path.read_bytes()
    if (kind := kind_of_bytes(held)) is not None:
        raise ConfigError(f"{path} is no text, but {kind}; {_EXPECTED}")
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
    """The delimiter of a CSV whose header names the column; None if the first line is no such header."""
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
    """Text without surrounding blanks and invisible characters: no-break spaces, zero-width marks."""
    begin, end = 0, len(text)
    while begin < end and _is_unseen(text[begin]):
        begin += 1
    while end > begin and _is_unseen(text[end - 1]):
        end -= 1
    return text[begin:end]


def _is_unseen(letter: str) -> bool:
    return letter.isspace() or unicodedata.category(letter) in ("Cf", "Zs")
