"""Tables that are left in their files and streamed, in the types in which they are stored."""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.columns import role_of, schema_findings
from laserbatch.pipeline.tables.fetched import shown_path
from laserbatch.pipeline.tables.findings import FaultyTable
from laserbatch.pipeline.tables.layout import list_folder, name_left_out
from laserbatch.pipeline.tables.part_columns import naming_file, read_table
from laserbatch.pipeline.tables.parts import TablePart, dataset_of, typed_parts
from laserbatch.pipeline.tables.read import find_exact_copies, warn_of_copies
from laserbatch.pipeline.tables.schema import TABLE_NAMES, list_table, table_parts, tables_folder
from laserbatch.pipeline.tables.time_units import in_unit, require_units

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenInteractions:
    """Interactions of a folder, left in their files and streamed, without exact copies unless they are to be kept."""

    folder: Path
    files: ds.Dataset
    keeps_duplicates: bool
    units: dict[str, str]  # of integer times that are no seconds
    copies: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)  # which rows are, by the columns compared

    @property
    def schema(self) -> pa.Schema:
        """That of the first file, with integer times that are no seconds as timestamps."""
        fields = [
            field.with_type(pa.timestamp(self.units[field.name], tz="UTC")) if field.name in self.units else field
            for field in self.files.schema
        ]
        return pa.schema(fields)

    def count_rows(self) -> int:
        """Rows in the files, copies too."""
        return self.files.count_rows()

    def to_batches(self, columns: Collection[str], **options: int) -> Iterator[pa.RecordBatch]:
        """Columns of the rows in the order of their files; `options` as PyArrow's.

        A row that is equal to an earlier one in what `read_tables` reads, and in `columns`, is left out.
        """
        is_copy, first_row = self._copies(tuple(sorted(columns))), 0
        for batch in self.files.to_batches(columns=list(columns), **options):
            for name, unit in self.units.items():
                if name in batch.schema.names:
                    batch = batch.set_column(batch.schema.names.index(name), name, in_unit(batch[name], unit))
            part = slice(first_row, first_row := first_row + batch.num_rows)
            yield batch if is_copy is None or not is_copy[part].any() else batch.filter(pa.array(~is_copy[part]))

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
    """Users and items read, and interactions left in their files, with all of their columns, to be streamed."""

    users: pa.Table
    items: pa.Table
    interactions: OpenInteractions


def open_tables(path: Path | str, keep_duplicates: bool = False) -> OpenTables:
    """The tables of a folder, of all days. Raises TableError as `read_tables` does.

    Files that are left out are named in the log, once a process.
    """
    path = tables_folder(path)
    users, items = (read_table(path, table, None) for table in ("users", "items"))
    for table in TABLE_NAMES:
        for sentence in name_left_out(list_table(path, table).left_out):
            _warn_once(f"table {table}: {sentence}")
    parts = table_parts(path, "interactions")
    with naming_file("interactions", parts[0].path):
        opened = dataset_of(parts)
    units = require_units("interactions", [part.path for part in parts], partial(logger.warning, "%s"))
    return OpenTables(users, items, OpenInteractions(path, opened, keep_duplicates, units))


def iter_column(path: Path, table: str, column: str) -> Iterator[pa.Array]:
    """A required column of a table in batches, as it is stored. Raises TableError as `read_tables` does."""
    for part in table_parts(path, table):
        with naming_file(table, part.path), part.open() as opened:
            for finding in schema_findings(table, shown_path(part.path), opened.schema_arrow):
                raise FaultyTable(finding)
            yield from (batch.column(0) for batch in opened.iter_batches(columns=[column]))


def iter_rows(path: Path, table: str, columns: str) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file, or of a folder that is read as that of a table.

    Raises TableError, which names the file, if one cannot be read or has other columns than the first, and which names
    the expected `columns` if there are no rows.
    """
    parts = [TablePart(path, table, {})] if path.is_file() else []
    if path.is_dir():
        listing = list_folder(path, table)
        parts = typed_parts(listing.files, table)
        for sentence in name_left_out(listing.left_out):
            _warn_once(f"{path}: {sentence}")
    first, num_rows = None, 0
    for part in parts:
        with naming_file(table, part.path), part.open() as opened:
            num_rows += opened.metadata.num_rows
            first = first or opened.schema_arrow
            if not opened.schema_arrow.equals(first):
                own, other = (", ".join(f"{of.name} {of.type}" for of in it) for it in (opened.schema_arrow, first))
                raise TableError(
                    f"{part.path} has the columns {own}; {parts[0].path.name} beside it has {other}. Write the files "
                    "of a folder with the same columns."
                )
            yield from opened.iter_batches()
    if not num_rows:
        reason = "has no Parquet file with rows in it" if path.exists() else "is not there"
        raise TableError(f"{path} {reason}; expected a Parquet file, or a folder of such, with {columns}")


@cache
def _warn_once(sentence: str) -> None:
    logger.warning("%s", sentence)
