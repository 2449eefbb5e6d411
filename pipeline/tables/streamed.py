"""Reading of tables that stay in their files and are streamed."""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables import conversion, layout
from laserbatch.pipeline.tables import schema as sc
from laserbatch.pipeline.tables.columns import ID, out_of_range, role_of, schema_findings
from laserbatch.pipeline.tables.findings import FaultyTable, Finding, Findings
from laserbatch.pipeline.tables.part_columns import names_in, open_parts, plain_batches, plain_kinds, read_table
from laserbatch.pipeline.tables.parts import BATCH_ROWS, TablePart, list_table, tables_folder, typed_parts
from laserbatch.pipeline.tables.read import find_exact_copies, warn_of_copies
from laserbatch.pipeline.tables.times import require_units

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenInteractions:
    """Interactions of a folder, streamed from their files, without exact copies unless `keeps_duplicates`."""

    folder: Path
    parts: list[TablePart]
    keeps_duplicates: bool
    copies: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)  # extra columns compared -> bool[n]

    @property
    def schema(self) -> pa.Schema:
        """The columns of all files, each with the type in the first file that has it."""
        fields = {field.name: field for part in reversed(self.parts) for field in part.schema}
        return pa.schema([fields[name] for name in names_in(self.parts, lambda name: True)])

    def plain_schema(self, columns: Collection[str]) -> pa.Schema:
        """The types of columns in `to_batches`. Raises TableError if the files differ in one."""
        return pa.schema(plain_kinds(self.parts, columns))

    def count_rows(self) -> int:
        """The number of rows in the files, copies included."""
        return sum(part.metadata.num_rows for part in self.parts)

    def to_batches(self, columns: Collection[str], batch_size: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """Some columns of all rows, in file order and in the plain types of `read_tables`; nothing is read ahead.

        Unless copies are kept, rows that equal an earlier one in `columns` and those of `read_tables` are left out.
        """
        is_copy, first_row, kinds = self._copies(tuple(sorted(columns))), 0, plain_kinds(self.parts, columns)
        for batch in (batch for part in self.parts for batch in plain_batches(part, kinds, batch_size)):
            if is_copy is not None:
                is_left = ~is_copy[first_row : first_row + batch.num_rows]
                first_row += batch.num_rows
                batch = batch if is_left.all() else batch.filter(pa.array(is_left))
            yield batch

    def _copies(self, columns: tuple[str, ...]) -> np.ndarray | None:
        if self.keeps_duplicates:
            return None
        columns = tuple(name for name in columns if role_of("interactions", name) is None)
        if columns not in self.copies:
            self.copies[columns] = find_exact_copies(self.folder, columns)
            warn_of_copies(int(np.count_nonzero(self.copies[columns])), len(self.copies[columns]))
        return self.copies[columns]


@dataclass(frozen=True)
class OpenTables:
    """Users and items in memory, and interactions left in their files, with all of their columns, to be streamed."""

    users: pa.Table
    items: pa.Table
    interactions: OpenInteractions


def open_tables(path: Path | str, keep_duplicates: bool = False) -> OpenTables:
    """The tables of a folder, of all days. Raises TableError like `read_tables`.

    Files that are left out are named in the log, once per process.
    """
    path = tables_folder(path)
    users, items = (read_table(path, table, None) for table in ("users", "items"))
    for table in sc.TABLE_NAMES:
        for sentence in layout.name_left_out(list_table(path, table).left_out):
            _warn_once(f"table {table}: {sentence}")
    parts = open_parts(path, "interactions", partial(logger.warning, "%s"))
    return OpenTables(users, items, OpenInteractions(path, parts, keep_duplicates))


def iter_rows(path: Path, table: str, columns: str) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file, or of a folder that is read like that of a table.

    All rows have their columns in the order of the first file. Raises TableError if a file, which it names, cannot be
    read or has other columns than the first; or if there are no rows, with the expected `columns`.
    """
    parts, first, num_rows = _parts_at(path, table), None, 0
    for part in parts:
        num_rows += part.metadata.num_rows
        first = first or part.schema
        fields, expected = ({of.name: of for of in schema} for schema in (part.schema, first))
        if fields != expected:
            own, other = (", ".join(f"{of.name} {of.type}" for of in it) for it in (part.schema, first))
            raise TableError(
                f"{part.name} has the columns {own}, but {parts[0].name} has {other}. Write the files of a folder "
                "with the same columns."
            )
        in_order = part.schema.names == first.names
        yield from (rows if in_order else rows.select(first.names) for rows in part.batches())
    if not num_rows:
        reason = "has no Parquet file with rows" if path.exists() else "is not there"
        raise TableError(f"{path} {reason}; expected a Parquet file, or a folder of Parquet files, with {columns}")


def _parts_at(path: Path, table: str) -> list[TablePart]:
    if not path.is_dir():
        return [TablePart(path, table, str(path))] if path.is_file() else []
    listing = layout.list_folder(path, table)
    for sentence in layout.name_left_out(listing.left_out):
        _warn_once(f"{path}: {sentence}")
    return typed_parts(listing.files, table)


def iter_log(path: Path, table: str, needs_time: bool = True) -> Iterator[pa.RecordBatch]:
    """Rows of `iter_rows` with the columns of interactions; `timestamp` is required if `needs_time`.

    Also raises FaultyTable if a column is missing or of a wrong type, or if an id is too large or not UTF-8.
    """
    first_row, findings = 0, Findings()
    for rows in iter_rows(path, table, f"user_id, item_id and {'' if needs_time else 'perhaps '}timestamp"):
        for finding in () if first_row else schema_findings("interactions", str(path), rows.schema):
            is_time_left_out = finding.kind == "missing-column" and finding.column == "timestamp" and not needs_time
            if finding.column in sc.REQUIRED_COLUMNS["interactions"] and not is_time_left_out:
                raise FaultyTable(replace(finding, table=table))
        for column in sc.ID_COLUMNS.values():
            for rule in ID.rules[:2]:  # a row may have no id
                rule.check(table, column, str(path), first_row, sc.plain_column(rows[column]), findings)
        for finding in findings.to_list():
            raise FaultyTable(finding)
        first_row += rows.num_rows
        yield rows


def log_unit(path: Path, note: Callable[[Finding], object]) -> str:
    """The unit of integer times in the rows of `iter_log`, inferred from all files; `note` as in `require_units`."""
    parts = _parts_at(path, "interactions")
    require_units(parts, note)
    return parts[0].units.get("timestamp", "s")


def log_times(times: pa.Array, unit: str, path: Path, first_row: int = 0, advice: str = "Write timestamps") -> pa.Array:
    """Times in the rows of `iter_log` as timestamp[us, UTC]; integers count units of `unit`.

    Raises TableError for a time that is not between 1900 and 2200: in a wrong unit, times would be compared with
    features and interactions that came after them.
    """
    try:
        read = conversion.to_time(times, unit)
        conversion.refuse(times, out_of_range(read), "a known time")
        return read
    except conversion.ConversionFault as fault:
        of_unit = ""
        if pt.is_integer(times.type):
            of_unit = f"; integers are read as {unit} since 1970. {advice} if they are of another unit"
        raise TableError(
            f"{path}, column timestamp, row {first_row + fault.row}: found {fault.value!r}, expected a time between "
            f"1900 and 2200{of_unit}. Rows are counted from 0 over all files in name order."
        ) from None


@cache
def _warn_once(sentence: str) -> None:
    logger.warning("%s", sentence)
