"""Findings on input tables: one for each kind of fault and column, with its first row and number of rows."""

import datetime
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.errors import TableError, first_line

MAX_SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class Finding:
    """A fault, with the first place where it occurs, if any; `str` gives the whole sentence."""

    kind: str  # a stable name, such as missing-column
    table: str
    found: str
    expected: str
    advice: str
    column: str | None = None
    file: str | None = None
    row: int | None = None  # from 0 within its file
    value: object = None
    num_rows: int = 0  # faulty rows, over all files of the table; 0: it is not about rows
    num_files: int = 1  # faulty files, if it is not about rows
    is_warning: bool = False  # a run can start despite it

    def __str__(self) -> str:
        row = f"row {self.row}" if self.num_rows == 1 else f"{self.num_rows:,} rows, first row {self.row}"
        file = self.file if self.num_files == 1 else f"{self.file} and {self.num_files - 1} more"
        place = ", ".join(part for part in (file, row if self.num_rows else None) if part)
        name = f"{self.table}.{self.column}" if self.column else self.table
        value = f" {self.value!r}" if self.num_rows else ""
        warning = "warning: " if self.is_warning else ""
        where = f" ({place})" if place else ""
        return f"{warning}{name}{where}: {self.found}{value}; expected {self.expected}; {self.advice}"

    def as_json(self) -> dict:
        """The finding as JSON values; a value for which JSON has no type becomes text."""
        is_plain = isinstance(self.value, str | int | bool | type(None)) or (
            isinstance(self.value, float) and math.isfinite(self.value)
        )
        return {**asdict(self), "value": self.value if is_plain else str(self.value)}


class FaultyTable(TableError):
    """A table cannot be used; `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def unreadable(table: str, file: str, error: Exception) -> Finding:
    """The finding about a file that Arrow or the disk refuses."""
    found = f"the file cannot be read ({first_line(error)})"
    return Finding("unreadable", table, found, "a Parquet file", "write it again", file=file)


class Findings:
    """Findings in the order they were made; rows of a table that break one rule in one column are one finding."""

    def __init__(self) -> None:
        self._found: dict[tuple, Finding] = {}

    def add(self, *findings: Finding) -> None:
        """Add findings that are not about rows."""
        for finding in findings:
            first = self._found.setdefault(_key(finding), finding)
            if first is not finding:
                self._found[_key(finding)] = replace(first, num_files=first.num_files + 1)

    def add_rows(self, finding: Finding, rows: np.ndarray, first_row: int, column: pa.Array) -> None:
        """Add a finding about the places `rows`, int64[n], of a column that begins at `first_row` of its file."""
        if not len(rows):
            return
        row = int(rows[0])
        first = self._found.get(_key(finding)) or replace(finding, row=first_row + row, value=shown_value(column[row]))
        self._found[_key(finding)] = replace(first, num_rows=first.num_rows + len(rows))

    def stop_where(self, kind: str, max_rows: float) -> None:
        """Turn warnings of a kind that are about more than `max_rows` rows into faults."""
        for key, finding in self._found.items():
            if finding.kind == kind and finding.num_rows > max_rows:
                self._found[key] = replace(finding, is_warning=False)

    def to_list(self) -> list[Finding]:
        """All findings, warnings last."""
        return sorted(self._found.values(), key=lambda finding: finding.is_warning)


def count_faults(findings: Iterable[Finding]) -> int:
    """The number of faults: each row counts, and each finding that is not about rows; warnings do not."""
    return sum(max(1, finding.num_rows) for finding in findings if not finding.is_warning)


def _key(finding: Finding) -> tuple:
    return finding.table, finding.column, finding.kind, finding.found


def shown_value(scalar: pa.Scalar) -> object:
    """A value for messages: long text is cut; times, and values that Python cannot hold, become text."""
    try:
        value = scalar.as_py()
    except UnicodeDecodeError:
        value = scalar.as_buffer().to_pybytes() if hasattr(scalar, "as_buffer") else "no UTF-8"
    except (ValueError, OverflowError):  # a time that Python cannot hold
        value = f"{scalar.value} ({scalar.type})"
    if isinstance(value, datetime.date):  # also a datetime
        value = str(value)
    is_long = isinstance(value, str) and len(value) > MAX_SHOWN_CHARACTERS
    return value[:MAX_SHOWN_CHARACTERS] + "..." if is_long else value
