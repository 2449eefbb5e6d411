"""Turning a column of a foreign file into the type asked for, or saying which row cannot be.

Where a value came from is the caller's to add: `ConversionFault` carries row and value.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.tables.columns import EARLIEST_S, LATEST_S, YEAR_S
from laserbatch.pipeline.tables.findings import shown_value
from laserbatch.pipeline.tables.schema import TIMESTAMP_TYPE, UNITS_PER_SECOND, plain_type, timestamps

_ZONE_PATTERN = r":\d{2}(\.\d+)?\s*(Z|[+-]\d{2}(:?\d{2})?)$"
_EXPECTED = {pa.int64(): "an integer below 2**63", pa.float64(): "a number", pa.bool_(): "true or false"}


class ConversionFault(Exception):
    """One value cannot be converted.

    Attributes
    ----------
    row : its number within the column, from 0.
    value : the value.
    expected : what it should have been.
    """

    def __init__(self, row: int, value: object, expected: str) -> None:
        super().__init__(f"row {row}: {value!r} is not {expected}")
        self.row, self.value, self.expected = row, value, expected


def without(column: pa.Array, null_values: list[str]) -> pa.Array:
    """The column with null where its text is one of `null_values`."""
    text = pc.utf8_trim_whitespace(to_type(column, pa.string()))
    return pc.if_else(pc.is_in(text, value_set=pa.array(null_values, pa.string())), pa.scalar(None, pa.string()), text)


def to_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column as int64, float64, bool or string. Text is trimmed before it is read as anything but text.

    Raises
    ------
    ConversionFault
        A value is not one of that type: "12a", 1.5 for an integer.
    """
    column = _plain(column)
    if column.type == kind:
        return column
    if pt.is_floating(column.type) and pt.is_integer(kind):  # pandas writes a missing integer as NaN
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    trimmed = pc.utf8_trim_whitespace(column) if column.type == pa.string() else column
    return _each(trimmed, column, lambda values: values.cast(kind), _EXPECTED.get(kind, f"a {kind}"))


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
    """The column as timestamp[us, UTC].

    Parameters
    ----------
    column : timestamps and dates are taken as they are; numbers, and text that holds numbers, count `unit`s since 1970.
    unit : "s", "ms", "us", "ns"; "iso" for text like 2024-05-31T23:59:00Z (no zone: UTC); or a strptime format.

    Raises
    ------
    ConversionFault
        A value cannot be read so.
    """
    column = _plain(column)
    if pt.is_timestamp(column.type) or pt.is_date(column.type):
        return _each(column, column, timestamps, "a time that 64 bits of microseconds hold")
    if unit in UNITS_PER_SECOND:
        try:
            numbers = to_type(column, pa.float64() if _has_fractions(column) else pa.int64())
        except ConversionFault as fault:
            expected = f"a time in {unit} since 1970, or another `unit`: iso, or a format like %d/%m/%Y"
            raise ConversionFault(fault.row, fault.value, expected) from None
        expected = f"a time in {unit} since 1970, between 1900 and 2200{_likely_unit(numbers)}"
        return _each(numbers, column, lambda values: _from_epoch(values, unit), expected)
    text = pc.utf8_trim_whitespace(to_type(column, pa.string()))
    if unit == "iso":
        return _each(text, column, _from_iso, "an ISO 8601 time such as 2024-05-31T23:59:00Z")
    return _each(text, column, lambda values: _from_format(values, unit), f"a time of the form {unit}")


def _has_fractions(column: pa.Array) -> bool:
    if column.type == pa.string():
        return bool(pc.any(pc.match_substring(column, ".")).as_py())
    return not pt.is_integer(column.type)


def _likely_unit(values: pa.Array) -> str:
    """The unit in which the largest value is plausible, for a message."""
    largest = pc.max(values).as_py()
    for unit, per_second in UNITS_PER_SECOND.items():
        if largest is not None and YEAR_S * per_second <= largest <= LATEST_S * per_second:
            return f" (with `unit: {unit}` it is one)"
    return ""


def _from_epoch(values: pa.Array, unit: str) -> pa.Array:
    seconds = pc.divide(values.cast(pa.float64(), safe=False), float(UNITS_PER_SECOND[unit]))
    if pc.any(pc.or_(pc.less(seconds, EARLIEST_S), pc.greater(seconds, LATEST_S))).as_py():
        raise pa.ArrowInvalid("out of range")
    if pt.is_floating(values.type):
        return pc.round(pc.multiply(values, 1e6 / UNITS_PER_SECOND[unit])).cast(pa.int64()).cast(TIMESTAMP_TYPE)
    return values.cast(pa.timestamp(unit, tz="UTC")).cast(TIMESTAMP_TYPE, safe=unit != "ns")


def _from_iso(values: pa.Array) -> pa.Array:
    has_zone = pc.match_substring_regex(values, _ZONE_PATTERN)
    none = pa.scalar(None, pa.string())
    zoned = pc.if_else(has_zone, values, none).cast(TIMESTAMP_TYPE)
    local = pc.if_else(has_zone, none, values).cast(pa.timestamp("us"))
    return pc.coalesce(zoned, local.cast(TIMESTAMP_TYPE))


def _from_format(values: pa.Array, time_format: str) -> pa.Array:
    return pc.strptime(values, format=time_format, unit="us").cast(TIMESTAMP_TYPE)


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


def _plain(column: pa.Array) -> pa.Array:
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    plain = plain_type(column.type)
    return column if column.type == plain else column.cast(plain)
