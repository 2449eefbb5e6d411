"""Import of any Parquet or CSV files by a mapping: which column becomes which.

Reads the source in batches and writes as it goes, so tables larger than memory work. The mapping's keys are those of
`settings.ImportMapping`. Does not judge what comes out; that is `check.py`.
"""

import codecs
import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pydantic import ValidationError

from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.storage.parquet import parquet_stream
from laserbatch.pipeline.tables import schema as sc
from laserbatch.pipeline.tables.convert import ConversionFault, to_path, to_time, to_type, without
from laserbatch.pipeline.tables.rules import blank
from laserbatch.pipeline.tables.settings import (
    ImportMapping,
    ItemMapping,
    SourceColumn,
    SourceFiles,
    SourceTime,
    UserMapping,
)
from laserbatch.pipeline.validation import explain, nearest, read_yaml

BATCH_ROWS = 128 * 1024
_TYPES = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}


class Progress(Protocol):
    """Where progress is told; `jobs.console.progress` gives one."""

    def advance(self, num_done: int = 1, detail: str = "") -> None:
        """Add rows to the count."""


def load_mapping(path: Path | str) -> ImportMapping:
    """Read a mapping.

    Raises
    ------
    ConfigError
        The file is missing, is not YAML, or has a key or value that it should not have.
    """
    data = read_yaml(Path(path), "mapping", "copy configs/import_example.yaml and adapt it")
    try:
        return ImportMapping.model_validate(data)
    except ValidationError as error:
        faults = explain(error, ImportMapping)
        raise ConfigError(f"the mapping {path}: {faults}; configs/import_example.yaml explains every key") from None


def import_mapped(
    mapping: ImportMapping, source: Path | str, out: Path | str, progress: Progress | None = None
) -> dict[str, int]:
    """Make the three tables from foreign files.

    Parameters
    ----------
    mapping : which column becomes which.
    source : the folder that the mapping's file names are relative to.
    out : folder to write `users.parquet`, `items.parquet` and `interactions.parquet` to.
    progress : told the number of rows as they are read.

    Returns
    -------
    dict
        The rows that the mapping's rules left out, by table and rule: "interactions of unknown user_id".

    Raises
    ------
    TableError
        A file or column is not there, or a value cannot be converted; the message names file, column, row and value.
    """
    source, out, dropped = Path(source), Path(out), Counter()
    known = {"item_id": _write_entities("items", mapping.items, mapping.ids.item_id, source, out, progress, dropped)}
    if mapping.users is not None:
        users = _write_entities("users", mapping.users, mapping.ids.user_id, source, out, progress, dropped)
        known = {"user_id": users} | known
    users = _write_interactions(mapping, source, out, known, progress, dropped)
    if mapping.users is None:
        with parquet_stream(out / "users.parquet", pa.schema({"user_id": users.type})) as stream:
            stream.write(pa.table({"user_id": users}))
    return dict(dropped)


def source_files(files: SourceFiles, source: Path) -> list[Path]:
    """The files that a part of a mapping names, in name order."""
    return sorted(path for path in source.glob(files.files) if path.is_file())


@dataclass(frozen=True)
class _SourceBatch:
    """Some rows of one source file, and where they were."""

    file: Path
    first_row: int
    rows: pa.RecordBatch

    def column(self, name: str) -> pa.Array:
        names = self.rows.schema.names
        if name not in names:
            raise TableError(f"{self.file} has no column {name!r}, which the mapping names; {nearest(name, names)}")
        if names.count(name) > 1:
            raise TableError(f"{self.file} has {names.count(name)} columns {name!r}; rename or drop all but one.")
        return self.rows.column(name)

    def typed(self, name: str, kind: pa.DataType) -> pa.Array:
        return self._converted(name, lambda column: to_type(column, kind))

    def timed(self, time: SourceTime) -> pa.Array:
        return self._converted(time.column, lambda column: to_time(column, time.unit))

    def id(self, name: str, id_type: str) -> pa.Array:
        column = self.column(name)
        kind = _TYPES[id_type] if id_type != "keep" else sc.id_type(column.type)
        if kind is None:
            raise TableError(
                f"{self.file}, column {name}: ids of type {column.type}; expected {sc.ID_EXPECTED}. Set `ids` in the "
                "mapping to what they shall become, string or int64."
            )
        return self.typed(name, kind)

    def attribute(self, wanted: SourceColumn) -> pa.Array:
        column = self.column(wanted.column)
        if wanted.type is None and wanted.separator is None and not sc.is_attribute_type(column.type):
            raise TableError(
                f"{self.file}, column {wanted.column}: an attribute of type {column.type}; expected "
                f"{sc.ATTRIBUTE_EXPECTED}. Leave it out by naming the `attributes` that you want in the mapping, or "
                "write its parts as columns of their own."
            )
        kind = _TYPES[wanted.type] if wanted.type else sc.plain_type(column.type)

        def convert(values: pa.Array) -> pa.Array:
            known = without(values, wanted.null_values) if wanted.null_values else values
            return to_path(known, wanted.separator) if wanted.separator is not None else to_type(known, kind)

        return self._converted(wanted.column, convert)

    def _converted(self, name: str, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
        try:
            return convert(self.column(name))
        except ConversionFault as fault:
            raise TableError(
                f"{self.file}, column {name}, row {self.first_row + fault.row}: found {fault.value!r}, expected "
                f"{fault.expected}. Correct the row, or the mapping of this column."
            ) from None
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise TableError(f"{self.file}, column {name}: {error}. Correct the mapping of this column.") from None


def _write_entities(
    table: str,
    mapping: UserMapping | ItemMapping,
    id_type: str,
    source: Path,
    out: Path,
    progress: Progress | None,
    dropped: Counter,
) -> pa.Array:
    ids: list[pa.Array] = []

    def batches() -> Iterator[tuple[Path, pa.RecordBatch]]:
        for batch in _read(mapping, source, table, progress):
            columns = {sc.ID_COLUMNS[table]: batch.id(mapping.id, id_type)}
            if isinstance(mapping, ItemMapping):
                columns["title"] = batch.typed(mapping.title, pa.string())
            attributes = mapping.attributes
            if attributes is None:
                taken = {mapping.id, getattr(mapping, "title", None), mapping.created_at and mapping.created_at.column}
                others = [name for name in batch.rows.schema.names if name not in taken]
                attributes = {name: SourceColumn(column=name) for name in others}
            for name, wanted in attributes.items():
                if name in columns or name == sc.CREATED_AT:
                    has_names = mapping.attributes is not None
                    advice = "name it otherwise" if has_names else "name the `attributes` that you want"
                    advice += ", or set `created_at`" if name == sc.CREATED_AT and mapping.created_at is None else ""
                    raise ConfigError(f"the mapping makes an attribute of {table}.{name}, which is none; {advice}.")
                columns[name] = batch.attribute(wanted)
            if mapping.created_at is not None:
                columns[sc.CREATED_AT] = batch.timed(mapping.created_at)
            rows = _without_blanks(pa.RecordBatch.from_pydict(columns), mapping, table, dropped)
            ids.append(rows[sc.ID_COLUMNS[table]])
            yield batch.file, rows

    _write(out / f"{table}.parquet", table, batches())
    return pc.unique(pa.chunked_array(ids))


def _write_interactions(
    mapping: ImportMapping,
    source: Path,
    out: Path,
    known: dict[str, pa.Array],
    progress: Progress | None,
    dropped: Counter,
) -> pa.Array:
    """Write the interactions; returns the sorted user ids that were written."""
    wanted, users = mapping.interactions, None

    def batches() -> Iterator[tuple[Path, pa.RecordBatch]]:
        nonlocal users
        for batch in _read(wanted, source, "interactions", progress):
            columns = {
                "user_id": batch.id(wanted.user_id, mapping.ids.user_id),
                "item_id": batch.id(wanted.item_id, mapping.ids.item_id),
                "timestamp": batch.timed(wanted.timestamp),
            }
            if wanted.rating is not None:
                columns["rating"] = batch.typed(wanted.rating, pa.float64())
            rows = _without_blanks(pa.RecordBatch.from_pydict(columns), wanted, "interactions", dropped)
            for column, ids in known.items():
                if rows[column].type != ids.type:
                    raise TableError(
                        f"{batch.file}: {column} is {rows[column].type}, but {ids.type} in the table that "
                        f"lists them. Set `ids: {{{column}: {ids.type}}}` in the mapping."
                    )
                if wanted.drop_unknown:
                    is_known = pc.is_in(rows[column], value_set=ids)
                    rows = _kept(rows, is_known, f"interactions of unknown {column}", dropped)
            new = pc.unique(rows["user_id"]).drop_null()
            users = new if users is None else pc.unique(pa.concat_arrays([users, new]))
            yield batch.file, rows

    _write(out / "interactions.parquet", "interactions", batches())
    return users.take(pc.sort_indices(users))


def _without_blanks(rows: pa.RecordBatch, files: SourceFiles, table: str, dropped: Counter) -> pa.RecordBatch:
    for column in files.drop_without:
        if column not in rows.schema.names:
            raise ConfigError(
                f"the mapping, {table}.drop_without: the table has no column {column!r}; "
                f"{nearest(column, rows.schema.names)}"
            )
        rows = _kept(rows, pc.invert(blank(rows[column])), f"{table} without {column}", dropped)
    return rows


def _kept(rows: pa.RecordBatch, mask: pa.Array, rule: str, dropped: Counter) -> pa.RecordBatch:
    kept = rows.filter(mask)
    dropped[rule] += rows.num_rows - kept.num_rows
    return kept


def _write(path: Path, table: str, batches: Iterator[tuple[Path, pa.RecordBatch]]) -> None:
    first_file, first = next(batches, (None, None))
    if first is None:
        raise TableError(
            f"table {table}: its source files have no rows; expected at least one. Check `files` in the mapping."
        )
    with parquet_stream(path, first.schema) as stream:
        stream.write(first)
        for file, rows in batches:
            differing = set(rows.schema.names) ^ set(first.schema.names)
            if differing:
                column = min(differing)
                has, lacks = (first_file, file) if column in first.schema.names else (file, first_file)
                raise TableError(
                    f"table {table}: {has} has a column {column!r}, {lacks} has none. Write the files alike, or name "
                    "the `attributes` that all have in the mapping."
                )
            for field in first.schema:
                try:
                    rows[field.name].cast(field.type)
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                    raise TableError(
                        f"table {table}: column {field.name!r} is {rows[field.name].type} in {file}, {field.type} in "
                        f"{first_file}. Give it one `type` (of ids: in `ids`) in the mapping."
                    ) from None
            stream.write(rows)


def _read(files: SourceFiles, source: Path, table: str, progress: Progress | None) -> Iterator[_SourceBatch]:
    paths = source_files(files, source)
    if not paths:
        found = f"no file {source / files.files}" if source.is_dir() else f"{source} is not a folder"
        raise TableError(f"table {table}: {found}; expected a folder with what `files` in the mapping names.")
    for path in paths:
        first_row = 0
        try:
            for rows in _parquet(path) if path.suffix == ".parquet" else _csv(path, files):
                if rows.num_rows:
                    yield _SourceBatch(path, first_row, rows)
                    first_row += rows.num_rows
                    if progress is not None:
                        progress.advance(rows.num_rows, table)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            first_line = (str(error).splitlines() or [""])[0][:200]
            raise TableError(
                f"{path} cannot be read: {first_line}. Check `delimiter`, `encoding` and `column_names`."
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
