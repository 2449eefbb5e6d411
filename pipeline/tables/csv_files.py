"""CSV files of any format, read as text in batches; what their quotes leave in doubt is counted, shown or refused."""

import codecs
import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.settings import CsvFormat, SourceFiles

TAIL_BLOCK_BYTES = 1 << 20


def read_csv(path: Path, files: SourceFiles, note: Callable[[str], object]) -> Iterator[pa.RecordBatch]:
    """A CSV as text columns: nothing is guessed, so the zip code 01234 stays one."""
    form = files.csv_format(path)
    delimiter = form.delimiter
    is_long = len(delimiter) > 1  # MovieLens' `::`
    if is_long:
        with pa.input_stream(str(path)) as raw:
            held = pa.py_buffer(raw.read().replace(delimiter.encode(form.encoding), b"\x1f"))
        delimiter = "\x1f"

    def opened() -> pa.NativeFile:
        return pa.BufferReader(held) if is_long else pa.input_stream(str(path))

    form = form.model_copy(update={"delimiter": delimiter})
    names = files.column_names
    if names is None:
        with _lines(opened(), form.encoding) as lines:
            names = next(_python_reader(lines, form), [])
    read = pacsv.ReadOptions(encoding=form.encoding, column_names=files.column_names)
    parse = pacsv.ParseOptions(
        delimiter=delimiter,
        quote_char=form.quote or False,
        escape_char=form.escape or False,
        newlines_in_values=bool(form.quote or form.escape),
    )
    text = pacsv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=["", *form.null_values]
    )
    over_lines, with_quotes = _Doubt(), _Doubt()
    num_rows, last = 0, None
    with pacsv.open_csv(opened(), read_options=read, parse_options=parse, convert_options=text) as reader:
        for rows in reader:
            for name, column in zip(rows.schema.names, rows.columns, strict=True):
                if form.quote:
                    over_lines.add(name, num_rows, column, r"[\r\n]")
                elif not is_long:
                    with_quotes.add(name, num_rows, column, r'(?s)^".*"$')
            num_rows, last = num_rows + rows.num_rows, rows if rows.num_rows else last
            yield rows
    if over_lines.num:
        _require_closed_quote(path, form, num_rows - 1, last)
        _require_sound_quotes(path, form)
        note(
            f"{path}: {over_lines.num:,} quoted field{'s' * (over_lines.num > 1)} over several lines, "
            f"{over_lines.shown()}. If quotes are plain text in this file, set `csv: {{quote: null}}` in the mapping."
        )
    if with_quotes.num:
        note(
            f"{path}: {with_quotes.num:,} field{'s' * (with_quotes.num > 1)} in quotes, which were kept as text, "
            f"{with_quotes.shown()}. If the quotes enclose fields, set `csv: {{quote: '\"'}}` in the mapping."
        )


@dataclass
class _Doubt:
    """How many fields of a file look like something, and the first of them."""

    num: int = 0
    first: tuple[str, int, str] = ("", 0, "")  # column, row, value

    def add(self, name: str, first_row: int, column: pa.Array, pattern: str) -> None:
        """Count the fields of a column that match a pattern."""
        is_match = pc.fill_null(pc.match_substring_regex(column, pattern), False)
        if is_match.true_count:
            row = pc.index(is_match, True).as_py()
            if not self.num or first_row + row < self.first[1]:
                self.first = (name, first_row + row, column[row].as_py())
            self.num += is_match.true_count

    def shown(self) -> str:
        """Where the first one is, and how it begins."""
        name, row, value = self.first
        return f"first in column {name}, row {row}: {value[:60]!r}{' ...' * (len(value) > 60)}"


def _require_closed_quote(path: Path, form: CsvFormat, row: int, last: pa.RecordBatch) -> None:
    """Refuse a file whose last value begins with a quote and holds all lines that follow: Arrow takes it as it is."""
    value = last.column(last.num_columns - 1)[-1].as_py() if last.num_columns else None
    if value is None or "\n" not in value:
        return
    tail = b""
    with pa.input_stream(str(path)) as file:  # which unpacks what is compressed
        while block := file.read(TAIL_BLOCK_BYTES):
            tail = (tail + block)[-64:]
    if not tail.decode(form.encoding, errors="ignore").rstrip("\r\n").endswith(form.quote):
        raise TableError(
            f"{path}, column {last.schema.names[-1]}, row {row}: the quote before {value[:40]!r} is never closed, so "
            "the rows behind it are part of it; close it, or double it where it is meant"
        )


def _require_sound_quotes(path: Path, form: CsvFormat) -> None:
    """Refuse a file in which a field goes on after its closing quote: the quote before it was probably plain text."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with _lines(pa.input_stream(str(path)), form.encoding) as lines:
            reader, before = _python_reader(lines, form), 0
            try:
                for _ in reader:
                    before = reader.line_num
            except csv.Error as error:
                raise TableError(
                    f"{path}, line {before + 1}: a field in quotes goes on after its closing quote ({error}). "
                    "Double each quote that is part of a text, or, if quotes are plain text in this file, set "
                    "`csv: {quote: null}` in the mapping."
                ) from None
    finally:
        csv.field_size_limit(limit)


def _lines(raw: pa.NativeFile, encoding: str) -> io.TextIOWrapper:
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"  # what Excel writes begins with a mark that is part of no name
    return io.TextIOWrapper(raw, encoding=encoding, newline="")


def _python_reader(lines: io.TextIOWrapper, form: CsvFormat) -> Any:
    """Python's reader of the same format, which is slow, and strict about quotes."""
    quoting = csv.QUOTE_MINIMAL if form.quote else csv.QUOTE_NONE
    return csv.reader(
        lines, delimiter=form.delimiter, quotechar=form.quote, escapechar=form.escape, quoting=quoting, strict=True
    )
