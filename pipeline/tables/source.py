"""Foreign files, Parquet or CSV, read in batches whose columns come out as a mapping wants them.

What cannot be had is named with file, column, row and value.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pyarrow.types as pt

from laserbatch.pipeline.errors import TableError, first_line
from laserbatch.pipeline.tables.columns import ATTRIBUTE, ID
from laserbatch.pipeline.tables.csv_faults import (
    Doubts,
    encoding_doubt,
    encoding_fault,
    open_lines,
    python_reader,
    quote_fault,
    unclosed_quote,
)
from laserbatch.pipeline.tables.findings import shown_value
from laserbatch.pipeline.tables.schema import (
    EARLIEST_S,
    LATEST_S,
    PATH_TYPE,
    TIMESTAMP_TYPE,
    UNITS_PER_SECOND,
    id_type,
    plain_column,
    plain_type,
)
from laserbatch.pipeline.tables.schema import timestamps as known_times
from laserbatch.pipeline.tables.settings import CsvFormat, SourceColumn, SourceFiles
from laserbatch.pipeline.tables.time_formats import ZONES_EXPECTED, parse_times
from laserbatch.pipeline.tables.time_units import span_of
from laserbatch.pipeline.validation import nearest

BATCH_ROWS = 128 * 1024
_TYPES = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
_EXPECTED = {pa.int64(): "an integer below 2**63", pa.float64(): "a number", pa.bool_(): "true or false"}
_ZONE_PATTERN = r":\d{2}(\.\d+)?\s*(Z|[+-]\d{2}(:?\d{2})?)$"
ALL_UNITS = f"{', '.join(UNITS_PER_SECOND)}, iso, or a format like %d/%m/%Y"
MAX_EXACT = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}  # whole numbers that floats hold exactly
WHOLE_ID = r"^-?(0|[1-9]\d*)$"
FLOAT_ID = r"^-?(0|[1-9]\d*)\.0+$"  # as pandas writes whole numbers where one is missing
_CUT_ID = r"^-?\d([.,]\d+[eE]\+?|[eE]\+)\d+$|^-?\d{1,3}(,\d{3})+$"  # as a spreadsheet shows a long number
_NO_TEXT = pa.scalar(None, pa.string())


@dataclass(frozen=True)
class SourceBatch:
    """Some rows of one source file, and where they were. Raises TableError for what it does not have."""

    file: Path
    first_row: int
    rows: pa.RecordBatch

    def typed(self, name: str, kind: pa.DataType) -> pa.Array:
        """A column as int64, float64, bool or string."""
        return self._converted(name, lambda column: to_type(column, kind))

    def timed(self, name: str, unit: str) -> pa.Array:
        """A column as timestamp[us, UTC]; `unit` as `to_time` takes it."""
        return self._converted(name, lambda column: to_time(column, unit))

    def numbers(self, name: str) -> tuple[int, int] | None:
        """The least and the greatest number of a column; None where it holds no numbers."""
        return span_of(plain_column(self._column(name)))

    def ids(self, name: str, wanted: str, is_whole: bool = False) -> pa.Array:
        """A column of ids; `wanted` as in `settings.IdTypes`.

        `is_whole`: text such as 123.0 is the whole number, as it is where `wanted` is int64.
        """
        column = self._column(name)
        stored = plain_type(column.type)
        is_long = pt.is_decimal(stored) and stored.scale == 0 and wanted == "string"  # it may have 38 digits
        if (pt.is_floating(stored) or pt.is_decimal(stored)) and not is_long:  # pandas has floats where one is missing
            whole = self._converted(name, _whole_numbers)
            return whole.cast(pa.string()) if wanted == "string" else whole
        kind = _TYPES[wanted] if wanted != "keep" else id_type(column.type)
        if kind is None:
            raise TableError(
                f"{self.file}, column {name}: ids of type {column.type}; expected {ID.expected}. Set `ids` in the "
                "mapping to what they shall become, string or int64."
            )

        def convert(values: pa.Array) -> pa.Array:
            values = plain_column(values)
            if values.type == pa.string():
                values = _uncut(values)
                values = pc.utf8_trim_whitespace(values) if kind == pa.int64() else values
                values = _whole_texts(values) if is_whole or kind == pa.int64() else values
            return to_type(values, kind)

        return self._converted(name, convert)

    def attribute(self, wanted: SourceColumn) -> pa.Array:
        """A column as the mapping of an attribute says."""
        if wanted.column is None:
            return self._flagged(wanted.flags)
        column = self._column(wanted.column)
        if wanted.type is None and wanted.separator is None and not ATTRIBUTE.accepts(column.type):
            raise TableError(
                f"{self.file}, column {wanted.column}: an attribute of type {column.type}; expected "
                f"{ATTRIBUTE.expected}. Leave it out by naming the `attributes` that you want in the mapping, or "
                "write its parts as columns of their own."
            )
        kind = pa.string() if wanted.words else plain_type(column.type)
        kind = _TYPES[wanted.type] if wanted.type else kind

        def convert(values: pa.Array) -> pa.Array:
            if wanted.null_values or wanted.words:
                codes, words, nulls = list(wanted.words), list(wanted.words.values()), wanted.null_values
                values = pc.utf8_trim_whitespace(to_type(values, pa.string()))
                values = pc.if_else(pc.is_in(values, pa.array(nulls, pa.string())), _NO_TEXT, values)
                found = pc.index_in(values, pa.array(codes, pa.string()))
                values = pc.coalesce(pa.array(words, pa.string()).take(found), values)
            return to_path(values, wanted.separator) if wanted.separator is not None else to_type(values, kind)

        return self._converted(wanted.column, convert)

    def _flagged(self, words: dict[str, str]) -> pa.Array:
        """Of each row the words of the columns that hold 1, as list<string>."""
        flags = [(word, self.typed(name, pa.bool_()).fill_null(False).to_pylist()) for name, word in words.items()]
        rows = range(self.rows.num_rows)
        return pa.array([[word for word, is_set in flags if is_set[row]] for row in rows], PATH_TYPE)

    def _column(self, name: str) -> pa.Array:
        names = self.rows.schema.names
        if name not in names:
            advice = "" if self.file.suffix == ".parquet" else (
                ". Where a CSV has another `delimiter`, or no header line, say so in the mapping (`column_names`)"
            )  # fmt: skip
            found = f"{self.file} has no column {name!r}, which the mapping names; {nearest(name, names)}"
            raise TableError(found + advice)
        if names.count(name) > 1:
            raise TableError(f"{self.file} has {names.count(name)} columns {name!r}; rename or drop all but one.")
        return self.rows.column(name)

    def _converted(self, name: str, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
        try:
            return convert(self._column(name))
        except ConversionFault as fault:
            raise TableError(
                f"{self.file}, column {name}, row {self.first_row + fault.row}: found {fault.value!r}, expected "
                f"{fault.expected}. Correct the row, or the mapping of this column."
            ) from None
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise TableError(f"{self.file}, column {name}: {error}. Correct the mapping of this column.") from None


def source_files(files: SourceFiles, source: Path) -> list[Path]:
    """The files that a part of a mapping names, in name order."""
    return sorted(path for path in source.glob(files.files) if path.is_file())


def read_source(
    files: SourceFiles, source: Path, table: str, note: Callable[[str], object] = lambda text: None
) -> Iterator[SourceBatch]:
    """The rows of a table's source files, in name order. Raises TableError for a file that is not there or not one.

    `note` is called with what the quotes of a CSV file leave in doubt: fields over several lines, quotes kept as text.
    """
    paths = source_files(files, source)
    if not paths:
        found = f"no file {source / files.files}" if source.is_dir() else f"{source} is not a folder"
        raise TableError(f"table {table}: {found}; expected a folder with what `files` in the mapping names.")
    for path in paths:
        first_row = 0
        try:
            for rows in _parquet(path) if path.suffix == ".parquet" else _csv(path, files, note):
                if rows.num_rows:
                    yield SourceBatch(path, first_row, rows)
                    first_row += rows.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
            if path.suffix != ".parquet" and (fault := _csv_fault(path, files.csv_format(path), error)):
                raise TableError(fault) from None
            raise TableError(
                f"{path} cannot be read: {first_line(error)}. Check `csv` (`delimiter`, `quote`, `escape`, "
                "`encoding`) and `column_names` in the mapping, and that every quote is closed."
            ) from None


def _csv_fault(path: Path, form: CsvFormat, error: Exception) -> str | None:
    """Why a CSV cannot be read, where its encoding or its quotes say so."""
    if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
        return encoding_fault(path, form.encoding)
    return quote_fault(path, form) if form.quote and not isinstance(error, OSError) else None


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(BATCH_ROWS)


def _csv(path: Path, files: SourceFiles, note: Callable[[str], object]) -> Iterator[pa.RecordBatch]:
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
        with open_lines(opened(), form.encoding) as lines:
            names = next(python_reader(lines, form), [])
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
    doubts, num_rows, last = Doubts(path, form), 0, None
    try:
        with pacsv.open_csv(opened(), read_options=read, parse_options=parse, convert_options=text) as reader:
            for rows in reader:
                doubts.add(rows, num_rows)
                num_rows, last = num_rows + rows.num_rows, rows if rows.num_rows else last
                yield rows
    except GeneratorExit:  # who looks at the first rows alone is told of what those leave in doubt
        for doubt in (*doubts.notes(), encoding_doubt(path, form.encoding), form.quote and quote_fault(path, form)):
            if doubt:
                note(doubt)
        raise
    if form.quote and last is not None:
        fault = unclosed_quote(path, form, num_rows - 1, last)
        if fault := fault or quote_fault(path, form, is_sure=doubts.over_lines.num > 0):
            raise TableError(fault)
    for doubt in (*doubts.notes(), encoding_doubt(path, form.encoding)):
        if doubt:
            note(doubt)


class ConversionFault(Exception):
    """A value of a column, by its row within it, is not what was expected."""

    def __init__(self, row: int, value: object, expected: str) -> None:
        super().__init__(f"row {row}: {value!r} is not {expected}")
        self.row, self.value, self.expected = row, value, expected


def to_type(column: pa.Array, kind: pa.DataType, expected: str | None = None) -> pa.Array:
    """The column as int64, float64, bool or string; text is trimmed before. ConversionFault for "12a" and the like."""
    column = plain_column(column)  # pandas writes a missing integer as NaN, which is null here
    if column.type == kind:
        return column
    trimmed = pc.utf8_trim_whitespace(column) if column.type == pa.string() else column
    return _each(trimmed, column, lambda values: values.cast(kind), expected or _EXPECTED.get(kind, f"a {kind}"))


def _whole_numbers(column: pa.Array) -> pa.Array:
    """Ids that are floats or decimals as int64; ConversionFault for one with a fraction, or too large to be exact."""
    column = plain_column(column)

    def convert(values: pa.Array) -> pa.Array:
        whole = values.cast(pa.int64())
        if pt.is_floating(values.type) and pc.any(pc.greater(pc.abs(whole), MAX_EXACT[values.type])).as_py():
            raise pa.ArrowInvalid("not exact")
        return whole

    limit = f" of at most {MAX_EXACT[column.type]:,}, which floats hold exactly" if pt.is_floating(column.type) else ""
    return _each(column, column, convert, f"an id: a whole number{limit}, or text; export larger ids as text")


def _uncut(ids: pa.Array) -> pa.Array:
    """The ids; ConversionFault for text such as 1.23E+11 or 123,456, which spreadsheets make of long numbers."""
    is_cut = pc.fill_null(pc.match_substring_regex(pc.utf8_trim_whitespace(ids), _CUT_ID), False)
    if is_cut.true_count:
        row = pc.index(is_cut, True).as_py()
        raise ConversionFault(row, ids[row].as_py(), "an id with all of its digits alone; export the column as text")
    return ids


def _whole_texts(ids: pa.Array) -> pa.Array:
    """The ids, those such as 123.0 as 123; ConversionFault for one of them that is too large to be exact."""
    is_float = pc.fill_null(pc.match_substring_regex(ids, FLOAT_ID), False)
    if not is_float.true_count:
        return ids
    _whole_numbers(pc.if_else(is_float, ids, _NO_TEXT).cast(pa.float64()))
    return pc.if_else(is_float, pc.replace_substring_regex(ids, r"\.0+$", ""), ids)


def to_path(column: pa.Array, separator: str) -> pa.Array:
    """Text split at a separator into list<string>; parts are trimmed and empty ones left out. Null stays null."""
    text = to_type(column, pa.string())
    parts = pc.split_pattern(text, separator)
    trimmed, rows = pc.utf8_trim_whitespace(pc.list_flatten(parts)), pc.list_parent_indices(parts)
    is_kept = pc.not_equal(trimmed, "")
    num_parts = np.bincount(rows.filter(is_kept).to_numpy(), minlength=len(text))
    offsets = pa.array(np.concatenate([[0], np.cumsum(num_parts)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, trimmed.filter(is_kept), mask=pc.is_null(text))


def to_time(column: pa.Array, unit: str) -> pa.Array:
    """The column as timestamp[us, UTC]; ConversionFault for what cannot be read so.

    Timestamps and dates are taken as they are; numbers, and text that holds numbers, count `unit`s ("s", "ms", "us",
    "ns") since 1970; "iso" is text like 2024-05-31T23:59:00Z (no zone: UTC); else `unit` is a strptime format, as
    `time_formats` reads it.
    """
    column = plain_column(column)
    if pt.is_timestamp(column.type) or pt.is_date(column.type):
        return _each(column, column, known_times, "a time that 64 bits of microseconds hold")
    if unit in UNITS_PER_SECOND:
        expected = f"a time between 1900 and 2200 in {unit} since 1970, or another `unit`: {ALL_UNITS}"
        numbers = to_type(column, pa.float64() if _has_fractions(column) else pa.int64(), expected)
        return _each(numbers, column, lambda values: _from_epoch(values, unit), expected)
    text = pc.utf8_trim_whitespace(to_type(column, pa.string()))
    if unit == "iso":
        return _each(text, column, _from_iso, "an ISO 8601 time such as 2024-05-31T23:59:00Z")
    zone = f", {ZONES_EXPECTED}" if "%z" in unit.lower() else ""
    expected = f"an existing day and time of the form {unit}{zone}"
    return _each(text, column, lambda values: parse_times(values, unit), expected)


def _has_fractions(column: pa.Array) -> bool:
    if column.type == pa.string():
        return bool(pc.any(pc.match_substring(column, ".")).as_py())
    return not pt.is_integer(column.type)


def _from_epoch(values: pa.Array, unit: str) -> pa.Array:
    seconds = pc.divide(values.cast(pa.float64(), safe=False), float(UNITS_PER_SECOND[unit]))
    if pc.any(pc.or_(pc.less(seconds, EARLIEST_S), pc.greater(seconds, LATEST_S))).as_py():
        raise pa.ArrowInvalid("out of range")
    if pt.is_floating(values.type):
        return pc.round(pc.multiply(values, 1e6 / UNITS_PER_SECOND[unit])).cast(pa.int64()).cast(TIMESTAMP_TYPE)
    return values.cast(pa.timestamp(unit, tz="UTC")).cast(TIMESTAMP_TYPE, safe=unit != "ns")


def _from_iso(values: pa.Array) -> pa.Array:
    has_zone = pc.match_substring_regex(values, _ZONE_PATTERN)
    zoned = pc.if_else(has_zone, values, _NO_TEXT).cast(TIMESTAMP_TYPE)
    local = pc.if_else(has_zone, _NO_TEXT, values).cast(pa.timestamp("us"))
    return pc.coalesce(zoned, local.cast(TIMESTAMP_TYPE))


def _each(column: pa.Array, shown: pa.Array, convert: Callable[[pa.Array], pa.Array], expected: str) -> pa.Array:
    """Convert a column at once; when that fails, find the first row that does by halving."""
    try:
        return convert(column)
    except pa.ArrowInvalid:
        start, length = 0, len(column)
        while length > 1:
            half = length // 2
            try:
                convert(column.slice(start, half))
                start, length = start + half, length - half
            except pa.ArrowInvalid:
                length = half
        raise ConversionFault(start, shown_value(shown[start]), expected) from None
