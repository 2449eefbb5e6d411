"""The rules that single values obey: pure functions from a column's values to the rows that break them.

Knows nothing of files, or of rules between rows and tables (duplicates, unknown entities); those are `check.py`.
"""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.tables import schema as sc

# Times outside 1900 to 2200 are in another unit: milliseconds read as seconds are tens of thousands of years away.
EARLIEST_S, LATEST_S = -2_208_988_800, 7_258_118_400
# Nearer ones may be meant, but seconds read as milliseconds are in January 1970, and so is an unknown time that is 0.
YEAR_S = 365 * 86_400
MAX_ID = pa.scalar(2**63 - 1, pa.uint64())
NUMBER_PATTERN = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
TIME_PATTERN = r"^\s*(\d+|\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d+)?)?\s*(Z|[+-]\d{2}(:?\d{2})?)?)?)\s*$"


RULED_COLUMNS = {
    "users": ("user_id", sc.CREATED_AT),
    "items": ("item_id", "title", sc.CREATED_AT),
    "interactions": sc.INTERACTION_COLUMNS,
}  # and every entity attribute that is a list


@dataclass(frozen=True)
class RowFault:
    """Rows of one column that break one rule.

    Attributes
    ----------
    kind, found, expected, advice : as in `Finding`.
    rows : int64[n], n >= 1, their numbers within the column's values.
    is_warning : a run can start all the same.
    """

    kind: str
    found: str
    expected: str
    advice: str
    rows: np.ndarray
    is_warning: bool = False


def row_faults(table: str, column: str, values: pa.Array) -> Iterator[RowFault]:
    """Check the values of one column of one table, by what the column is there for.

    Parameters
    ----------
    table, column : their names in the input schema.
    values : the values, dictionaries decoded. A time or rating column may hold text: it is of the wrong type, and the
        rows that would not even convert are found.
    """
    if column not in RULED_COLUMNS[table]:
        if sc.is_list(values.type):
            yield from _nulls_in_lists(values)
    elif column in ("user_id", "item_id"):
        yield from _found("null-id", "the id is null or empty:", "an id", "fill it in, or drop the row", blank(values))
        if pt.is_uint64(values.type):
            advice = f"write the ids as text (`laserbatch data import table` does with `ids: {{{column}: string}}`)"
            mask = pc.greater(values, MAX_ID)
            yield from _found("bad-id", "the id is too large:", f"at most {MAX_ID}", advice, mask)
    elif column == "title":
        advice = "fill it in, or drop the item; a run quarantines up to night.max_failed_share of the items"
        yield from _found("null-title", "the title is empty:", "a title", advice, blank(values), is_warning=True)
    elif column == "rating":
        yield from _bad_ratings(values)
    else:
        yield from _bad_times(values, may_be_null=column == sc.CREATED_AT)


def _bad_times(values: pa.Array, may_be_null: bool) -> Iterator[RowFault]:
    advice = "correct it, or drop the row"
    if not may_be_null:
        yield from _found("bad-timestamp", "the time is null:", sc.TIME_EXPECTED, advice, pc.is_null(values))
    if sc.is_text(values.type):
        unreadable = pc.invert(pc.match_substring_regex(values, TIME_PATTERN))
        yield from _found("bad-timestamp", "the text is no time:", sc.TIME_EXPECTED, advice, unreadable)
        return
    if pt.is_integer(values.type):
        seconds = values.cast(pa.float64(), safe=False)  # uint64 too; which second it is plays no role here
    elif pt.is_date(values.type):
        seconds = values.cast(pa.timestamp("s")).cast(pa.int64())
    else:
        per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[values.type.unit]
        seconds = pc.divide(values.cast(pa.int64()), per_second)
    outside = pc.or_(pc.less(seconds, EARLIEST_S), pc.greater(seconds, LATEST_S))
    expected = "a time between 1900 and 2200; integers are seconds since 1970"
    advice = "divide milliseconds by 1000, or name the unit in `laserbatch data import table`"
    yield from _found("bad-timestamp", "the time is out of range:", expected, advice, outside)
    ahead_s = datetime.datetime.now(datetime.UTC).timestamp() + YEAR_S
    for found, is_odd in (
        ("the time is before 1971:", pc.less(seconds, YEAR_S)),
        ("the time is more than a year ahead:", pc.greater(seconds, ahead_s)),
    ):
        odd = pc.and_not(is_odd, outside)
        advice = "name the right unit in `laserbatch data import table`, or let it be if it is meant"
        yield from _found("odd-timestamp", found, "a time of this age", advice, odd, is_warning=True)


def _bad_ratings(values: pa.Array) -> Iterator[RowFault]:
    advice = "correct it, drop the row, or leave the whole column out"
    if sc.is_text(values.type):
        bad = pc.invert(pc.match_substring_regex(values, NUMBER_PATTERN))
    elif pt.is_floating(values.type):
        bad = pc.invert(pc.is_finite(values))
    else:
        bad = pa.nulls(len(values), pa.bool_())
    bad = pc.or_(pc.fill_null(bad, False), pc.is_null(values))
    yield from _found("bad-rating", "the rating is no number:", "a number", advice, bad)


def _nulls_in_lists(values: pa.Array) -> Iterator[RowFault]:
    inner = pc.list_flatten(values)
    if inner.null_count:
        rows = pc.unique(pc.list_parent_indices(values).filter(pc.is_null(inner)))
        mask = np.zeros(len(values), dtype=bool)
        mask[rows.to_numpy(zero_copy_only=False)] = True
        advice = "take the nulls out of the list"
        yield from _found("null-in-list", "the list has nulls in it:", "strings only", advice, pa.array(mask))


def blank(values: pa.Array) -> pa.Array:
    """Whether each value is null, or text of nothing but spaces."""
    is_null = pc.is_null(values)
    return (
        pc.or_(is_null, pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), False))
        if sc.is_text(values.type)
        else is_null
    )


def _found(
    kind: str, found: str, expected: str, advice: str, mask: pa.Array, is_warning: bool = False
) -> Iterator[RowFault]:
    rows = np.flatnonzero(pc.fill_null(mask, False).to_numpy(zero_copy_only=False))
    if len(rows):
        yield RowFault(kind, found, expected, advice, rows, is_warning)
