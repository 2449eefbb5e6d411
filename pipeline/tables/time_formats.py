"""Times as text of a strptime format: impossible dates are refused, and names of zones are resolved or refused.

Arrow's own strptime takes the 30th of February for the 1st of March, and leaves the name of a zone out of account.
"""

import re
from functools import cache

import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.tables.schema import TIMESTAMP_TYPE

_NUMBER = r"\s*\d{1,2}"
_WORD = r"[^\d\s]+"
_PATTERNS = {
    "Y": r"\d{4}", "y": r"\d{2}", "m": _NUMBER, "b": _WORD, "B": _WORD, "h": _WORD, "d": _NUMBER, "e": _NUMBER,
    "H": _NUMBER, "I": _NUMBER, "M": _NUMBER, "S": _NUMBER, "p": r"[AaPp]\.?[Mm]\.?", "a": _WORD, "A": _WORD,
    "n": r"\s*", "t": r"\s*", "%": "%",
}  # fmt: skip
_SHORT = {"%F": "%Y-%m-%d", "%D": "%m/%d/%y", "%T": "%H:%M:%S", "%R": "%H:%M"}
_ZONE = r"[+-]\d{2}(?::?\d{2})?|[A-Za-z][A-Za-z0-9_+/-]*"
# Abbreviations with one meaning, and those that RFC 5322 gives one. CST, IST, BST and the like have several.
_HOURS = {
    "Z": 0, "UTC": 0, "GMT": 0, "WET": 0, "WEST": 1, "CET": 1, "CEST": 2, "MEZ": 1, "MESZ": 2, "EET": 2, "EEST": 3,
    "MSK": 3, "JST": 9, "KST": 9, "EST": -5, "EDT": -4, "MDT": -6, "MST": -7, "PDT": -7, "PST": -8,
}  # fmt: skip
ZONES_EXPECTED = (
    "its zone an offset such as +02:00, a name such as Europe/Berlin, or one of "
    f"{', '.join(_HOURS)} (others, such as CST, mean several zones)"
)


def format_fault(time_format: str) -> str | None:
    """What keeps times from being read by a format; None if nothing does."""
    directives = re.findall(r"%(.?)", _written_out(time_format))
    unknown = [f"%{directive}" for directive in directives if directive not in (*_PATTERNS, "z", "Z")]
    if unknown:
        known = " ".join(f"%{directive}" for directive in (*_PATTERNS, "z", "Z"))
        return f"{unknown[0]} cannot be read; there are {known} {' '.join(_SHORT)}"
    for part, of_part in (("year", "Yy"), ("month", "mbBh"), ("day", "de")):
        if sum(directive in of_part for directive in directives) != 1:
            return f"it needs one directive for the {part} (%{of_part[0]})"
    return "it has two zones" if sum(directive in "zZ" for directive in directives) > 1 else None


def parse_times(text: pa.Array, time_format: str) -> pa.Array:
    """Trimmed text as timestamp[us, UTC]; a format without a zone is in UTC. Raises ArrowInvalid for text not of it."""
    pattern, without_zone = _compiled(time_format)
    parts = pc.extract_regex(text, pattern)
    if parts.null_count > text.null_count:
        raise pa.ArrowInvalid("not of the format")
    before, day, zone, after = (pc.struct_field(parts, name) for name in ("before", "day", "zone", "after"))
    local = pc.strptime(pc.binary_join_element_wise(before, after, ""), without_zone, "us")
    if pc.any(pc.not_equal(pc.day(local), pc.utf8_trim_whitespace(day).cast(pa.int64()))).as_py():
        raise pa.ArrowInvalid("there is no such day")
    return _in_utc(local, zone)


def _in_utc(local: pa.Array, zones: pa.Array) -> pa.Array:
    """Local times of zones, which are empty for UTC, as timestamp[us, UTC]."""
    times = pa.nulls(len(local), TIMESTAMP_TYPE)
    for zone in pc.unique(zones.drop_null()).to_pylist():
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
    """A pattern with the groups before, day, zone and after; and the format without its zone."""
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
    """A format with `%F`, `%T` and the like replaced by what they are short for."""
    return re.sub("|".join(_SHORT), lambda match: _SHORT[match[0]], time_format)
