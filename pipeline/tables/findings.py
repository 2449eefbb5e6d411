"""What a check found: one finding a fault, and the collecting of them up to a limit.

Knows nothing of the rules.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace

import numpy as np
import pyarrow as pa

MAX_SHOWN = 20
MAX_SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes
    ----------
    kind : a stable name: missing-table, unreadable, missing-column, wrong-type, types-differ, empty-table, null-id,
        duplicate-id, unknown-entity, null-title, bad-timestamp, bad-rating, null-in-list.
    table, column, file, row, value : where it is, as far as it has a place; rows count from 0 within their file.
    found, expected, advice : parts of the sentence; `str(finding)` is the whole.
    num_more : rows of the same kind that are not listed; set on the last one listed.
    """

    kind: str
    table: str
    found: str
    expected: str
    advice: str
    column: str | None = None
    file: str | None = None
    row: int | None = None
    value: object = None
    num_more: int = 0

    def __str__(self) -> str:
        place = f"{self.table}.{self.column}" if self.column else self.table
        if self.file is not None:
            place += f" ({self.file}, row {self.row})" if self.row is not None else f" ({self.file})"
        value = f" {self.value!r}" if self.row is not None else ""
        more = f" [and {self.num_more} more rows like this]" if self.num_more else ""
        return f"{place}: {self.found}{value}; expected {self.expected}; {self.advice}{more}"

    def as_json(self) -> dict:
        """Plain JSON values; what JSON cannot hold (a NaN, a time) as text."""
        is_plain = isinstance(self.value, str | int | bool | type(None))
        return {**asdict(self), "value": self.value if is_plain else str(self.value)}


class Findings:
    """Findings in the order they were made; of each kind and column the first rows are kept, the rest counted."""

    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._num_rows: Counter = Counter()
        self._last_kept: dict[tuple, int] = {}

    def add(self, finding: Finding) -> None:
        """Add a finding that is about no row."""
        self._kept.append(finding)

    def add_rows(self, finding: Finding, rows: np.ndarray, first_row: int, column: pa.Array) -> None:
        """Add one finding for each of some rows.

        Parameters
        ----------
        finding : what is wrong, without row and value.
        rows : int64[n], row numbers within `column`.
        first_row : the number of the column's first row within its file.
        column : the values.
        """
        key = (finding.table, finding.column, finding.kind, finding.found)
        num_free = max(0, MAX_SHOWN - self._num_rows[key])
        self._num_rows[key] += len(rows)
        for row in rows[:num_free].tolist():
            self._last_kept[key] = len(self._kept)
            self._kept.append(replace(finding, row=first_row + row, value=_shown(column[row])))

    def to_list(self) -> list[Finding]:
        """All of them, with the counts of what was not kept filled in."""
        listed = list(self._kept)
        for key, index in self._last_kept.items():
            listed[index] = replace(listed[index], num_more=max(0, self._num_rows[key] - MAX_SHOWN))
        return listed


def _shown(scalar: pa.Scalar) -> object:
    try:
        value = scalar.as_py()
    except (ValueError, OverflowError):  # a time that Python cannot hold
        value = f"{scalar.value} ({scalar.type})"
    is_long = isinstance(value, str) and len(value) > MAX_SHOWN_CHARACTERS
    return value[:MAX_SHOWN_CHARACTERS] + "..." if is_long else value
