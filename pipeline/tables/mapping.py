"""Import of any Parquet or CSV files by a mapping: which column becomes which.

Reads the source in batches and writes as it goes, so tables larger than memory work. The mapping's keys are those of
`settings.ImportMapping`. Does not judge what comes out; that is `check.py`.
"""

import csv
import difflib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import yaml
from pydantic import ValidationError

from pipeline.errors import ConfigError, TableError
from pipeline.storage.parquet import parquet_stream
from pipeline.tables import schema as sc
from pipeline.tables.convert import ConversionFault, to_path, to_time, to_type, without
from pipeline.tables.settings import (
    IdTypes,
    ImportMapping,
    InteractionMapping,
    ItemMapping,
    SourceColumn,
    SourceFiles,
    SourceTime,
    UserMapping,
)

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
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the mapping {path} is not there; copy configs/import_example.yaml and adapt it.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the mapping {path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    try:
        return ImportMapping.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"the mapping {path}: {_first_fault(error)}; see configs/import_example.yaml.") from None


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    place = ".".join(str(key) for key in fault["loc"]) or "the file"
    if fault["type"] != "extra_forbidden":
        return f"{place}: {fault['msg']}"
    table, key = str(fault["loc"][0]), str(fault["loc"][-1])
    models = {"users": UserMapping, "items": ItemMapping, "interactions": InteractionMapping, "ids": IdTypes}
    model = ImportMapping if len(fault["loc"]) == 1 else models[table]
    if len(fault["loc"]) > 2:
        model = SourceColumn if fault["loc"][1] == "attributes" else SourceTime
    nearest = difflib.get_close_matches(key, model.model_fields, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(model.model_fields)}"
    return f"unknown key {place}; {hint}"


def import_mapped(
    mapping: ImportMapping, source: Path | str, out: Path | str, progress: Progress | None = None
) -> None:
    """Make the three tables from foreign files.

    Parameters
    ----------
    mapping : which column becomes which.
    source : the folder that the mapping's file names are relative to.
    out : folder to write `users.parquet`, `items.parquet` and `interactions.parquet` to.
    progress : told the number of rows as they are read.

    Raises
    ------
    TableError
        A file or column is not there, or a value cannot be converted; the message names file, column, row and value.
    """
    source, out = Path(source), Path(out)
    items = _write_entities("items", mapping.items, mapping.ids.item_id, source, out, progress)
    if mapping.users is not None:
        users = _write_entities("users", mapping.users, mapping.ids.user_id, source, out, progress)
        _write_interactions(mapping, source, out, {"user_id": users, "item_id": items}, progress)
        return
    users = _write_interactions(mapping, source, out, {"item_id": items}, progress)
    with parquet_stream(out / "users.parquet", pa.schema({"user_id": users.type})) as stream:
        stream.write(pa.table({"user_id": users}))


@dataclass(frozen=True)
class _SourceBatch:
    """Some rows of one source file, and where they were."""

    file: Path
    first_row: int
    rows: pa.RecordBatch

    def column(self, name: str) -> pa.Array:
        if name not in self.rows.schema.names:
            nearest = difflib.get_close_matches(name, self.rows.schema.names, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise TableError(
                f"{self.file} has no column {name!r}, which the mapping names; it has "
                f"{', '.join(self.rows.schema.names)}.{hint}"
            )
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
                f"{self.file}, column {name}: ids of type {column.type}; expected strings or integers. "
                "Set `ids` in the mapping to the type they shall become."
            )
        return self.typed(name, kind)

    def attribute(self, wanted: SourceColumn) -> pa.Array:
        column = self.column(wanted.column)
        kind = _TYPES[wanted.type] if wanted.type else sc.plain_type(column.type)

        def convert(values: pa.Array) -> pa.Array:
            known = without(values, wanted.null_values) if wanted.null_values else values
            return to_path(known, wanted.separator) if wanted.separator is not None else to_type(known, kind)

        return self._converted(wanted.column, convert)

    def _converted(self, name: str, convert) -> pa.Array:
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
    table: str, mapping: UserMapping | ItemMapping, id_type: str, source: Path, out: Path, progress: Progress | None
) -> pa.Array:
    ids: list[pa.Array] = []

    def batches() -> Iterator[pa.RecordBatch]:
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
                    raise ConfigError(f"the mapping gives {table}.{name} twice; name the attribute otherwise.")
                columns[name] = batch.attribute(wanted)
            if mapping.created_at is not None:
                columns[sc.CREATED_AT] = batch.timed(mapping.created_at)
            ids.append(columns[sc.ID_COLUMNS[table]])
            yield pa.RecordBatch.from_pydict(columns)

    _write(out / f"{table}.parquet", table, batches())
    return pc.unique(pa.chunked_array(ids))


def _write_interactions(
    mapping: ImportMapping, source: Path, out: Path, known: dict[str, pa.Array], progress: Progress | None
) -> pa.Array:
    """Write the interactions; returns the sorted user ids that were written."""
    wanted, users = mapping.interactions, None

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal users
        for batch in _read(wanted, source, "interactions", progress):
            columns = {
                "user_id": batch.id(wanted.user_id, mapping.ids.user_id),
                "item_id": batch.id(wanted.item_id, mapping.ids.item_id),
                "timestamp": batch.timed(wanted.timestamp),
            }
            if wanted.rating is not None:
                columns["rating"] = batch.typed(wanted.rating, pa.float64())
            rows = pa.RecordBatch.from_pydict(columns)
            for column, ids in known.items():
                if rows[column].type != ids.type:
                    raise TableError(
                        f"{batch.file}: {column} is {rows[column].type}, but {ids.type} in the table that "
                        f"lists them. Set `ids: {{{column}: {ids.type}}}` in the mapping."
                    )
                if wanted.drop_unknown:
                    rows = rows.filter(pc.is_in(rows[column], value_set=ids))
            new = pc.unique(rows["user_id"]).drop_null()
            users = new if users is None else pc.unique(pa.concat_arrays([users, new]))
            yield rows

    _write(out / "interactions.parquet", "interactions", batches())
    return users.take(pc.sort_indices(users))


def _write(path: Path, table: str, batches: Iterator[pa.RecordBatch]) -> None:
    first = next(batches, None)
    if first is None:
        raise TableError(
            f"table {table}: its source files have no rows; expected at least one. Check `files` in the mapping."
        )
    with parquet_stream(path, first.schema) as stream:
        stream.write(first)
        for batch in batches:
            try:
                stream.write(batch)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, KeyError) as error:
                raise TableError(f"table {table}: its source files differ in their columns: {error}.") from None


def _read(files: SourceFiles, source: Path, table: str, progress: Progress | None) -> Iterator[_SourceBatch]:
    paths = sorted(source.glob(files.files))
    if not paths:
        raise TableError(f"table {table}: no file {source / files.files}; expected what `files` in the mapping names.")
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
    with pa.input_stream(str(path)) as raw, io.TextIOWrapper(raw, encoding=encoding, newline="") as lines:
        return next(csv.reader(lines, delimiter=delimiter), [])
