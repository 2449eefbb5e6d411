"""Conversion of columns to the types that a mapping asks for: numbers, ids, paths and times.

An error about a value that cannot be converted names its row; the caller adds file and column (`source.py`).
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.tables import schema as sc
from laserbatch.pipeline.tables.findings import shown_value
from laserbatch.pipeline.tables.times import ZONES_EXPECTED, parse_times

_EXPECTED = {pa.int64(): "an integer below 2**63", pa.float64(): "a number", pa.bool_(): "true or false"}
_ZONE_PATTERN = r":\d{2}(\.\d+)?(Z|[+-]\d{2}(:?\d{2})?)$"
# ISO forms that Arrow does not read: BigQuery's " UTC", blanks before a zone, a comma before the fraction (logs of
# Python and Java), digits beyond microseconds (Go), which are cut, and the form without separators.
_OTHER_ISO = {
    "UTC": "Z", r"\s+([Z+-])": r"\1", r"(:\d{2}),(\d)": r"\1.\2", r"(\.\d{6})\d+": r"\1",
    r"^(\d{4})(\d{2})(\d{2})T(\d{2})(\d{2})(\d{2})": r"\1-\2-\3T\4:\5:\6",
}  # fmt: skip
ALL_UNITS = f"{', '.join(sc.UNITS_PER_SECOND)}, iso, or a format like %d/%m/%Y"
MAX_EXACT = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}  # whole numbers that floats hold exactly
WHOLE_ID = r"^-?(0|[1-9]\d*)$"
FLOAT_ID = r"^-?(0|[1-9]\d*)\.0+$"  # as pandas writes whole numbers in a column with nulls
_CUT_ID = r"^-?\d([.,]\d+[eE]\+?|[eE]\+)\d+$|^-?\d{1,3}(,\d{3})+$"  # as a spreadsheet shows a long number
DECIMAL_COMMA = r"^\s*[+-]?\d+,\d+\s*$"
NO_TEXT = pa.scalar(None, pa.string())


class ConversionFault(Exception):
    """A value of a column is not what was expected; `row` is its row within the column."""

    def __init__(self, row: int, value: object, expected: str) -> None:
        super().__init__(f"row {row}: {value!r} is not {expected}")
        self.row, self.value, self.expected = row, value, expected


def to_type(column: pa.Array, kind: pa.DataType, expected: str | None = None) -> pa.Array:
    """The column as int64, float64, bool or string. Text to convert is trimmed. Raises ConversionFault for "12a"."""
    column = sc.widened(sc.plain_column(column), kind)  # pandas writes a missing integer as NaN, which is null here
    if column.type == kind:
        return column
    trimmed = pc.utf8_trim_whitespace(column) if column.type == pa.string() else column
    converted = _each(trimmed, column, lambda values: values.cast(kind), expected or _EXPECTED.get(kind, f"a {kind}"))
    if pt.is_floating(kind):
        refuse(column, pc.is_inf(converted), "a finite number")
    return converted


def with_points(column: pa.Array) -> pa.Array:
    """Numbers as text, their decimal commas (4,5) replaced by points. Raises ConversionFault for one with a point."""
    refuse(column, pc.match_substring(column, "."), "a number with a decimal comma and no point")
    return pc.replace_substring(column, ",", ".")


def whole_numbers(column: pa.Array, advice: str = "export larger ids as text") -> pa.Array:
    """Float or decimal ids as int64. Raises ConversionFault, with `advice`, for a fraction or one that is not exact."""
    column = sc.plain_column(column)

    def convert(values: pa.Array) -> pa.Array:
        whole = values.cast(pa.int64())
        if pt.is_floating(values.type) and pc.any(pc.greater(pc.abs(whole), MAX_EXACT[values.type])).as_py():
            raise pa.ArrowInvalid("not exact")
        return whole

    limit = f" of at most {MAX_EXACT[column.type]:,}, which floats hold exactly" if pt.is_floating(column.type) else ""
    return _each(column, column, convert, f"an id: a whole number{limit}, or text; {advice}")


def uncut(ids: pa.Array) -> pa.Array:
    """The same ids. Raises ConversionFault for 1.23E+11 or 123,456, which spreadsheets make of long numbers."""
    is_cut = pc.match_substring_regex(pc.utf8_trim_whitespace(ids), _CUT_ID)
    refuse(ids, is_cut, "an id with all of its digits and nothing else; export the column as text")
    return ids


def whole_texts(ids: pa.Array) -> pa.Array:
    """The ids, with 123.0 as 123. Raises ConversionFault for one of this form that is too large to be exact."""
    is_float = pc.fill_null(pc.match_substring_regex(ids, FLOAT_ID), False)
    if not is_float.true_count:
        return ids
    whole_numbers(pc.if_else(is_float, ids, NO_TEXT).cast(pa.float64()))
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
    """The column as timestamp[us, UTC]. Raises ConversionFault for a value that is not such a time.

    Timestamps and dates are taken as they are; numbers, and text that holds numbers, count `unit`s ("s", "ms", "us",
    "ns") since 1970; "iso" is text like 2024-05-31T23:59:00Z (no zone: UTC); any other `unit` is a strptime format.
    """
    column = sc.plain_column(column)
    if pt.is_timestamp(column.type) or pt.is_date(column.type):
        return _each(column, column, sc.timestamps, "a time that 64 bits of microseconds hold")
    if unit in sc.UNITS_PER_SECOND:
        expected = f"a time between 1900 and 2200 in {unit} since 1970, or another `unit`: {ALL_UNITS}"
        has_fractions = not pt.is_integer(column.type)
        if column.type == pa.string():  # 1.71561E+12 and the like: a spreadsheet keeps six digits; programs write e+
            is_cut = pc.match_substring(column, "E+")
            refuse(column, is_cut, "a time with all of its digits; export the column as text")
            has_fractions = bool(pc.any(pc.match_substring(column, ".")).as_py())
        numbers = to_type(column, pa.float64() if has_fractions else pa.int64(), expected)
        return _each(numbers, column, lambda values: _from_epoch(values, unit), expected)
    text = pc.utf8_trim_whitespace(to_type(column, pa.string()))
    if unit == "iso":
        return _each(text, column, _from_iso, "an ISO 8601 time such as 2024-05-31T23:59:00Z")
    zone = f", {ZONES_EXPECTED}" if "%z" in unit.lower() else ""
    expected = f"an existing day and time of the form {unit}{zone}"
    return _each(text, column, lambda values: parse_times(values, unit), expected)


def refuse(column: pa.Array, is_faulty: pa.Array, expected: str) -> None:
    """Raise ConversionFault for the first value that `is_faulty` marks."""
    row = pc.index(is_faulty, True).as_py()
    if row >= 0:
        raise ConversionFault(row, shown_value(column[row]), expected)


def _from_epoch(values: pa.Array, unit: str) -> pa.Array:
    seconds = pc.divide(values.cast(pa.float64(), safe=False), float(sc.UNITS_PER_SECOND[unit]))
    if pc.any(pc.or_(pc.less(seconds, sc.EARLIEST_S), pc.greater(seconds, sc.LATEST_S))).as_py():
        raise pa.ArrowInvalid("out of range")
    if pt.is_floating(values.type):
        return pc.round(pc.multiply(values, 1e6 / sc.UNITS_PER_SECOND[unit])).cast(pa.int64()).cast(sc.TIMESTAMP_TYPE)
    return values.cast(pa.timestamp(unit, tz="UTC")).cast(sc.TIMESTAMP_TYPE, safe=unit != "ns")


def _from_iso(values: pa.Array) -> pa.Array:
    try:
        return _from_arrow_iso(values)
    except pa.ArrowInvalid:
        for pattern, arrows in _OTHER_ISO.items():
            values = pc.replace_substring_regex(values, pattern, arrows)
        return _from_arrow_iso(values)


def _from_arrow_iso(values: pa.Array) -> pa.Array:
    has_zone = pc.match_substring_regex(values, _ZONE_PATTERN)
    zoned = pc.if_else(has_zone, values, NO_TEXT).cast(sc.TIMESTAMP_TYPE)
    local = pc.if_else(has_zone, NO_TEXT, values).cast(pa.timestamp("us"))
    return pc.coalesce(zoned, local.cast(sc.TIMESTAMP_TYPE))


def _each(column: pa.Array, original: pa.Array, convert: Callable[[pa.Array], pa.Array], expected: str) -> pa.Array:
    """Convert a column as a whole; if that fails, find the first faulty row by halving."""
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
        raise ConversionFault(start, shown_value(original[start]), expected) from None
