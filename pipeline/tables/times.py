"""Parsing of times: text in a strptime format, and integers whose unit is inferred from their values.

Impossible dates are refused, and names of zones are resolved or refused: Arrow's own strptime reads the 30th of
February as the 1st of March, and ignores the name of a zone.

Integer times are seconds, unless all values of a column, in all of its files, are times between 1990 and tomorrow in
another unit. If no unit fits, the column is read as seconds, which the rules of `columns.py` then judge.
"""

import datetime
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.tables.columns import CREATED, TIME, role_of
from laserbatch.pipeline.tables.findings import FaultyTable, Finding
from laserbatch.pipeline.tables.parts import TablePart
from laserbatch.pipeline.tables.schema import TIMESTAMP_TYPE, UNITS_PER_SECOND, is_text

_NUMBER = r"\s*\d{1,2}"
_WORD = r"[^\d\s]+"
_PATTERNS = {
    "Y": r"\d{4}", "y": r"\d{2}", "m": _NUMBER, "b": _WORD, "B": _WORD, "h": _WORD, "d": _NUMBER, "e": _NUMBER,
    "H": _NUMBER, "I": _NUMBER, "M": _NUMBER, "S": _NUMBER, "p": r"[AaPp]\.?[Mm]\.?", "a": _WORD, "A": _WORD,
    "n": r"\s*", "t": r"\s*", "%": "%",
}  # fmt: skip
_SHORT = {"%F": "%Y-%m-%d", "%D": "%m/%d/%y", "%T": "%H:%M:%S", "%R": "%H:%M"}
_ZONE = r"[+-]\d{2}(?::?\d{2})?|[A-Za-z][A-Za-z0-9_+/-]*"
# Abbreviations with one meaning, or one usual meaning (RFC 5322). CST, IST, BST and the like have several.
_HOURS = {
    "Z": 0, "UTC": 0, "GMT": 0, "WET": 0, "WEST": 1, "CET": 1, "CEST": 2, "MEZ": 1, "MESZ": 2, "EET": 2, "EEST": 3,
    "MSK": 3, "JST": 9, "KST": 9, "EST": -5, "EDT": -4, "MDT": -6, "MST": -7, "PDT": -7, "PST": -8,
}  # fmt: skip
ZONES_EXPECTED = (
    "its zone an offset such as +02:00, a name such as Europe/Berlin, or one of "
    f"{', '.join(_HOURS)} (others, such as CST, mean several zones)"
)
YEAR_1990_S = 631_152_000
DAY_S = 86_400
YEAR_1_S = -62_135_596_800  # start of .NET's ticks of 100 ns; today's, read as nanoseconds, are in spring 1990
NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}


def format_fault(time_format: str) -> str | None:
    """Why times cannot be read with a format; None if they can."""
    directives = re.findall(r"%(.?)", _written_out(time_format))
    unknown = [f"%{directive}" for directive in directives if directive not in (*_PATTERNS, "z", "Z")]
    if unknown:
        known = " ".join(f"%{directive}" for directive in (*_PATTERNS, "z", "Z"))
        return f"{unknown[0]} is not supported; expected {known} {' '.join(_SHORT)}"
    for part, of_part in (("year", "Yy"), ("month", "mbBh"), ("day", "de")):
        if sum(directive in of_part for directive in directives) != 1:
            return f"it needs one directive for the {part} (%{of_part[0]})"
    return "it has two zones" if sum(directive in "zZ" for directive in directives) > 1 else None


def parse_times(text: pa.Array, time_format: str) -> pa.Array:
    """Trimmed text as timestamp[us, UTC]; without a zone, it is UTC. Raises ArrowInvalid for text of another format."""
    pattern, without_zone = _compiled(time_format)
    parts = pc.extract_regex(text, pattern)
    if parts.null_count > text.null_count:
        raise pa.ArrowInvalid("not of the format")
    before, day, zones, after = (pc.struct_field(parts, name) for name in ("before", "day", "zone", "after"))
    local = pc.strptime(pc.binary_join_element_wise(before, after, ""), without_zone, "us")
    if pc.any(pc.not_equal(pc.day(local), pc.utf8_trim_whitespace(day).cast(pa.int64()))).as_py():
        raise pa.ArrowInvalid("there is no such day")
    times = pa.nulls(len(local), TIMESTAMP_TYPE)
    for zone in pc.unique(zones.drop_null()).to_pylist():  # empty for UTC
        is_of_zone = pc.fill_null(pc.equal(zones, zone), False)
        times = pc.replace_with_mask(times, is_of_zone, _of_zone(local.filter(is_of_zone), zone))
    return times


def _of_zone(local: pa.Array, zone: str) -> pa.Array:
    minutes = 60 * _HOURS.get(zone.upper() or "UTC", 0)
    if zone.startswith(("+", "-")):
        digits = zone[1:].replace(":", "").ljust(4, "0")
        minutes = (60 * int(digits[:2]) + int(digits[2:])) * (-1 if zone.startswith("-") else 1)
    elif zone and zone.upper() not in _HOURS:
        if "/" not in zone:  # such as Cuba or EST5EDT, and every abbreviation with several meanings
            raise pa.ArrowInvalid(f"the zone {zone} is not known")
        # Raises for an unknown zone, and for an hour that does not exist or that a change of the clock repeats.
        return pc.assume_timezone(local, zone).cast(TIMESTAMP_TYPE)
    return pc.subtract(local, pa.scalar(60_000_000 * minutes, pa.duration("us"))).cast(TIMESTAMP_TYPE)


@cache
def _compiled(time_format: str) -> tuple[str, str]:
    """A regular expression with the groups before, day, zone and after; and the format without its zone."""
    pattern, without_zone, has_zone = "", "", False
    for part in re.findall(r"%.|\s+|.", _written_out(time_format)):
        if part in ("%z", "%Z"):
            pattern, has_zone = rf"{pattern})(?P<zone>{_ZONE})(?P<after>", True
            continue
        without_zone += part
        if part in ("%d", "%e"):
            pattern += rf"(?P<day>{_NUMBER})"
        elif part[0] == "%":
            pattern += _PATTERNS[part[1]]
        else:
            pattern += r"\s*" if part.isspace() else re.escape(part)
    end = ")" if has_zone else ")(?P<zone>)(?P<after>)"
    return f"^(?P<before>{pattern}{end}$", without_zone


def _written_out(time_format: str) -> str:
    """A format with `%F`, `%T` and the like written out."""
    return re.sub("|".join(_SHORT), lambda match: _SHORT[match[0]], time_format)


def unit_of(low: int, high: int) -> str | None:
    """The unit since 1970 in which all values from `low` to `high` are times from 1990 to tomorrow; None if none is."""
    end_s = int(datetime.datetime.now(datetime.UTC).timestamp()) + 2 * DAY_S
    unit = next((u for u, of in UNITS_PER_SECOND.items() if YEAR_1990_S * of <= low and high < end_s * of), None)
    is_ticks = unit == "ns" and YEAR_1_S + low // 10**7 >= YEAR_1990_S and YEAR_1_S + high // 10**7 < end_s
    return None if is_ticks else unit


def other_reading(low: int, high: int) -> str | None:
    """The likely meaning of integers that are moments of 1970 as seconds: dates as numbers, or days; None: neither."""
    if low >= 1_900 and high <= 2_100:
        return "years"
    if low >= 190_001 and high <= 210_012 and all(1 <= value % 100 <= 12 for value in (low, high)):
        return "months such as 202405"
    is_date = all(1 <= value // 100 % 100 <= 12 and 1 <= value % 100 <= 31 for value in (low, high))
    if low >= 13_000_101 and high <= 26_001_231 and is_date:  # also of the Persian and the Buddhist calendar
        return "dates such as 20240531"
    # Days since 1970, from 1990 on; or a spreadsheet's days since 1900, up to 2064.
    return "days, as spreadsheets count them" if low >= 7_305 and high < 60_000 else None


def span_of(values: pa.Array | pa.ChunkedArray) -> tuple[int, int] | None:
    """The least and the greatest of numbers, or of text that holds only numbers; None for other columns."""
    if is_text(values.type):
        text = pc.utf8_trim_whitespace(values)
        try:
            values = text.cast(pa.float64() if pc.any(pc.match_substring(text, ".")).as_py() else pa.int64())
        except pa.ArrowInvalid:
            return None
    if not (pt.is_integer(values.type) or pt.is_floating(values.type)):
        return None
    low, high = pc.min_max(values).as_py().values()
    return None if low is None or not math.isfinite(low + high) else (int(low), int(high))


def shown_span(low: int, high: int, unit: str) -> str:
    """The first and the last day of a span of times, as text."""
    first, last = (datetime.datetime.fromtimestamp(n // UNITS_PER_SECOND[unit], datetime.UTC) for n in (low, high))
    return f"{first:%Y-%m-%d} to {last:%Y-%m-%d}"


def require_units(parts: Sequence[TablePart], note: Callable[[Finding], object]) -> None:
    """Call `infer_units`, and `note` with warnings. Raises FaultyTable if the integers are dates."""
    for finding in infer_units(parts):
        if not finding.is_warning:
            raise FaultyTable(finding)
        note(finding)


def infer_units(parts: Sequence[TablePart]) -> list[Finding]:
    """Give all files of a table the units of its integer times. Returns findings about units other than seconds.

    A file that cannot be read is ignored here; whoever reads it reports the error.
    """
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for part in parts:
        with suppress(FaultyTable):
            for field in part.schema:
                is_integer_time = pt.is_integer(field.type) and role_of(part.table, field.name) in (TIME, CREATED)
                if is_integer_time and (span := _span_in(part, field.name)):
                    spans.setdefault(field.name, []).append((*span, part.name))
    findings = []
    for column, of_parts in spans.items():
        table = parts[0].table
        low, _, low_file = min(of_parts)
        _, high, high_file = max(of_parts, key=lambda span: span[1])
        unit, reading, expected = unit_of(low, high), other_reading(low, high), "a timestamp, or int64 unix seconds"
        in_file = f" (in {high_file})" if high_file != low_file else ""
        if unit not in (None, "s"):
            for part in parts:
                part.units[column] = unit
            message = f"the integers are read as {NAMES[unit]} since 1970 ({shown_span(low, high, unit)})"
            advice = "write timestamps if this is wrong"
            findings.append(
                Finding("inferred-unit", table, message, expected, advice, column, low_file, is_warning=True)
            )
        elif reading:
            message = f"the integers from {low} to {high}{in_file} look like {reading}"
            advice = "write timestamps; for dates such as 20240531, `laserbatch data import` takes the `unit` %Y%m%d"
            findings.append(Finding("bad-timestamp", table, message, expected, advice, column, low_file))
    return findings


def _span_in(part: TablePart, column: str) -> tuple[int, int] | None:
    """The span of a column: from the statistics of the file if all row groups have them, otherwise from its values."""
    place, metadata = part.schema.names.index(column), part.metadata
    if place < metadata.num_columns and metadata.schema.column(place).path == column:  # no column before it is nested
        of_groups = [metadata.row_group(group).column(place).statistics for group in range(metadata.num_row_groups)]
        if all(statistics is not None and statistics.has_min_max for statistics in of_groups):
            values = [value for statistics in of_groups for value in (statistics.min, statistics.max)]
            if values and all(isinstance(value, int) for value in values):
                return min(values), max(values)
    return span_of(part.read([column])[column])
