"""The columns of the input tables: the types each may have, the type it is read as, and the rules for its values.

A column's role decides all three. Every other column of an entity table is an attribute. Rules between rows, files and
tables are in `check.py`.
"""

import datetime
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.tables import schema as sc
from laserbatch.pipeline.tables.findings import Finding, Findings

# Seconds read as milliseconds lie in January 1970, and so does a 0 that means an unknown time.
YEAR_S = 365 * 86_400
YEAR_1_S, YEAR_10000_S = -62_135_596_800, 253_402_300_800
MAX_ID = pa.scalar(2**63 - 1, pa.uint64())


@dataclass(frozen=True)
class Rule:
    """A rule for the values of a column that has an accepted type."""

    kind: str  # this and the next three as in `Finding`; `{column}` in the advice is the column's name
    found: str
    expected: str
    advice: str
    broken: Callable[[pa.Array], pa.Array]  # values (dictionaries decoded) -> bool[n]; null: not broken
    is_warning: bool = False

    def check(self, table: str, column: str, file: str, first_row: int, values: pa.Array, findings: Findings) -> None:
        """Add a finding for the values that break the rule; they begin at row `first_row` of the file."""
        rows = np.flatnonzero(pc.fill_null(self.broken(values), False).to_numpy(zero_copy_only=False))
        advice = self.advice.format(column=column)
        finding = Finding(self.kind, table, self.found, self.expected, advice, column, file, is_warning=self.is_warning)
        findings.add_rows(finding, rows, first_row, values)


def blank(values: pa.Array) -> pa.Array:
    """Whether each value is null or blank text."""
    if not sc.is_text(values.type):
        return pc.is_null(values)
    try:
        trimmed = pc.utf8_trim_whitespace(values)
    except pa.ArrowInvalid:  # not UTF-8, and so not blank
        trimmed = pc.utf8_trim_whitespace(pc.if_else(_not_utf8(values), "?", values))
    return pc.fill_null(pc.equal(trimmed, ""), True)


def _not_utf8(values: pa.Array) -> pa.Array:
    if not (sc.is_text(values.type) or sc.is_list(values.type)) or _is_whole(values):
        return pa.nulls(len(values), pa.bool_())
    return pa.array([not _is_whole(pa.concat_arrays([values.slice(row, 1)])) for row in range(len(values))])


def _is_whole(values: pa.Array) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _too_large(values: pa.Array) -> pa.Array:
    return pc.greater(values, MAX_ID) if pt.is_uint64(values.type) else pa.nulls(len(values), pa.bool_())


def _infinite(values: pa.Array) -> pa.Array:
    return pc.is_inf(values) if pt.is_floating(values.type) else pa.nulls(len(values), pa.bool_())


def _seconds(values: pa.Array) -> pa.Array:
    """Seconds since 1970; nulls for a column of nulls only, which is read as text."""
    if sc.is_text(values.type):
        return pa.nulls(len(values), pa.float64())
    if pt.is_integer(values.type):
        return values.cast(pa.float64(), safe=False)  # uint64 too; the precision lost plays no role here
    if pt.is_date(values.type):
        return values.cast(pa.timestamp("s")).cast(pa.int64())
    return pc.divide(values.cast(pa.int64()), sc.UNITS_PER_SECOND[values.type.unit])


def out_of_range(values: pa.Array, of_integers: bool | None = None) -> pa.Array:
    if of_integers not in (None, pt.is_integer(values.type)):
        return pa.nulls(len(values), pa.bool_())
    seconds = _seconds(values)
    return pc.or_(pc.less(seconds, sc.EARLIEST_S), pc.greater(seconds, sc.LATEST_S))


def no_date(values: pa.Array) -> pa.Array:
    """Whether each time is none of the years 1 to 9999, such as the infinite times of databases."""
    if not (pt.is_timestamp(values.type) or pt.is_date(values.type)):
        return pa.nulls(len(values), pa.bool_())
    seconds = _seconds(values)
    return pc.or_(pc.less(seconds, YEAR_1_S), pc.greater_equal(seconds, YEAR_10000_S))


def _odd(values: pa.Array) -> pa.Array:
    seconds = _seconds(values)
    ahead_s = int(datetime.datetime.now(datetime.UTC).timestamp()) + YEAR_S  # not every int64 fits a float64
    return pc.and_not(pc.or_(pc.less(seconds, YEAR_S), pc.greater(seconds, ahead_s)), out_of_range(values))


def _in_list(values: pa.Array, broken: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Whether a rule is broken by any part of each list; nulls for other columns."""
    if not sc.is_list(values.type):
        return pa.nulls(len(values), pa.bool_())
    mask, is_broken = np.zeros(len(values), dtype=bool), pc.fill_null(broken(pc.list_flatten(values)), False)
    mask[pc.list_parent_indices(values).filter(is_broken).to_numpy()] = True
    return pa.array(mask)


def _html(values: pa.Array) -> pa.Array:
    if not sc.is_text(values.type):
        return _in_list(values, _html)
    return pc.match_substring_regex(values, r"(?i)</[a-z]\w*>|<(br|img|li|p)\b[^<>]*>|&(#\w+|amp|nbsp|quot|lt|gt);")


_UTF8 = Rule("bad-text", "the text is not UTF-8:", "text in UTF-8",
             "write the column again in UTF-8, after reading its source in the right encoding", _not_utf8)  # fmt: skip
_MARKUP = Rule("markup", "the text has HTML tags or entities:", "plain text",
               "convert it; prompts show them, and cut values after `max_value_chars`", _html, True)  # fmt: skip
_TIME_EXPECTED = "a timestamp, or int64 unix seconds"
_KNOWN_TIME = Rule("bad-timestamp", "the time is null:", _TIME_EXPECTED, "correct it, or drop the row", pc.is_null)
_INTEGER_IN_RANGE = Rule(
    "bad-timestamp", "the time is out of range:", "a time between 1900 and 2200; integers are seconds since 1970",
    "divide milliseconds by 1000, or set the `unit` in the mapping of `laserbatch data import`",
    partial(out_of_range, of_integers=True),
)  # fmt: skip
IN_RANGE = (
    _INTEGER_IN_RANGE,
    replace(_INTEGER_IN_RANGE, expected="a time between 1900 and 2200",
            advice="correct it, in the Gregorian calendar, or drop the row; created_at may be null",
            broken=partial(out_of_range, of_integers=False)),
)  # fmt: skip
_TIME_RULES = (
    *IN_RANGE,
    Rule("odd-timestamp", "the time is before 1971 or more than a year ahead:", "a time between these",
         "if it is wrong, set the `unit` in the mapping of `laserbatch data import`", _odd, True),
)  # fmt: skip


@dataclass(frozen=True)
class Role:
    expected: str  # the accepted types, in words
    accepts: Callable[[pa.DataType], bool]
    plain: Callable[[pa.ChunkedArray], pa.ChunkedArray]  # converts values to the type that they are read as
    rules: tuple[Rule, ...]
    advice: str  # for a wrong type; `{column}` is the column's name, `{id_type}` the type to convert an id to


ID = Role(
    expected="a string or an integer",
    accepts=lambda kind: sc.id_type(kind) is not None,
    plain=sc.plain_ids,
    rules=(
        _UTF8,
        Rule("bad-id", "the id is too large:", f"at most {MAX_ID}",
             "write the ids as text (`laserbatch data import` does with `ids: {{{column}: string}}`)",
             _too_large),
        Rule("null-id", "the id is null or empty:", "an id", "fill it in, or drop the row", blank),
    ),
    advice="write it so; `laserbatch data import` does with `ids: {{{column}: {id_type}}}` in its mapping",
)  # fmt: skip
TITLE = Role(
    expected="a string",
    accepts=lambda kind: sc.plain_type(kind) == pa.string(),
    plain=sc.plain_column,
    rules=(
        _UTF8,
        Rule("null-title", "the title is empty:", "a title",
             "fill it in, or drop the item; runs quarantine such items, up to gates.max_failed_share", blank, True),
        _MARKUP,
    ),
    advice="`laserbatch data import` converts it",
)  # fmt: skip
TIME = Role(
    expected=_TIME_EXPECTED,
    accepts=sc.is_time_type,
    plain=sc.timestamps,
    rules=(_KNOWN_TIME, *_TIME_RULES),
    advice="`laserbatch data import` converts it, if its mapping names the `unit`",
)
CREATED = replace(TIME, accepts=lambda kind: sc.is_time_type(kind) or pt.is_null(kind), rules=_TIME_RULES)
RATING = Role(
    expected="a number",
    accepts=sc.is_number_type,
    plain=sc.plain_column,
    rules=(
        Rule("bad-rating", "the rating is no number:", "a number",
             "correct it, drop the row, or remove the column", _infinite),
        Rule("no-rating", "there is no rating:", "a number",
             "histories still show the row; CTR models leave it out if ctr.label needs the rating",
             partial(pc.is_null, nan_is_null=True), is_warning=True),
    ),
    advice="`laserbatch data import` converts it",
)  # fmt: skip
RATING_OF_EVENT = replace(RATING, rules=RATING.rules[:1])  # an event such as a view has no rating
EVENT = Role(
    expected="a string",
    accepts=lambda kind: pt.is_null(kind) or sc.plain_type(kind) == pa.string(),
    plain=sc.plain_column,
    rules=(_UTF8,),
    advice="write its codes as words (`click`, `purchase`), or rename the column",
)
ATTRIBUTE = Role(
    expected="a scalar or a list of strings",
    accepts=sc.is_attribute_type,
    plain=sc.plain_column,
    rules=(
        _UTF8,
        _MARKUP,
        Rule("null-in-list", "the list has nulls in it:", "strings only", "take the nulls out of the list",
             partial(_in_list, broken=pc.is_null)),
        Rule("bad-attribute", "the number is infinite:", "a number",
             "correct it; prompts show `inf`, and CTR models take it as missing", _infinite, True),
        Rule("bad-attribute", "the time is infinite or out of range:", "a time in the years 1 to 9999",
             "correct it; prompts take it as missing", no_date, True),
    ),
    advice="leave it out (`laserbatch data import` with the `attributes` that you want), or write its parts as "
    "separate columns",
)  # fmt: skip

_ROLES = {
    "users": {"user_id": ID, sc.CREATED_AT: CREATED},
    "items": {"item_id": ID, "title": TITLE, sc.CREATED_AT: CREATED},
    "interactions": {"user_id": ID, "item_id": ID, "timestamp": TIME, "event": EVENT, "rating": RATING},
}


def role_of(table: str, column: str) -> Role | None:
    """The role of a column; None for a column that is not read: others of interactions, and those without a name."""
    return _ROLES[table].get(column, None if table == "interactions" or sc.is_unnamed(column) else ATTRIBUTE)


def schema_findings(table: str, file: str, schema: pa.Schema) -> list[Finding]:
    """Findings about the columns of one file that are missing, of a wrong type, or duplicate."""
    findings = []
    for column in sc.REQUIRED_COLUMNS[table]:
        if column not in schema.names:
            found = f"the column is missing; there are {', '.join(schema.names) or 'none'}"
            advice = "rename the column that holds it, or map it with `laserbatch data import`"
            findings.append(Finding("missing-column", table, found, "this column", advice, column, file))
    for field in schema:
        role = role_of(table, field.name)
        if role is not None and not role.accepts(field.type):
            found, advice = f"the column is of type {field.type}", _type_advice(field, role)
            findings.append(Finding("wrong-type", table, found, role.expected, advice, field.name, file))
    for column, count in Counter(schema.names).items():
        if count > 1:
            found, advice = "there are several columns of this name", "rename or drop all but one"
            findings.append(Finding("duplicate-column", table, found, "one", advice, column, file))
    return findings


def _type_advice(field: pa.Field, role: Role) -> str:
    kind = field.type
    if pt.is_null(kind):
        return "the column has no values: fill it in" + (", or leave it out" if role is RATING else "")
    if role is not ATTRIBUTE and (not sc.is_attribute_type(kind) or pt.is_time(kind) or pt.is_duration(kind)):
        return "write the column in that type; bytes as text, for example in hexadecimal"
    is_number = pt.is_floating(kind) or pt.is_decimal(kind)
    return role.advice.format(column=field.name, id_type="int64" if is_number else "string")
