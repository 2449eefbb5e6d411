"""Reading of foreign files (Parquet or CSV) and query results in batches, with columns converted as a mapping asks.

An error about a value that cannot be converted names its file, column, row and value.
"""

import csv
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.errors import TableError, first_line
from laserbatch.pipeline.tables import conversion, csv_files, layout, times
from laserbatch.pipeline.tables.columns import ATTRIBUTE, ID
from laserbatch.pipeline.tables.conversion import DECIMAL_COMMA, ConversionFault, to_path, to_time, to_type
from laserbatch.pipeline.tables.database import is_server, query_rows, shown_database
from laserbatch.pipeline.tables.parts import TablePart, typed_parts
from laserbatch.pipeline.tables.schema import PATH_TYPE, id_type, plain_column, plain_type
from laserbatch.pipeline.tables.settings import SourceColumn, SourceFiles
from laserbatch.pipeline.validation import nearest

BATCH_ROWS = 16 * 1024  # few enough that a batch of a list column seldom has 2 GiB, which Arrow cannot read
_TYPES = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}


@dataclass(frozen=True)
class SourceBatch:
    """Rows of one source file or query, and their place. Raises TableError for a missing or unusable column."""

    file: Path
    first_row: int
    rows: pa.RecordBatch
    is_csv: bool = False
    decimal: str = "."  # decimal mark of numbers stored as text

    def typed(self, name: str, kind: pa.DataType) -> pa.Array:
        """A column as int64, float64, bool or string."""
        return self._converted(name, lambda column: self._typed(column, kind))

    def timed(self, name: str, unit: str) -> pa.Array:
        """A column as timestamp[us, UTC]; `unit` as `to_time` takes it."""
        return self._converted(name, lambda column: to_time(column, unit))

    def numbers(self, name: str) -> tuple[int, int] | None:
        """The least and the greatest number of a column; None if it does not hold numbers."""
        return times.span_of(plain_column(self._column(name)))

    def ids(self, name: str, column_of_table: str, target: str, is_whole: bool = False) -> pa.Array:
        """A column of ids for a column of the tables; `target` as in `settings.IdTypes`.

        `is_whole`: text such as 123.0 becomes the whole number 123, as it always does if `target` is int64.
        """
        column = self._column(name)
        stored = plain_type(column.type)
        larger = f"for larger ids, set `ids: {{{column_of_table}: string}}` in the mapping"
        is_long = pt.is_decimal(stored) and stored.scale == 0  # it may have 38 digits
        is_float = pt.is_floating(stored) or pt.is_decimal(stored)  # pandas makes floats if one is null
        if is_float and not (is_long and target == "string"):
            advice = (larger,) if is_long else ()
            whole = self._converted(name, lambda values: conversion.whole_numbers(values, *advice))
            return whole.cast(pa.string()) if target == "string" else whole
        kind = _TYPES[target] if target != "keep" else id_type(column.type)
        if kind is None:
            raise TableError(
                f"{self.file}, column {name}: ids of type {column.type}; expected {ID.expected}. Set `ids` in the "
                "mapping to the type that they should get, string or int64."
            )

        def convert(values: pa.Array) -> pa.Array:
            values = plain_column(values)
            if values.type == pa.string():
                values = conversion.uncut(values)
                values = pc.utf8_trim_whitespace(values) if kind == pa.int64() else values
                values = conversion.whole_texts(values) if is_whole or kind == pa.int64() else values
            return to_type(values, kind, f"an integer below 2**63; {larger}" if kind == pa.int64() else None)

        return self._converted(name, convert)

    def attribute(self, source: SourceColumn) -> pa.Array:
        if source.column is None:  # the words of the flag columns that hold 1 in each row
            named = source.flags.items()
            flags = [(word, self.typed(name, pa.bool_()).fill_null(False).to_pylist()) for name, word in named]
            rows = range(self.rows.num_rows)
            return pa.array([[word for word, is_set in flags if is_set[row]] for row in rows], PATH_TYPE)
        column = self._column(source.column)
        if source.type is None and source.separator is None and not ATTRIBUTE.accepts(column.type):
            raise TableError(
                f"{self.file}, column {source.column}: an attribute of type {column.type}; expected "
                f"{ATTRIBUTE.expected}. Leave it out by naming the `attributes` that you want in the mapping, or "
                "write its parts as separate columns."
            )
        kind = pa.string() if source.words else plain_type(column.type)
        kind = _TYPES[source.type] if source.type else kind

        def convert(values: pa.Array) -> pa.Array:
            if source.null_values or source.words:
                codes, words, nulls = list(source.words), list(source.words.values()), source.null_values
                values = pc.utf8_trim_whitespace(to_type(values, pa.string()))
                values = pc.if_else(pc.is_in(values, pa.array(nulls, pa.string())), conversion.NO_TEXT, values)
                indices = pc.index_in(values, pa.array(codes, pa.string()))
                values = pc.coalesce(pa.array(words, pa.string()).take(indices), values)
            return to_path(values, source.separator) if source.separator is not None else self._typed(values, kind)

        return self._converted(source.column, convert)

    def _typed(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        has_commas = self.decimal == "," and kind == pa.float64() and plain_type(values.type) == pa.string()
        return to_type(conversion.with_points(plain_column(values)) if has_commas else values, kind)

    def _column(self, name: str) -> pa.Array:
        places = self.rows.schema.get_all_field_indices(name)
        if not places:
            advice = ". If the CSV has another delimiter or no header, set `delimiter` or `column_names` in the mapping"
            found = (
                f"{self.file} has no column {name!r}, which the mapping names; {nearest(name, self.rows.schema.names)}"
            )
            raise TableError(found + advice if self.is_csv else found)
        if len(places) > 1:
            raise TableError(f"{self.file} has {len(places)} columns {name!r}; rename or drop all but one.")
        return self.rows.column(places[0])

    def _converted(self, name: str, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
        try:
            return convert(self._column(name))
        except ConversionFault as fault:
            is_comma = self.is_csv and re.match(DECIMAL_COMMA, str(fault.value)) and fault.expected == "a number"
            advice = '; if the comma is a decimal point, set `csv: {decimal: ","}` for this table' * bool(is_comma)
            raise TableError(
                f"{self.file}, column {name}, row {self.first_row + fault.row}: found {fault.value!r}, expected "
                f"{fault.expected}. Correct the row, or the mapping of this column{advice}."
            ) from None
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise TableError(f"{self.file}, column {name}: {error}. Correct the mapping of this column.") from None


def list_source(files: SourceFiles, source: Path, table: str) -> layout.Listing:
    """The files that one table's part of a mapping names, in name order, or its database file; none for a server.

    Raises TableError like `list_pattern`.
    """
    if files.database is not None:
        return layout.Listing([] if is_server(files.database) else [layout.ListedFile(source / files.database)], {})
    assert files.files is not None
    return layout.list_pattern(source, files.files, table)


def read_source(
    files: SourceFiles, source: Path, table: str, note: Callable[[str], object] = lambda text: None
) -> Generator[SourceBatch, None, None]:
    """The rows of a table's source files, in name order and with the columns in folder names; or the rows of its query.

    `note` is called with doubts about a CSV file, such as fields over several lines or quotes kept as text. Raises
    TableError for a file that is missing or unreadable, or whose writer has not finished.
    """
    listing = list_source(files, source, table)
    if files.query is not None and files.database is not None:
        first_row, database = 0, files.database if is_server(files.database) else source / files.database
        path = shown_database(database) if isinstance(database, str) else database
        for rows in query_rows(database, files.query, table):
            yield SourceBatch(path, first_row, _as_text(rows))
            first_row += rows.num_rows
        return
    if not listing.files:
        found = f"there is no file {source / str(files.files)}" if source.is_dir() else f"{source} is not a folder"
        found = "; ".join([found, *layout.name_left_out(listing.left_out)])
        raise TableError(f"table {table}: {found}; expected a folder with the `files` of the mapping.")
    is_csv = {file.path: not layout.is_parquet(file.path) for file in listing.files}
    for part in typed_parts(listing.files, table, as_text=any(is_csv.values())):
        first_row, decimal = 0, files.csv.decimal if is_csv[part.path] else "."
        for rows in _csv(part, files, note) if is_csv[part.path] else part.batches(batch_size=BATCH_ROWS):
            if rows.num_rows:
                yield SourceBatch(Path(part.name), first_row, _as_text(rows), is_csv[part.path], decimal)
                first_row += rows.num_rows


def _as_text(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with UUID and JSON columns as text."""
    return pa.record_batch([_text(column) for column in rows.columns], names=rows.schema.names)


def _text(column: pa.Array) -> pa.Array:
    if isinstance(column.type, pa.UuidType):
        return pa.array([value and str(value) for value in column.to_pylist()], pa.string())
    return column.storage if isinstance(column.type, pa.JsonType) else column


def _csv(part: TablePart, files: SourceFiles, note: Callable[[str], object]) -> Iterator[pa.RecordBatch]:
    first_row = 0
    try:
        for rows in csv_files.read_csv(part.path, files, note):
            yield part.with_partitions(rows, first_row, part.schema_of(rows.schema).names)
            first_row += rows.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        if fault := csv_files.csv_fault(part.path, files.csv_format(part.path), error):
            raise TableError(fault) from None
        advice = (
            "Check `csv` (`delimiter`, `quote`, `escape`, `encoding`) and `column_names` in the mapping, that every "
            "quote is closed, and that no line is above the header (a title, a comment, Excel's `sep=;`)."
        )
        is_damaged = isinstance(error, OSError)  # as a compressed file may be
        raise TableError(
            f"{part.name} cannot be read: {first_line(error)}. {'Write it again.' if is_damaged else advice}"
        ) from None
