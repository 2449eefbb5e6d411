"""Checks of the input tables, which find all faults before any work starts.

Every file is read once, in batches; only the distinct ids of entities are held in memory. `columns.py` has the rules
for values and columns, this module the rules between rows, files and tables. Nothing is repaired.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables import schema as sc
from laserbatch.pipeline.tables.columns import ATTRIBUTE, CREATED, ID, RATING_OF_EVENT, TIME, role_of, schema_findings
from laserbatch.pipeline.tables.findings import FaultyTable, Finding, Findings, count_faults
from laserbatch.pipeline.tables.layout import name_left_out
from laserbatch.pipeline.tables.parts import TablePart, list_table, tables_folder, typed_parts
from laserbatch.pipeline.tables.times import infer_units
from laserbatch.retrieval_pools.ids import IdCodes

BATCH_ROWS = 256 * 1024
NUM_FINDINGS_IN_ERROR = 3
MAX_UNKNOWN_SHARE = 0.5  # share of interactions; some may lack a rating, or their user or item, but not most


def check_tables(
    path: Path | str,
    positive_rating: float | None = None,
    max_failed_share: float = 0.0,
    logged_ids: Mapping[str, pa.ChunkedArray] | None = None,
) -> list[Finding]:
    """All findings about the tables of a folder; a run can start if they are all warnings.

    Parameters
    ----------
    positive_rating : ratings on both sides of it are expected; None: no check.
    max_failed_share : largest share of items that may lack a title.
    logged_ids : `Tables.logged_ids`, if they have been read. A column of ids is then read again only if one of them
        is faulty or unknown.
    """
    try:
        path, findings = tables_folder(path), Findings()
    except FaultyTable as error:
        return [error.finding]
    known_ids = {table: _check_entities(path, table, findings, max_failed_share) for table in sc.ID_COLUMNS}
    _check_interactions(path, known_ids, findings, positive_rating, logged_ids)
    return findings.to_list()


def require_sound(findings: list[Finding], path: Path | str) -> None:
    """Raise a TableError with the first faults among the findings of `check_tables` at a path, if there are any."""
    faults = [finding for finding in findings if not finding.is_warning]
    if faults:
        num = count_faults(faults)
        shown = "\n".join(f"  {finding}" for finding in faults[:NUM_FINDINGS_IN_ERROR])
        advice = f"; `laserbatch data check {path}` lists all" if len(faults) > NUM_FINDINGS_IN_ERROR else ""
        raise TableError(f"{num:,} fault{'s' * (num > 1)} in the tables of {path}{advice}:\n{shown}")


@dataclass(frozen=True)
class _Part:
    """One file of a table. `usable`: its columns of an accepted type; none for a file that cannot be read."""

    file: TablePart
    num_rows: int
    usable: Mapping[str, pa.DataType]


def _check_entities(path: Path, table: str, findings: Findings, max_failed_share: float) -> IdCodes | None:
    """Check users or items. Returns their ids, or None if some cannot be read or the files differ in their type."""
    id_column = sc.ID_COLUMNS[table]
    parts = list(_open_parts(path, table, findings))
    kinds = [sc.id_type(part.usable[id_column]) for part in parts if id_column in part.usable]
    ids_there = IdCodes(kinds[0]) if len(kinds) == len(parts) and len(set(kinds)) == 1 else None
    repeated: list[tuple[Finding, np.ndarray, int, pa.Array]] = []
    for part in parts:
        for first_row, batch in _checked_batches(part, findings):
            if ids_there is None:
                continue
            ids, num_before = batch[id_column].cast(ids_there.kind, safe=False), len(ids_there)
            codes = ids_there.add(ids)
            # A new id has the next code.
            highest = np.maximum.accumulate(np.concatenate([[num_before - 1], codes]))[:-1]
            rows = np.flatnonzero((codes >= 0) & (codes <= highest))
            finding = Finding("duplicate-id", table, "the id is there already:", "each id once",
                              "remove or merge the rows", id_column, part.file.name)  # fmt: skip
            if len(rows):
                repeated.append((finding, rows, first_row, ids))
    num_rows = sum(part.num_rows for part in parts)
    findings.stop_where("null-title", max_failed_share * num_rows)
    for of_batch in repeated:
        findings.add_rows(*of_batch)
    return ids_there


def _check_interactions(
    path: Path, known_ids: dict[str, IdCodes | None], findings: Findings, positive_rating: float | None,
    logged_ids: Mapping[str, pa.ChunkedArray] | None,
) -> None:  # fmt: skip
    lowest, highest, is_rated = math.inf, -math.inf, True
    sound = {
        column for table, column in sc.ID_COLUMNS.items()
        if logged_ids and (ids := known_ids[table]) is not None and _are_sound(logged_ids[column], ids)
    }  # fmt: skip
    listed = {  # they may have blanks at the end, say, which an unknown id does not show
        table: f"ids of {table}, such as {', '.join(map(repr, ids.values()[:3].to_pylist()))}"
        for table, ids in known_ids.items() if ids is not None and sc.ID_COLUMNS[table] not in sound
    }  # fmt: skip
    num_rows = 0
    for part in _open_parts(path, "interactions", findings):
        num_rows += part.num_rows
        is_rated = "rating" in part.file.schema.names if part.usable else is_rated
        comparable: dict[str, tuple[str, IdCodes]] = {}  # column of interactions -> its entity table and its ids
        for table, column in sc.ID_COLUMNS.items():
            if (ids_of_table := known_ids[table]) is None or column not in part.usable:
                continue
            if (kind := sc.id_type(part.usable[column])) == ids_of_table.kind:
                comparable[column] = table, ids_of_table
                continue
            found = f"the column is of type {kind}, but {table}.{column} is of type {ids_of_table.kind}"
            advice = "write ids of one type, or set `ids` in the mapping of `laserbatch data import`"
            findings.add(Finding("types-differ", "interactions", found, "one type", advice, column, part.file.name))
        for first_row, batch in _checked_batches(part, findings, sound):
            for column, (table, ids_of_table) in comparable.items():
                if column in sound:
                    continue
                values = batch[column].cast(ids_of_table.kind, safe=False)
                rows = np.flatnonzero(values.is_valid().to_numpy(False) & (ids_of_table.find(values) < 0))
                found = f"{table} has no such {column}:"
                advice = f"runs leave such rows out, if they are at most half; add the id to {table}, or drop the row"
                finding = Finding("unknown-entity", "interactions", found, listed[table], advice, column,
                                  part.file.name, is_warning=True)  # fmt: skip
                findings.add_rows(finding, rows, first_row, values)
            if "rating" in part.usable:
                extremes = pc.min_max(batch["rating"].cast(pa.float64(), safe=False)).as_py()
                if extremes["min"] is not None:
                    lowest, highest = min(lowest, extremes["min"]), max(highest, extremes["max"])
    for kind in ("unknown-entity", "no-rating"):
        findings.stop_where(kind, MAX_UNKNOWN_SHARE * num_rows)
    if positive_rating is not None:
        _check_classes(lowest, highest, is_rated, positive_rating, findings)


def _are_sound(ids: pa.ChunkedArray, known: IdCodes) -> bool:
    """Whether ids obey the rules and are all among the known ones."""
    return ids.type == known.kind and all(
        (known.find(chunk) >= 0).all() and not any(pc.any(rule.broken(chunk)).as_py() for rule in ID.rules)
        for chunk in ids.chunks
    )


def _check_classes(lowest: float, highest: float, is_rated: bool, positive_rating: float, findings: Findings) -> None:
    """Warn if no CTR model can be trained, because all interactions are of one class."""
    expected = f"ratings on both sides of {positive_rating:g} (ctr.label)"
    what_then = "otherwise no CTR models are trained"
    if not is_rated:
        advice = "set ctr.label to `all`, which samples negatives, or to a rule on another column, such as "
        advice += f"`event == 'purchase'`; {what_then}"
        findings.add(Finding("one-class", "interactions", "there is no column `rating`", expected, advice,
                             is_warning=True))  # fmt: skip
    elif lowest <= highest and not lowest < positive_rating <= highest:
        found = f"all ratings are from {lowest:g} to {highest:g}" if lowest < highest else f"all ratings are {lowest:g}"
        advice = f"set ctr.label (to `rating >= 1` for 0/1 clicks); {what_then}"
        findings.add(Finding("one-class", "interactions", found, expected, advice, "rating", is_warning=True))


def _open_parts(path: Path, table: str, findings: Findings) -> Iterator[_Part]:
    """Open a table's files, and add findings about their schemas."""
    try:
        listing = list_table(path, table)
    except FaultyTable as error:
        findings.add(error.finding)
        return
    for sentence in name_left_out(listing.left_out):
        expected, advice = "only Parquet files with rows", "move them away, or write them like the other files"
        findings.add(Finding("left-out", table, sentence, expected, advice, is_warning=True))
    files = typed_parts(listing.files, table, root=path)
    findings.add(*infer_units(files))
    kinds_of, has_rows = {}, False
    for file in files:
        try:
            schema, num_rows = file.schema, file.metadata.num_rows
        except FaultyTable as error:
            findings.add(error.finding)
            yield _Part(file, 0, {})
            has_rows = True  # perhaps
            continue
        has_rows |= num_rows > 0
        faults = schema_findings(table, file.name, schema)
        findings.add(*faults)
        if any(fault.kind == "duplicate-column" for fault in faults):
            yield _Part(file, num_rows, {})
            continue
        for column in filter(sc.is_unnamed, schema.names if table in sc.ID_COLUMNS else ()):
            found = "the column has no name, like row numbers that pandas writes, and is not read"
            advice = "name it, or drop it"
            findings.add(Finding("unnamed", table, found, "a name", advice, column, file.name, is_warning=True))
        read = [field for field in schema if role_of(table, field.name) is not None]
        kinds_of[file.name] = {field.name: _compared_type(table, field) for field in read}
        faulty = {fault.column for fault in faults}
        yield _Part(file, num_rows, {field.name: field.type for field in schema if field.name not in faulty})
    findings.add(*_differences(table, kinds_of))
    if not has_rows:
        findings.add(Finding("empty-table", table, "the table has no rows", "at least one", "write the table again"))


def _differences(table: str, kinds_of: Mapping[str, Mapping[str, str | None]]) -> Iterator[Finding]:
    """Findings about columns and types in which files differ from those before them; `kinds_of`: by file and column."""
    advice = "write all files of a table with the same columns and types"
    typed: dict[str, tuple[str, str]] = {}  # column -> the first file with a type, and the type
    for name, kinds in kinds_of.items():
        first, columns = next(iter(kinds_of.items()))
        for column in sorted((kinds.keys() ^ columns.keys()).difference(sc.REQUIRED_COLUMNS[table])):
            found = f"the column is {'not in' if column in kinds else 'missing, but it is in'} {first}"
            yield Finding("columns-differ", table, found, "the same columns", advice, column, name)
        for column, kind in kinds.items():
            other, of_other = typed.setdefault(column, (name, kind)) if kind is not None else (name, kind)
            if kind != of_other:
                found = f"the column holds {kind}, but {of_other} in {other}"
                yield Finding("types-differ", table, found, "one type", advice, column, name)


def _compared_type(table: str, field: pa.Field) -> str | None:
    """The kind of type that a column must have in all files; None if it agrees with any."""
    if pt.is_null(field.type) or role_of(table, field.name) in (TIME, CREATED):
        return None
    kind = sc.plain_type(field.type)
    return "numbers" if pt.is_integer(kind) or pt.is_floating(kind) else str(kind)


def _checked_batches(
    part: _Part, findings: Findings, sound: Collection[str] = ()
) -> Iterator[tuple[int, dict[str, pa.Array]]]:
    """Apply the rules for single values, except to `sound` columns; yields the first row's number and values by column.

    Damage to the file that shows only now becomes a finding.
    """
    columns, first_row, table = [], 0, part.file.table
    for name, kind in part.usable.items():
        role = role_of(table, name)
        is_ruled = role is not ATTRIBUTE or not (pt.is_integer(kind) or pt.is_boolean(kind) or pt.is_decimal(kind))
        if role is not None and (is_ruled or name in part.file.doubled) and name not in sound:
            columns.append(name)
    if not columns:
        return
    try:
        for batch in part.file.batches(columns, BATCH_ROWS):
            values = {name: _decoded(batch.column(name)) for name in batch.schema.names}
            for column, array in values.items():
                role = RATING_OF_EVENT if column == "rating" and "event" in values else role_of(table, column)
                assert role is not None
                for rule in role.rules:
                    rule.check(table, column, part.file.name, first_row, array, findings)
            yield first_row, values
            first_row += batch.num_rows
    except FaultyTable as error:  # damage to the file that shows only now
        findings.add(error.finding)


def _decoded(column: pa.Array) -> pa.Array:
    if pt.is_null(column.type):  # pandas writes a column of None so
        return column.cast(pa.string())
    column = column.dictionary_decode() if pt.is_dictionary(column.type) else column
    return column.cast(pa.string()) if pt.is_string_view(column.type) else column  # Arrow cannot trim a view
