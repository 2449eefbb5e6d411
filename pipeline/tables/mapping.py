"""Import of any Parquet or CSV files by a mapping: which column becomes which.

The source is read in batches and written as it is read, so tables larger than memory work. What comes out is judged by
`check.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ValidationError

from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.tables.columns import blank
from laserbatch.pipeline.tables.layout import name_left_out, unnamed_files
from laserbatch.pipeline.tables.read import find_exact_copies
from laserbatch.pipeline.tables.schema import CREATED_AT, ID_COLUMNS
from laserbatch.pipeline.tables.settings import (
    EntityMapping,
    ImportMapping,
    InteractionMapping,
    ItemMapping,
    SourceColumn,
    SourceFiles,
)
from laserbatch.pipeline.tables.source import SourceBatch, list_source, read_source
from laserbatch.pipeline.validation import explain, nearest, read_yaml

NUM_EXAMPLES = 3
Progress = Callable[[int, str], object]
ColumnsOf = Callable[[SourceBatch, str, Any], dict[str, pa.Array]]  # of a batch for a table, as its mapping says


def load_mapping(path: Path | str) -> ImportMapping:
    """Read a mapping; ConfigError where it is missing, no YAML, or has a key or value that it should not have."""
    data = read_yaml(Path(path), "mapping", "copy configs/import_example.yaml and adapt it")
    try:
        return ImportMapping.model_validate(data)
    except ValidationError as error:
        faults = explain(error, ImportMapping)
        raise ConfigError(f"the mapping {path}: {faults}; configs/import_example.yaml explains every key") from None


def import_mapped(
    mapping: ImportMapping,
    source: Path | str,
    out: Path | str,
    progress: Progress | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> dict[str, int]:
    """Make the three tables from the files of a folder.

    `progress` is called with the number of rows that were read, and their table; `note` with each sentence about what
    was read and leaves a doubt, or was left out. Returns how many rows the mapping's
    rules left out, by table and rule: "interactions of unknown user_id". Raises TableError, which names file, column,
    row and value, where a file or column is not there, or a value cannot be converted.
    """
    work = _Import(mapping, Path(source), Path(out), progress, note)
    known = {"item_id": work.write("items", mapping.items, work.entity_columns)["item_id"]}
    if mapping.users is not None:
        known = {"user_id": work.write("users", mapping.users, work.entity_columns)["user_id"]} | known
    written = work.write("interactions", mapping.interactions, work.interaction_columns, known)
    work.require_known(mapping.interactions)
    if not mapping.interactions.keep_duplicates:
        work.drop_copies()
    if mapping.users is None:
        users = written["user_id"].drop_null()
        write_parquet(pa.table({"user_id": users.take(pc.sort_indices(users))}), Path(out, "users.parquet"))
    listings = [list_source(part, Path(source), table) for table, part in mapping.tables().items()]
    others = unnamed_files(Path(source), listings).items()
    for sentence in name_left_out({path: reason for path, reason in others if path.resolve() != Path(out).resolve()}):
        note(sentence)
    return dict(work.dropped)


@dataclass
class _Unknown:
    """How many interactions are of ids that no table lists, with examples of those and of the listed ones."""

    known: list
    examples: list = field(default_factory=list)
    num_rows: int = 0
    num_unknown: int = 0


@dataclass
class _Import:
    """One import under way; `dropped` counts the rows that were left out, by table and rule."""

    mapping: ImportMapping
    source: Path
    out: Path
    progress: Progress | None
    note: Callable[[str], object]
    dropped: Counter[str] = field(default_factory=Counter)
    unknown: dict[str, "_Unknown"] = field(default_factory=dict)  # by column of interactions

    def write(
        self, table: str, wanted: SourceFiles, columns_of: ColumnsOf, known: Mapping[str, pa.Array] | None = None
    ) -> dict[str, pa.Array]:
        """Write a table; returns the ids in it by column. `known` are those that its rows may be about."""
        ids: dict[str, list[pa.Array]] = {}

        def batches() -> Iterator[tuple[Path, pa.RecordBatch]]:
            for batch in read_source(wanted, self.source, table, self.note):
                rows = pa.RecordBatch.from_pydict(columns_of(batch, table, wanted))
                rows = self._with_known(self._without_blanks(rows, wanted, table), wanted, known or {}, batch.file)
                for column in ID_COLUMNS.values():
                    if column in rows.schema.names:
                        seen = ids.setdefault(column, [])
                        seen.append(pc.unique(rows[column]))
                        if sum(map(len, seen)) > 2 * len(seen[0]):
                            seen[:] = [pc.unique(pa.chunked_array(seen))]
                yield batch.file, rows
                if self.progress is not None:
                    self.progress(batch.rows.num_rows, table)

        parts = batches()
        first_file, first = next(parts, (None, None))
        if first is None:
            raise TableError(
                f"table {table}: its source files have no rows; expected at least one. Check `files` in the mapping."
            )
        others = (_alike(rows, file, first.schema, first_file, table) for file, rows in parts)
        write_parquet(chain([first], others), self.out / f"{table}.parquet", first.schema)
        return {column: pc.unique(pa.chunked_array(seen)) for column, seen in ids.items()}

    def drop_copies(self) -> None:
        """Write the interactions again without rows that are exact copies of an earlier one, where there are any."""
        is_copy = find_exact_copies(self.out)
        if not is_copy.any():
            return
        path = self.out / "interactions.parquet"
        whole = path.rename(path.with_name("interactions.with_copies"))

        def kept() -> Iterator[pa.RecordBatch]:
            first_row = 0
            with pq.ParquetFile(whole) as file:
                for batch in file.iter_batches():
                    part = slice(first_row, first_row := first_row + batch.num_rows)
                    yield batch.filter(pa.array(~is_copy[part]))

        write_parquet(kept(), path, pq.read_schema(whole))
        whole.unlink()
        self.dropped["interactions that are exact copies of another"] = int(is_copy.sum())

    def entity_columns(self, batch: SourceBatch, table: str, wanted: EntityMapping) -> dict[str, pa.Array]:
        """The columns of users or items."""
        id_column = ID_COLUMNS[table]
        columns = {id_column: batch.ids(wanted.id, getattr(self.mapping.ids, id_column))}
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

    def interaction_columns(self, batch: SourceBatch, table: str, wanted: InteractionMapping) -> dict[str, pa.Array]:
        """The columns of interactions."""
        columns = {
            "user_id": batch.ids(wanted.user_id, self.mapping.ids.user_id),
            "item_id": batch.ids(wanted.item_id, self.mapping.ids.item_id),
            "timestamp": batch.timed(wanted.timestamp),
        }
        kinds = {"rating": (wanted.rating, pa.float64()), "event": (wanted.event, pa.string())}
        return columns | {name: batch.typed(of, kind) for name, (of, kind) in kinds.items() if of is not None}

    def _without_blanks(self, rows: pa.RecordBatch, files: SourceFiles, table: str) -> pa.RecordBatch:
        for column in files.drop_without:
            names = rows.schema.names
            if column not in names:
                raise ConfigError(
                    f"the mapping, {table}.drop_without: the table has no column {column!r}; {nearest(column, names)}"
                )
            rows = self._kept(rows, pc.invert(blank(rows[column])), f"{table} without {column}")
        return rows

    def _with_known(
        self, rows: pa.RecordBatch, wanted: SourceFiles, known: Mapping[str, pa.Array], file: Path
    ) -> pa.RecordBatch:
        for column, ids in known.items():
            if rows[column].type != ids.type:
                raise TableError(
                    f"{file}: {column} is {rows[column].type}, but {ids.type} in the table that lists them. "
                    f"Set `ids: {{{column}: {ids.type}}}` in the mapping."
                )
            if wanted.drop_unknown:
                is_known = pc.is_in(rows[column], ids)
                unknown = self.unknown.setdefault(column, _Unknown(ids.slice(0, NUM_EXAMPLES).to_pylist()))
                unknown.num_rows += len(is_known)
                unknown.num_unknown += len(is_known) - is_known.true_count
                if len(unknown.examples) < NUM_EXAMPLES:
                    others = pc.unique(rows[column].filter(pc.invert(is_known))).slice(0, NUM_EXAMPLES).to_pylist()
                    unknown.examples = list(dict.fromkeys([*unknown.examples, *others]))[:NUM_EXAMPLES]
                rows = self._kept(rows, is_known, f"interactions of unknown {column}")
        return rows

    def require_known(self, wanted: InteractionMapping) -> None:
        """Raise TableError where more interactions than the mapping allows are of ids that are in no table."""
        for column, unknown in self.unknown.items():
            if unknown.num_unknown > wanted.max_unknown_share * unknown.num_rows:
                raise TableError(
                    f"table interactions: {unknown.num_unknown:,} of {unknown.num_rows:,} rows are of a {column} that "
                    f"is in no table, such as {', '.join(map(repr, unknown.examples))}; the table that lists them has "
                    f"ids such as {', '.join(map(repr, unknown.known))}. Write the ids alike; or, if so many shall be "
                    f"left out, set `max_unknown_share` (now {wanted.max_unknown_share:g}) under `interactions` in the "
                    "mapping."
                )

    def _kept(self, rows: pa.RecordBatch, mask: pa.Array, rule: str) -> pa.RecordBatch:
        kept = rows.filter(mask)
        self.dropped[rule] += rows.num_rows - kept.num_rows
        return kept


def _alike(rows: pa.RecordBatch, file: Path, first: pa.Schema, first_file: Path, table: str) -> pa.RecordBatch:
    """The rows; raises TableError where they have other columns than the first, or values not of its types."""
    for column in dict.fromkeys([*first.names, *rows.schema.names]):
        try:
            rows[column].cast(first.field(column).type)
        except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
            kinds = [known.field(column).type if column in known.names else "not" for known in (rows.schema, first)]
            raise TableError(
                f"table {table}: column {column!r} is {kinds[0]} in {file}, {kinds[1]} in {first_file}. Write the "
                "files alike, give it one `type` (of ids: in `ids`) in the mapping, or name the `attributes` of all."
            ) from None
    return rows
