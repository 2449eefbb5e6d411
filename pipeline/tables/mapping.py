"""Import of any Parquet or CSV files, or rows of queries, by a mapping of columns.

The source is read in batches and written as it is read, so tables larger than memory work. `check.py` judges what comes
out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.storage.parquet import ROW_GROUP_ROWS, write_parquet
from laserbatch.pipeline.tables import conversion, database, layout, settings
from laserbatch.pipeline.tables.columns import blank
from laserbatch.pipeline.tables.schema import CREATED_AT, ID_COLUMNS, is_unnamed, plain_column, widened
from laserbatch.pipeline.tables.settings import EntityMapping, ImportMapping, InteractionMapping, SourceFiles
from laserbatch.pipeline.tables.source import SourceBatch, list_source, read_source
from laserbatch.pipeline.tables.times import NAMES, other_reading, shown_span, unit_of
from laserbatch.pipeline.validation import nearest, read_yaml, validated
from laserbatch.retrieval_pools.ids import IdCodes

NUM_EXAMPLES = 3
Progress = Callable[[int, str], object]
ColumnsOf = Callable[[SourceBatch, str, Any], dict[str, pa.Array]]  # (batch, table, its mapping) -> columns


def load_mapping(path: Path | str) -> ImportMapping:
    """Read a mapping. Raises ConfigError if it is missing, is not YAML, or has a key or value that is not valid."""
    data = read_yaml(Path(path), "mapping", "copy configs/import_example.yaml and adapt it")
    return validated(ImportMapping, data, f"the mapping {path}", "; configs/import_example.yaml explains every key")


def import_mapped(
    mapping: ImportMapping,
    source: Path | str,
    out: Path | str,
    progress: Progress = lambda num_rows, table: None,
    note: Callable[[str], object] = lambda text: None,
) -> dict[str, int]:
    """Make the three tables from the files of a folder.

    `progress` is called with a number of rows read and their table; `note` with sentences about doubtful data and about
    what was left out. Returns the number of rows that the mapping's rules left out, by table and rule: "interactions of
    unknown user_id". Raises TableError, which names file, column, row and value, if a file or column is missing, or if
    a value cannot be converted.
    """
    notes: dict[str, None] = {}
    work = _Import(mapping, Path(source), Path(out), progress, notes.setdefault)
    written = work.write_all()
    if whole := work.whole_ids():
        work = _Import(mapping, Path(source), Path(out), progress, notes.setdefault, whole)
        written = work.write_all()
        for column in sorted(whole):
            work.note(f"{column}: ids such as 123.0 were read as whole numbers, such as 123")
    for text in notes:
        note(text)
    work.note = note
    work.require_known(mapping.interactions)
    if mapping.users is None:
        ids = written["user_id"]
        users = pa.table({"user_id": ids.values()}).sort_by("user_id")  # perhaps of large strings
        schema = pa.schema([("user_id", ids.kind)])
        write_parquet(users.to_batches(ROW_GROUP_ROWS), Path(out, "users.parquet"), schema)
    listings = [list_source(part, Path(source), table) for table, part in mapping.tables().items()]
    unnamed = layout.unnamed_files(Path(source), listings).items()
    # A Delta table, say, is read from a copy of its rows.
    read = [Path(out).resolve(), *(Path(source, str(part.files)).resolve() for part in mapping.tables().values())]
    is_read = {path: any(of.is_relative_to(path.resolve()) for of in read) for path, _ in unnamed}
    for sentence in layout.name_left_out({path: reason for path, reason in unnamed if not is_read[path]}):
        note(sentence)
    return dict(work.dropped)


@dataclass
class _Unknown:
    """Examples of ids that a table lists and of others in the interactions, and the number of rows compared."""

    listed: list
    examples: list = field(default_factory=list)
    num_rows: int = 0


@dataclass
class _Times:
    """A column of times that are numbers: its first file, their unit, the least and the greatest of them."""

    file: Path
    unit: str
    is_inferred: bool
    low: int
    high: int


@dataclass
class _Import:
    """One import under way; `dropped` counts the rows that were left out, by table and rule."""

    mapping: ImportMapping
    source: Path
    out: Path
    progress: Progress
    note: Callable[[str], object]
    whole: frozenset[str] = frozenset()  # id columns in which 123.0 is read as 123
    dropped: Counter[str] = field(default_factory=Counter)
    forms: dict[tuple[str, Path], Counter] = field(default_factory=dict)  # counts of forms of ids, by column and file
    times: dict[tuple[str, str], "_Times"] = field(default_factory=dict)  # by table and column of the source
    unknown: dict[str, "_Unknown"] = field(default_factory=dict)  # by column of interactions

    def write_all(self) -> dict[str, IdCodes]:
        """Write the three tables, users only if they are mapped. Returns the ids of interactions by column."""
        known = {"item_id": self.write("items", self.mapping.items, {})["item_id"]}
        if self.mapping.users is not None:
            known = {"user_id": self.write("users", self.mapping.users, {})["user_id"]} | known
        return self.write("interactions", self.mapping.interactions, known)

    def whole_ids(self) -> frozenset[str]:
        """Id columns with whole numbers in all files, where at least one file writes all of them as 123.0."""
        columns = frozenset()
        for column in ID_COLUMNS.values():
            forms = [form for (of_column, _), form in self.forms.items() if of_column == column]
            is_sure = all(form["ids"] in (form["whole"], form["float"]) for form in forms)
            columns |= {column} if is_sure and any(form["float"] for form in forms) else set()
        return columns

    def ids_of(self, batch: SourceBatch, column: str, source: str) -> pa.Array:
        """The ids of a batch for a column of the tables, from the column `source`; their forms are counted."""
        ids = batch.ids(source, column, getattr(self.mapping.ids, column), column in self.whole)
        form, distinct = self.forms.setdefault((column, batch.file), Counter()), pc.unique(ids.drop_null())
        if distinct.type == pa.string():
            distinct = distinct.filter(pc.invert(blank(distinct)))
            for name, pattern in (("whole", conversion.WHOLE_ID), ("float", conversion.FLOAT_ID)):
                form[name] += pc.match_substring_regex(distinct, pattern).true_count
        else:
            form["whole"] += len(distinct)
        form["ids"] += len(distinct)
        return ids

    def times_of(self, batch: SourceBatch, table: str, source: settings.SourceTime) -> pa.Array:
        """The times of a batch. Without a given unit, the first batch decides the unit of all numbers in the column."""
        name, span = source.column, batch.numbers(source.column)
        if span is None:
            return batch.timed(name, source.unit or "s")
        unit = source.unit or unit_of(*span) or "s"
        times = self.times.setdefault((table, name), _Times(batch.file, unit, source.unit is None, *span))
        times.low, times.high = min(times.low, span[0]), max(times.high, span[1])
        if times.is_inferred and times.unit != "s" and unit_of(*span) != times.unit:
            raise TableError(
                f"{batch.file}, column {name}: not all numbers from {span[0]} to {span[1]} are times between 1990 and "
                f"tomorrow in {NAMES[times.unit]} since 1970, as the numbers before them are; set the `unit` of the "
                "column in the mapping"
            )
        return batch.timed(name, times.unit)

    def judge_times(self, table: str) -> None:
        """Note which units were inferred. Raises TableError if numbers that were read as seconds look like dates."""
        for (of_table, name), times in self.times.items():
            if of_table != table:
                continue
            if times.unit == "s" and (reading := other_reading(times.low, times.high)):
                raise TableError(
                    f"{times.file}, column {name}: the numbers from {times.low} to {times.high} look like {reading}, "
                    'not like seconds since 1970. For dates such as 20240531 set `unit: "%Y%m%d"` in the mapping; '
                    "otherwise export the column as dates"
                )
            if times.is_inferred and times.unit != "s":
                self.note(
                    f"table {table}: {name} was read as {NAMES[times.unit]} since 1970 "
                    f"({shown_span(times.low, times.high, times.unit)}); if that is wrong, set `unit` in the mapping"
                )

    def write(self, table: str, files: SourceFiles, known: Mapping[str, IdCodes]) -> dict[str, IdCodes]:
        """Write a table and return the ids in it by column. `known`: by column, the ids that its rows may have."""
        columns_of = cast(ColumnsOf, self.interaction_columns if table == "interactions" else self.entity_columns)
        ids: dict[str, IdCodes] = {}

        def batches() -> Iterator[tuple[Path, pa.RecordBatch]]:
            first = None
            for batch in read_source(files, self.source, table, self.note):
                rows = pa.RecordBatch.from_pydict(columns_of(batch, table, files))
                first = first or (rows.schema, batch.file)
                rows = _alike(rows, batch.file, *first, table)
                rows = self._with_known(self._without_blanks(rows, files, table), files, known, batch.file)
                for column in ID_COLUMNS.values():
                    if column in rows.schema.names:
                        ids.setdefault(column, IdCodes(rows[column].type)).add(rows[column])
                yield batch.file, rows
                self.progress(batch.rows.num_rows, table)

        parts = batches()
        start = next(parts, None)
        if start is None:
            raise TableError(
                f"table {table}: its source files have no rows; expected at least one. Check `files` in the mapping."
            )
        first_file, first = start
        others = (rows for _, rows in parts)
        record = database.query_record(first_file, files.query) if files.query is not None else None
        write_parquet(chain([first], others), self.out / f"{table}.parquet", first.schema.with_metadata(record))
        self.judge_times(table)
        return ids

    def entity_columns(self, batch: SourceBatch, table: str, mapping: EntityMapping) -> dict[str, pa.Array]:
        id_column = ID_COLUMNS[table]
        columns = {id_column: self.ids_of(batch, id_column, mapping.id)}
        used = {mapping.id, mapping.created_at and mapping.created_at.column}
        if isinstance(mapping, settings.ItemMapping):
            columns["title"] = batch.typed(mapping.title, pa.string())
            used.add(mapping.title)
        attributes = mapping.attributes
        if attributes is None:
            others = [name for name in batch.rows.schema.names if name not in used]
            for name in filter(is_unnamed, others):
                self.note(
                    f"table {table}: the column {name!r} has no real name, like row numbers that pandas writes or the "
                    "end of lines with a last delimiter, and is left out; list it under `attributes` to keep it"
                )
            attributes = {name: settings.SourceColumn(column=name) for name in others if not is_unnamed(name)}
        for name, source in attributes.items():
            if name in columns or name == CREATED_AT:
                advice = "name the `attributes` that you want" if mapping.attributes is None else "name it otherwise"
                advice += ", or set `created_at`" if name == CREATED_AT and mapping.created_at is None else ""
                raise ConfigError(f"the mapping: {table}.{name} cannot be an attribute, as runs read it; {advice}.")
            columns[name] = batch.attribute(source)
        if mapping.created_at is not None:
            columns[CREATED_AT] = self.times_of(batch, table, mapping.created_at)
        return columns

    def interaction_columns(self, batch: SourceBatch, table: str, mapping: InteractionMapping) -> dict[str, pa.Array]:
        columns = {
            "user_id": self.ids_of(batch, "user_id", mapping.user_id),
            "item_id": self.ids_of(batch, "item_id", mapping.item_id),
            "timestamp": self.times_of(batch, table, mapping.timestamp),
        }
        kinds = {"rating": (mapping.rating, pa.float64()), "event": (mapping.event, pa.string())}
        return columns | {name: batch.typed(of, kind) for name, (of, kind) in kinds.items() if of is not None}

    def _without_blanks(self, rows: pa.RecordBatch, files: SourceFiles, table: str) -> pa.RecordBatch:
        for column in files.drop_without:
            names = rows.schema.names
            if column not in names:
                raise ConfigError(
                    f"the mapping, {table}.drop_without: the table has no column {column!r}; {nearest(column, names)}"
                )
            rows = self._filtered(rows, pc.invert(blank(rows[column])), f"{table} without {column}")
        return rows

    def _with_known(
        self, rows: pa.RecordBatch, files: SourceFiles, known: Mapping[str, IdCodes], file: Path
    ) -> pa.RecordBatch:
        for column, ids in known.items():
            if rows[column].type != ids.kind:
                raise TableError(
                    f"{file}: {column} is {rows[column].type}, but {ids.kind} in the table that lists them. "
                    f"Set `ids: {{{column}: {ids.kind}}}` in the mapping."
                )
            if isinstance(files, InteractionMapping) and files.drop_unknown:
                is_known = pa.array(ids.find(rows[column]) >= 0)
                if column not in self.unknown:
                    self.unknown[column] = _Unknown(ids.values().slice(0, NUM_EXAMPLES).to_pylist())
                unknown = self.unknown[column]
                unknown.num_rows += len(is_known)
                others = pc.unique(rows[column].filter(pc.invert(is_known))).slice(0, NUM_EXAMPLES).to_pylist()
                unknown.examples = list(dict.fromkeys([*unknown.examples, *others]))[:NUM_EXAMPLES]
                rows = self._filtered(rows, is_known, f"interactions of unknown {column}")
        return rows

    def require_known(self, mapping: InteractionMapping) -> None:
        """Note ids of interactions that are in no table. Raises TableError if they are more than the mapping allows."""
        for column, unknown in self.unknown.items():
            num_unknown = self.dropped[f"interactions of unknown {column}"]
            found = (
                f"table interactions: {num_unknown:,} of {unknown.num_rows:,} rows have a {column} that is in "
                f"no table, such as {', '.join(map(repr, unknown.examples))}; the table with its column {column} has "
                f"ids such as {', '.join(map(repr, unknown.listed))}"
            )
            if num_unknown > mapping.max_unknown_share * unknown.num_rows:
                raise TableError(
                    f"{found}. Write the ids alike; or, to leave out so many rows, raise `max_unknown_share` (now "
                    f"{mapping.max_unknown_share:g}) under `interactions` in the mapping."
                )
            if num_unknown:
                self.note(f"{found}. These rows are left out; if the ids should match, write them alike")

    def _filtered(self, rows: pa.RecordBatch, mask: pa.Array, rule: str) -> pa.RecordBatch:
        remaining = rows.filter(mask)
        self.dropped[rule] += rows.num_rows - remaining.num_rows
        return remaining


def _alike(rows: pa.RecordBatch, file: Path, first: pa.Schema, first_file: Path, table: str) -> pa.RecordBatch:
    """The rows in the types of the first rows. Raises TableError for other columns, or values that a type changes."""
    if rows.schema == first:
        return rows
    of_rows, alike = dict(zip(rows.schema.names, rows.columns, strict=True)), {}
    for column in dict.fromkeys([*first.names, *of_rows]):
        try:
            values = widened(of_rows[column], first.field(column).type)
            cast = values.cast(first.field(column).type)
            if cast.type not in (values.type, pa.string()):
                back = widened(cast, values.type).cast(values.type)
                if plain_column(back) != plain_column(values):
                    raise pa.ArrowInvalid("not exact")
            alike[column] = cast
        except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
            kinds = [schema.field(column).type if column in schema.names else "not" for schema in (rows.schema, first)]
            raise TableError(
                f"table {table}: column {column!r} is {kinds[0]} in {file}, {kinds[1]} in {first_file}. Write the "
                "files alike, or set its `type` (for ids, `ids`) or only columns of all files as `attributes` in the "
                "mapping."
            ) from None
    return pa.record_batch(alike, schema=first)
