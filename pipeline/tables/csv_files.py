"""Reading of CSV files of any format as text, in batches; what is doubtful is counted, shown or refused.

Arrow accepts some faults silently, or refuses them without naming the place: quotes, encodings, zero bytes.
"""

import codecs
import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.settings import FileFormat, SourceFiles

CHUNK_BYTES = 1 << 24
BLOCK_BYTES = 1 << 22  # that Arrow reads at once; a row must fit in
_MARKS = (
    (b"PK\x03\x04", "a spreadsheet (.xlsx, .ods) or a zip archive"), (b"\xd0\xcf\x11\xe0", "a spreadsheet (.xls)"),
    (b"\x1f\x8b", "a gzip file, whose name must end in .gz"), (b"PAR1", "Parquet, whose name must end in .parquet"),
    (b"SQLite f", "a database of SQLite"), (b"ORC", "ORC"), (b"Obj\x01", "Avro"),
)  # fmt: skip
# As databases, pandas and spreadsheets write a missing value or a failed formula.
_NULL_WORDS = ["\\N", "NULL", "nan", "<NA>", "#N/A", "#REF!", "#VALUE!", "#DIV/0!", "#NAME?", "#NUM!"]
_SHOWN = 60  # characters of a value in a message


def read_csv(path: Path, files: SourceFiles, note: Callable[[str], object]) -> Iterator[pa.RecordBatch]:
    """Read a CSV as text columns. No type is guessed, so that the zip code 01234 keeps its zero."""
    form = files.csv_format(path)
    converted = None
    if len(form.delimiter) > 1:  # such as `::` of MovieLens
        with pa.input_stream(str(path)) as raw:
            converted = pa.py_buffer(raw.read().replace(form.delimiter.encode(form.encoding), b"\x1f"))
        form = replace(form, delimiter="\x1f")

    def opened() -> pa.NativeFile:
        return pa.input_stream(str(path)) if converted is None else pa.BufferReader(converted)

    names = files.column_names
    if names is None:
        with _open_lines(opened(), form.encoding) as lines:
            names = next(filter(None, _python_reader(lines, form)), [])  # Arrow skips empty lines, too
    read = pacsv.ReadOptions(block_size=BLOCK_BYTES, encoding=form.encoding, column_names=files.column_names)
    parse = pacsv.ParseOptions(
        delimiter=form.delimiter,
        quote_char=form.quote or False,
        escape_char=form.escape or False,
        newlines_in_values=bool(form.quote or form.escape),
    )
    text = pacsv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=["", *form.null_values]
    )
    doubts, num_rows = _Doubts(path, form), 0

    def tell(*more: str | None) -> None:
        for doubt in filter(None, (*doubts.notes(), _encoding_doubt(path, form.encoding), *more)):
            note(doubt)

    try:
        with pacsv.open_csv(opened(), read_options=read, parse_options=parse, convert_options=text) as reader:
            for rows in reader:
                doubts.add(rows, num_rows)
                num_rows += rows.num_rows
                yield rows
    except pa.ArrowInvalid:
        read.use_threads = False  # with one thread, the error names the row
        with pacsv.open_csv(opened(), read_options=read, parse_options=parse, convert_options=text) as reader:
            for _ in reader:
                pass
        raise
    except GeneratorExit:  # a caller that reads only the first rows gets the notes on those
        tell(form.quote and _quote_fault(path, form))
        raise
    tell()
    if form.quote and (fault := _quote_fault(path, form, is_sure=doubts.num["over_lines"] > 0)):
        raise TableError(fault)


def csv_fault(path: Path, form: FileFormat, error: Exception) -> str | None:
    """Why a CSV cannot be read, if its encoding, its quotes or a long row is the reason; otherwise None."""
    if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
        return _encoding_fault(path, form.encoding)
    with suppress(OSError), pa.input_stream(str(path)) as raw:
        start = raw.read(1024)
        if start.startswith((b'{"', b"[{")):
            return f"{path} is no CSV, but JSON. Export it as CSV or Parquet."
        if kind_of_bytes(start) or ("A\n".encode(form.encoding) == b"A\n" and b"\0" in start):
            return _no_text(path, "line 1")
    if "straddles two block boundaries" in str(error):
        return (form.quote and _quote_fault(path, form, is_sure=True)) or _length_fault(path, form)
    return _quote_fault(path, form) if form.quote and not isinstance(error, OSError) else None


@dataclass
class _Doubts:
    """Doubts about the quotes and null values of a file that is being read, by kind."""

    path: Path
    form: FileFormat
    num: Counter[str] = field(default_factory=Counter)  # doubtful fields
    first: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # row, column and value of the first one
    null_words: set[str] = field(default_factory=set)

    def _count(self, name: str, first_row: int, column: pa.Array, kind: str, is_match: pa.Array) -> None:
        is_match = pc.fill_null(is_match, False)
        if is_match.true_count:
            row = pc.index(is_match, True).as_py()
            place = first_row + row, name, column[row].as_py()
            self.first[kind] = min(self.first.get(kind, place), place, key=itemgetter(0))
            self.num[kind] += is_match.true_count

    def add(self, rows: pa.RecordBatch, first_row: int) -> None:
        """Examine some rows. Raises TableError for a header or a byte order mark among them, or a zero byte."""
        is_marked = pc.fill_null(pc.starts_with(rows.column(0), "\ufeff"), False)
        if is_marked.true_count:
            row = first_row + pc.index(is_marked, True).as_py()
            raise TableError(
                f"{self.path}, row {row}: the row begins with a byte order mark (U+FEFF), as in joined files. Remove "
                "it, and the header after it if there is one; or import the files without joining them."
            )
        is_header = _is_header(rows)
        if is_header.true_count:
            row = first_row + pc.index(is_header, True).as_py()
            raise TableError(
                f"{self.path}, row {row}: the row repeats the names of the columns, as in joined files, or as a header "
                "does if the mapping sets `column_names`. Remove the row, or leave out `column_names`. If the first "
                "line of the file is no header, set `column_names`."
            )
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            text_bytes = column.buffers()[2]  # bytes of all strings; they show that most batches raise no doubt
            text_bytes = b"" if text_bytes is None else text_bytes.to_pybytes()
            count = partial(self._count, name, first_row, column)
            if b"\0" in text_bytes or "\0" in name:
                count("zeros", pc.match_substring(column, "\0"))
                if self.num["zeros"] or "\0" in name:
                    row, *_ = self.first.get("zeros", (0,))
                    raise TableError(_no_text(self.path, f"column {name!r}, row {row}"))
            is_null = pc.is_in(column, pa.array(_NULL_WORDS))
            count("nulls", is_null)
            self.null_words.update(column.filter(is_null).unique().to_pylist())
            if self.form.quote:
                if b"\n" in text_bytes or b"\r" in text_bytes:
                    count("over_lines", pc.match_substring_regex(column, r"[\r\n]"))
                is_single = pc.and_(pc.starts_with(column, "'"), pc.ends_with(column, "'"))
                if rows.num_rows > 1 and pc.all(is_single).as_py():
                    count("single_quotes", is_single)
                if pc.any(pc.or_(pc.starts_with(column, " "), pc.starts_with(column, "\t"))).as_py():
                    quote = f"\\x{ord(self.form.quote):02x}"
                    pattern = rf"(?s)^[ \t]+{quote}.*{quote}[ \t]*$"
                    count("kept_quotes", pc.match_substring_regex(column, pattern))
            elif len(self.form.delimiter) == 1 and self.form.delimiter != "\x1f":
                count("kept_quotes", pc.match_substring_regex(column, r'(?s)^".*"$'))

    def notes(self) -> Iterator[str]:
        """A sentence for each kind of doubt."""
        nulls = f"`csv: {{null_values: {json.dumps(sorted(self.null_words, key=_NULL_WORDS.index))}}}`"
        kept, advice = "field in quotes, with the quotes kept as text", "set `csv: {quote: '\"'}` in the mapping."
        if self.form.quote:
            kept = "field in quotes after a blank, with the quotes kept as text"
            advice = "export the file without blanks after delimiters."
        for kind, what, what_then in (
            ("nulls", "field kept as text", f"If such a field means a missing value, set {nulls} in the mapping."),
            ("single_quotes", "field in single quotes, with the quotes kept as text",
             'If the quotes enclose fields, set `csv: {quote: "\'"}` in the mapping.'),
            ("over_lines", "quoted field over several lines",
             "If quotes are plain text in this file, set `csv: {quote: null}` in the mapping."),
            ("kept_quotes", kept, f"If the quotes enclose fields, {advice}"),
        ):  # fmt: skip
            if num := self.num[kind]:
                row, name, value = self.first[kind]
                fields = what.replace("field", "fields", 1) if num > 1 else what
                value = f"{value[:_SHOWN]!r}{' ...' * (len(value) > _SHOWN)}"
                yield f"{self.path}: {num:,} {fields}, first in column {name}, row {row}: {value}. {what_then}"


def _is_header(rows: pa.RecordBatch) -> pa.Array:
    """Whether each row holds just the names of the columns: bool[n]."""
    is_header = pa.array(np.full(rows.num_rows, rows.num_columns > 1))
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        is_header = pc.and_(is_header, pc.fill_null(pc.equal(column, name), not name))
        if not is_header.true_count:
            break
    return is_header


def _no_text(path: Path, place: str) -> str:
    """The message on a file of another format, on UTF-16 read as another encoding, or on a damaged file."""
    with pa.input_stream(str(path)) as raw:
        start = raw.read(1024)
    if (kind := kind_of_bytes(start)) is not None:
        return f"{path} is not text, but {kind}. Rename it, or export it as CSV or Parquet."
    odd, even = start[1::2].count(0), start[::2].count(0)
    if max(odd, even) > len(start) // 4:
        encoding = marked_encoding(start) or ("utf-16-le" if odd > even else "utf-16-be")
        return f"{path} looks like UTF-16; set `csv: {{encoding: {encoding}}}` in the mapping."
    return f"{path}, {place}: the text has a zero byte. Remove it, or export the file again."


def kind_of_bytes(start: bytes) -> str | None:
    """The format of a file that begins with some bytes, if it is a known binary format; otherwise None."""
    return next((kind for mark, kind in _MARKS if start.startswith(mark)), None)


def marked_encoding(start: bytes) -> str | None:
    """The encoding of a file whose first bytes are a byte order mark of UTF-16 or UTF-32; otherwise None."""
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    return "utf-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else None


def _encoding_fault(path: Path, encoding: str) -> str | None:
    """A message on where a file is not valid in an encoding, and on what to do; None if it is valid."""
    decoder, line, start = codecs.getincrementaldecoder(encoding)(), 1, b""
    try:
        with pa.input_stream(str(path)) as raw:
            while chunk := raw.read(CHUNK_BYTES):
                start = start or chunk[:8]
                line += decoder.decode(chunk).count("\n")
        decoder.decode(b"", final=True)
        return None
    except UnicodeDecodeError as error:
        line += error.object[: error.start].count(b"\n")
        excerpt = error.object[max(0, error.start - 20) : error.end + 20]
    marked = marked_encoding(start)
    if kind_of_bytes(start) is not None or (b"\0" in excerpt and marked is None):
        return _no_text(path, f"line {line}")
    suggested = marked or ("cp932" if codecs.lookup(encoding).name == "cp1252" else "cp1252")
    advice = f"Set `csv: {{encoding: {suggested}}}` in the mapping"
    advice += "" if suggested == marked else ", or whichever encoding it was written in (latin-1, gb18030, cp932, ...)"
    return f"{path}, line {line}: {excerpt!r} is not {encoding}. {advice}."


def _encoding_doubt(path: Path, encoding: str) -> str | None:
    """A message on a file that is valid UTF-8 beyond ASCII, but is read in another encoding; otherwise None."""
    if codecs.lookup(encoding).name.startswith("utf"):
        return None
    try:
        with _open_lines(pa.input_stream(str(path)), "utf-8") as lines:
            is_ascii = all([text.isascii() for text in iter(partial(lines.read, CHUNK_BYTES), "")])
    except UnicodeDecodeError:
        return None
    return None if is_ascii else (
        f"{path} is read as {encoding}, but all of it is valid UTF-8; remove `encoding` from the mapping if letters "
        "are wrong"
    )  # fmt: skip


def _quote_fault(path: Path, form: FileFormat, is_sure: bool = False) -> str | None:
    """A message on a field that continues after its closing quote, or on a quote that is never closed; otherwise None.

    Arrow reads both, though the quote was probably plain text. A strict reader, which is slow, looks for them if
    `is_sure`, or if the bytes next to quotes suggest it.
    """
    if not (is_sure or _has_text_beside_quotes(path, form)):
        return None
    with _open_lines(pa.input_stream(str(path)), form.encoding) as lines:
        reader, before = _python_reader(lines, form), 0
        try:
            for _ in reader:
                before = reader.line_num
            return None
        except csv.Error as error:
            reason = str(error)
    with _open_lines(pa.input_stream(str(path)), form.encoding) as lines:
        line = next(islice(lines, before, None), "").rstrip("\r\n")
    place = f"{path}, line {before + 1}: {line[:_SHOWN]!r}{' ...' * (len(line) > _SHOWN)}"
    if "unexpected end" in reason:
        return (
            f"{place}: a quote is never closed, so the rows after it are part of the field. Close it, or double it if "
            "it is part of the text; if quotes are plain text in this file, set `csv: {quote: null}` in the mapping."
        )
    advice = "if quotes are plain text in this file, set `csv: {quote: null}`"
    if f"\\{form.quote}" in line and not form.escape:
        advice = 'if a backslash escapes quotes, set `csv: {escape: "\\\\"}`'
    return (
        f"{place}: a field in quotes continues after its closing quote ({reason}). Double each quote that is part of a "
        f"text; or, {advice} in the mapping."
    )


def _length_fault(path: Path, form: FileFormat) -> str:
    """A message on the longest row of a file with a row that does not fit into a block."""
    longest, place, before = 0, 1, 0
    with _open_lines(pa.input_stream(str(path)), form.encoding) as lines:
        reader = _python_reader(lines, form)
        for row in reader:
            if (length := sum(map(len, row))) > longest:
                longest, place = length, before + 1
            before = reader.line_num
    return (
        f"{path}, line {place}: the row has {longest:,} characters, and a row of a CSV may have about "
        f"{BLOCK_BYTES:,} bytes. Shorten its fields, or export the file as Parquet."
    )


def _has_text_beside_quotes(path: Path, form: FileFormat) -> bool:
    """Whether a quote has no delimiter and no line end on either side, and no quote after it."""
    if "A\n".encode(form.encoding) != b"A\n":
        return True  # bytes are not characters in this encoding
    assert form.quote is not None
    ends = list(form.delimiter.encode(form.encoding) + b"\r\n")
    with pa.input_stream(str(path)) as raw:
        previous = b"\n"
        while chunk := raw.read(CHUNK_BYTES):
            text = np.frombuffer(previous + chunk, np.uint8)
            places = np.flatnonzero(text[1:-1] == ord(form.quote)) + 1
            is_within = ~np.isin(text[places - 1], ends) & ~np.isin(text[places + 1], [*ends, ord(form.quote)])
            if is_within.any():
                return True
            previous = text[-2:].tobytes()
    return False


def _open_lines(raw: pa.NativeFile, encoding: str) -> io.TextIOWrapper:
    """A file as text, with unchanged line ends."""
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"  # Excel's files begin with a byte order mark, which is part of no name
    return io.TextIOWrapper(raw, encoding=encoding, newline="")


def _python_reader(lines: io.TextIOWrapper, form: FileFormat) -> Any:
    """Python's CSV reader for a format; it is slow, and strict about quotes."""
    csv.field_size_limit(2**31 - 1)  # for the whole process; the default is 128 KB
    quoting = csv.QUOTE_MINIMAL if form.quote else csv.QUOTE_NONE
    return csv.reader(
        lines, delimiter=form.delimiter, quotechar=form.quote, escapechar=form.escape, quoting=quoting, strict=True
    )
