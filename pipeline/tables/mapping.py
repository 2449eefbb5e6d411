"""Import of any Parquet or CSV files by a mapping: which column becomes which.

The source is read in batches and written as it is read, so tables larger than memory work. What comes out is judged by
`check.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.storage.parquet import parquet_stream, write_parquet
from laserbatch.pipeline.tables.columns import blank
from laserbatch.pipeline.tables.schema import CREATED_AT, ID_COLUMNS
from laserbatch.pipeline.tables.settings import (
    EntityMapping,
    IdTypes,
    ImportMapping,
    InteractionMapping,
    ItemMapping,
    SourceColumn,
    SourceFiles,
)
from laserbatch.pipeline.tables.source import SourceBatch, read_source
from laserbatch.pipeline.validation import explain, nearest, read_yaml

Progress = Callable[[int, str], object]


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
    progress : called with the number of rows that were read, and their table.

    Returns
    -------
    dict
        The rows that the mapping's rules left out, by table and rule: "interactions of unknown user_id".

    Raises
    ------
    TableError
        A file or column is not there, or a value cannot be converted; the message names file, column, row and value.
    """
    work, out = Import(mapping.ids, Path(source), Path(out), progress), Path(out)
    known = {"item_id": work.write_entities("items", mapping.items)}
    if mapping.users is not None:
        known = {"user_id": work.write_entities("users", mapping.users)} | known
    users = work.write_interactions(mapping.interactions, known)
    if mapping.users is None:
        write_parquet(pa.table({"user_id": users}), out / "users.parquet")
    return dict(work.dropped)


class Import:
    """One import under way; `dropped` counts the rows that were left out, by table and rule."""

    def __init__(self, ids: IdTypes, source: Path, out: Path, progress: Progress | None) -> None:
        self._ids, self._source, self._out, self._progress = ids, source, out, progress
        self.dropped: Counter[str] = Counter()

    def write_entities(self, table: str, wanted: EntityMapping) -> pa.Array:
        """Write users or items; returns their ids."""
        ids: list[pa.Array] = []

        def batches() -> Iterator[tuple[Path, pa.RecordBatch]]:
            for batch in self._read(wanted, table):
                rows = self._without_blanks(self._entity_columns(batch, table, wanted), wanted, table)
                ids.append(rows[ID_COLUMNS[table]])
                yield batch.file, rows

        self._write(table, batches())
        return pc.unique(pa.chunked_array(ids))

    def _entity_columns(self, batch: SourceBatch, table: str, wanted: EntityMapping) -> dict[str, pa.Array]:
        id_column = ID_COLUMNS[table]
        columns = {id_column: batch.ids(wanted.id, getattr(self._ids, id_column))}
        taken = {wanted.id, wanted.created_at and wanted.created_at.column}
        if isinstance(wanted, ItemMapping):
            columns["title"] = batch.typed(wanted.title, pa.string())
            taken.add(wanted.title)
        attributes = wanted.attributes
        if attributes is None:
            attributes = {name: SourceColumn(column=name) for name in batch.rows.schema.names if name not in taken}
        for name, source in attributes.items():
            if name in columns or name == CREATED_AT:
                advice = "name the `attributes` that you want" if wanted.attributes is None else "name it otherwise"
                advice += ", or set `created_at`" if name == CREATED_AT and wanted.created_at is None else ""
                raise ConfigError(f"the mapping makes an attribute of {table}.{name}, which is none; {advice}.")
            columns[name] = batch.attribute(source)
        if wanted.created_at is not None:
            columns[CREATED_AT] = batch.timed(wanted.created_at)
        return columns

    def write_interactions(self, wanted: InteractionMapping, known: dict[str, pa.Array]) -> pa.Array:
        """Write the interactions; returns the sorted user ids that were written.

        Parameters
        ----------
        known : the ids of the entity tables, by column.
        """
        users = None

        def batches() -> Iterator[tuple[Path, pa.RecordBatch]]:
            nonlocal users
            for batch in self._read(wanted, "interactions"):
                columns = {
                    "user_id": batch.ids(wanted.user_id, self._ids.user_id),
                    "item_id": batch.ids(wanted.item_id, self._ids.item_id),
                    "timestamp": batch.timed(wanted.timestamp),
                }
                if wanted.rating is not None:
                    columns["rating"] = batch.typed(wanted.rating, pa.float64())
                rows = self._without_blanks(columns, wanted, "interactions")
                for column, ids in known.items():
                    if rows[column].type != ids.type:
                        raise TableError(
                            f"{batch.file}: {column} is {rows[column].type}, but {ids.type} in the table that "
                            f"lists them. Set `ids: {{{column}: {ids.type}}}` in the mapping."
                        )
                    if wanted.drop_unknown:
                        is_known = pc.is_in(rows[column], value_set=ids)
                        rows = self._kept(rows, is_known, f"interactions of unknown {column}")
                new = pc.unique(rows["user_id"]).drop_null()
                users = new if users is None else pc.unique(pa.concat_arrays([users, new]))
                yield batch.file, rows

        self._write("interactions", batches())
        return users.take(pc.sort_indices(users))

    def _read(self, files: SourceFiles, table: str) -> Iterator[SourceBatch]:
        for batch in read_source(files, self._source, table):
            yield batch
            if self._progress is not None:
                self._progress(batch.rows.num_rows, table)

    def _without_blanks(self, columns: dict[str, pa.Array], files: SourceFiles, table: str) -> pa.RecordBatch:
        rows = pa.RecordBatch.from_pydict(columns)
        for column in files.drop_without:
            if column not in columns:
                raise ConfigError(
                    f"the mapping, {table}.drop_without: the table has no column {column!r}; {nearest(column, columns)}"
                )
            rows = self._kept(rows, pc.invert(blank(rows[column])), f"{table} without {column}")
        return rows

    def _kept(self, rows: pa.RecordBatch, mask: pa.Array, rule: str) -> pa.RecordBatch:
        kept = rows.filter(mask)
        self.dropped[rule] += rows.num_rows - kept.num_rows
        return kept

    def _write(self, table: str, batches: Iterator[tuple[Path, pa.RecordBatch]]) -> None:
        first_file, first = next(batches, (None, None))
        if first is None:
            raise TableError(
                f"table {table}: its source files have no rows; expected at least one. Check `files` in the mapping."
            )
        with parquet_stream(self._out / f"{table}.parquet", first.schema) as stream:
            stream.write(first)
            for file, rows in batches:
                _require_alike(table, first_file, first.schema, file, rows)
                stream.write(rows)


def _require_alike(table: str, first_file: Path, first: pa.Schema, file: Path, rows: pa.RecordBatch) -> None:
    """Raise TableError where a batch has other columns than the first, or values that its types do not hold."""
    differing = set(rows.schema.names) ^ set(first.names)
    if differing:
        column = min(differing)
        has, lacks = (first_file, file) if column in first.names else (file, first_file)
        raise TableError(
            f"table {table}: {has} has a column {column!r}, {lacks} has none. Write the files alike, or name "
            "the `attributes` that all have in the mapping."
        )
    for field in first:
        try:
            rows[field.name].cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise TableError(
                f"table {table}: column {field.name!r} is {rows[field.name].type} in {file}, {field.type} in "
                f"{first_file}. Give it one `type` (of ids: in `ids`) in the mapping."
            ) from None
