"""Foreign files, Parquet or CSV, read in batches whose columns come out as a mapping wants them.

What cannot be had is named with file, column, row and value.
"""

import codecs
import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from laserbatch.pipeline.errors import TableError, first_line
from laserbatch.pipeline.tables.columns import ATTRIBUTE, ID
from laserbatch.pipeline.tables.convert import ConversionFault, to_path, to_time, to_type, without
from laserbatch.pipeline.tables.schema import id_type, plain_type
from laserbatch.pipeline.tables.settings import SourceColumn, SourceFiles, SourceTime
from laserbatch.pipeline.validation import nearest

BATCH_ROWS = 128 * 1024
_TYPES = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}


@dataclass(frozen=True)
class SourceBatch:
    """Some rows of one source file, and where they were. Raises TableError for what it does not have."""

    file: Path
    first_row: int
    rows: pa.RecordBatch

    def typed(self, name: str, kind: pa.DataType) -> pa.Array:
        """A column as int64, float64, bool or string."""
        return self._converted(name, lambda column: to_type(column, kind))

    def timed(self, time: SourceTime) -> pa.Array:
        """A column as timestamp[us, UTC]."""
        return self._converted(time.column, lambda column: to_time(column, time.unit))

    def ids(self, name: str, wanted: str) -> pa.Array:
        """A column of ids; `wanted` as in `settings.IdTypes`."""
        column = self._column(name)
        kind = _TYPES[wanted] if wanted != "keep" else id_type(column.type)
        if kind is None:
            raise TableError(
                f"{self.file}, column {name}: ids of type {column.type}; expected {ID.expected}. Set `ids` in the "
                "mapping to what they shall become, string or int64."
            )
        return self.typed(name, kind)

    def attribute(self, wanted: SourceColumn) -> pa.Array:
        """A column as the mapping of an attribute says."""
        column = self._column(wanted.column)
        if wanted.type is None and wanted.separator is None and not ATTRIBUTE.accepts(column.type):
            raise TableError(
                f"{self.file}, column {wanted.column}: an attribute of type {column.type}; expected "
                f"{ATTRIBUTE.expected}. Leave it out by naming the `attributes` that you want in the mapping, or "
                "write its parts as columns of their own."
            )
        kind = _TYPES[wanted.type] if wanted.type else plain_type(column.type)

        def convert(values: pa.Array) -> pa.Array:
            known = without(values, wanted.null_values) if wanted.null_values else values
            return to_path(known, wanted.separator) if wanted.separator is not None else to_type(known, kind)

        return self._converted(wanted.column, convert)

    def _column(self, name: str) -> pa.Array:
        names = self.rows.schema.names
        if name not in names:
            raise TableError(f"{self.file} has no column {name!r}, which the mapping names; {nearest(name, names)}")
        if names.count(name) > 1:
            raise TableError(f"{self.file} has {names.count(name)} columns {name!r}; rename or drop all but one.")
        return self.rows.column(name)

    def _converted(self, name: str, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
        try:
            return convert(self._column(name))
        except ConversionFault as fault:
            raise TableError(
                f"{self.file}, column {name}, row {self.first_row + fault.row}: found {fault.value!r}, expected "
                f"{fault.expected}. Correct the row, or the mapping of this column."
            ) from None
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise TableError(f"{self.file}, column {name}: {error}. Correct the mapping of this column.") from None


def source_files(files: SourceFiles, source: Path) -> list[Path]:
    """The files that a part of a mapping names, in name order."""
    return sorted(path for path in source.glob(files.files) if path.is_file())


def read_source(files: SourceFiles, source: Path, table: str) -> Iterator[SourceBatch]:
    """The rows of a table's source files, in name order. Raises TableError for a file that is not there or not one."""
    paths = source_files(files, source)
    if not paths:
        found = f"no file {source / files.files}" if source.is_dir() else f"{source} is not a folder"
        raise TableError(f"table {table}: {found}; expected a folder with what `files` in the mapping names.")
    for path in paths:
        first_row = 0
        try:
            for rows in _parquet(path) if path.suffix == ".parquet" else _csv(path, files):
                if rows.num_rows:
                    yield SourceBatch(path, first_row, rows)
                    first_row += rows.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise TableError(
                f"{path} cannot be read: {first_line(error)}. Check `delimiter`, `encoding` and `column_names`."
            ) from None


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(BATCH_ROWS)


def _csv(path: Path, files: SourceFiles) -> Iterator[pa.RecordBatch]:
    """A CSV as text columns: nothing is guessed, so the zip code 01234 stays one."""
    delimiter = files.delimiter or ("\t" if ".tsv" in path.suffixes else ",")
    names = files.column_names or _header(path, delimiter, files.encoding)
    read = pacsv.ReadOptions(encoding=files.encoding, column_names=files.column_names)
    parse = pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    text = pacsv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""]
    )
    with pacsv.open_csv(path, read_options=read, parse_options=parse, convert_options=text) as reader:
        yield from reader


def _header(path: Path, delimiter: str, encoding: str) -> list[str]:
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"  # what Excel writes begins with a mark that is part of no name
    with pa.input_stream(str(path)) as raw, io.TextIOWrapper(raw, encoding=encoding, newline="") as lines:
        return next(csv.reader(lines, delimiter=delimiter), [])
