"""Reading of the input tables as they were known at the end of a day, in plain types.

Only the columns and rows that are kept are read: the cut by date is applied while scanning. `check.py` checks rows.
"""

import datetime
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import sha256_file
from laserbatch.pipeline.tables import log as logs
from laserbatch.pipeline.tables import schema as sc
from laserbatch.pipeline.tables.columns import role_of
from laserbatch.pipeline.tables.database import QUERY_KEY
from laserbatch.pipeline.tables.part_columns import (
    names_in,
    open_parts,
    plain_batches,
    plain_kinds,
    read_columns,
    read_table,
)
from laserbatch.pipeline.tables.parts import list_table, tables_folder, typed_parts
from laserbatch.pipeline.tables.personal import personal_data
from laserbatch.pipeline.tables.schema import id_type
from laserbatch.retrieval_pools.ids import rows_among
from laserbatch.retrieval_pools.mapped import MappedFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tables:
    """The three input tables in plain types: times are timestamp[us, UTC], ids int64 or string (large above 2 GiB)."""

    users: pa.Table  # in file order, like items
    items: pa.Table
    interactions: pa.Table  # sorted by time, user, item; ids dictionary-encoded, values ascending; one chunk per column
    scratch: MappedFiles = field(default_factory=lambda: MappedFiles(None))  # the files that hold the columns
    logged_ids: dict[str, pa.ChunkedArray] = field(default_factory=dict)  # by column, all ids of the log; null last
    num_copies: int = 0  # interactions left out as exact copies of another one
    personal: Mapping[Side, Mapping[str, str]] = field(default_factory=dict)  # result of `personal_data`
    _coded: dict[Side, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def entities(self, side: Side) -> pa.Table:
        return self.users if side == "user" else self.items

    def coded(self, side: Side) -> tuple[np.ndarray, np.ndarray]:
        """The code of each interaction's user or item, int32[n], and the row of each code's entity, int32.

        The last code means no id; row -1 means that the entity is not in its table. Raises TableError if id types
        differ.
        """
        if side not in self._coded:
            ids = self.interactions[f"{side}_id"]
            ids = logs.only_chunk(ids if pt.is_dictionary(ids.type) else ids.dictionary_encode())
            known = self.entities(side)[f"{side}_id"]
            kinds = id_type(ids.dictionary.type), id_type(known.type)
            if kinds[0] != kinds[1] and len(ids) and len(known):  # checks refuse such tables
                found = f"ids of type {kinds[0]}, but {side}s.{side}_id has type {kinds[1]}"
                raise TableError(f"interactions.{side}_id has {found}; write both in one type")
            rows = rows_among(ids.dictionary, known).astype(np.int32)
            self._coded[side] = logs.codes_of(ids), np.append(rows, np.int32(-1))
        return self._coded[side]


def read_tables(
    path: Path | str, as_of: datetime.date | None = None, scratch: Path | None = None, keep_duplicates: bool = False
) -> Tables:
    """Read the tables of a folder as known at the end of the day `as_of` (UTC); None: all rows.

    Entities are kept if they were created before the end of the day or have no `created_at`, interactions if they were
    before it and between kept entities. Of interactions that are equal in all columns read, only the first is kept
    unless `keep_duplicates`, and the number of copies is logged as a warning. The tables are memory-mapped from unnamed
    files in the folder `scratch`; None: in memory. Raises TableError if a table or column is missing, has a wrong type,
    or its file cannot be read.
    """
    path, cutoff = tables_folder(path), None if as_of is None else end_of_day(as_of)
    files = MappedFiles(scratch)
    users, items = (read_table(path, table, cutoff, files) for table in ("users", "items"))
    log, logged_ids = _read_log(path, cutoff, files, lambda name: role_of("interactions", name) is not None)
    # The log may have entities that left the tables, or interactions before their entity's own created_at.
    is_known = {}
    for name, entities in (("user_id", users), ("item_id", items)) if cutoff is not None else ():
        ids, known = log.dictionary(name), entities[name]
        if id_type(ids.type) == id_type(known.type):  # otherwise not comparable, as checks report
            is_known[name] = np.append(rows_among(ids, known) >= 0, False)
    num_left = num_copies = 0
    rows = log.rows()
    for block in logs.in_order(rows, MappedFiles(scratch)):
        is_left = np.ones(len(block["timestamp"]), bool) if keep_duplicates else ~logs.exact_copies(block)
        num_copies += int(np.count_nonzero(~is_left))
        for name, of_codes in is_known.items():
            is_left &= of_codes[block[name]]
        part = slice(num_left, num_left := num_left + int(np.count_nonzero(is_left)))
        for name, values in block.items():
            rows[name][part] = values[is_left]
    warn_of_copies(num_copies, log.num_rows)
    return Tables(
        users, items, log.to_table(num_left), files, logged_ids, num_copies, personal=personal_data(users, items)
    )


def end_of_day(date: datetime.date) -> pa.Scalar:
    """The moment at which a day (UTC) ends."""
    midnight = datetime.datetime.combine(date, datetime.time(), datetime.UTC)
    return pa.scalar(midnight + datetime.timedelta(days=1), sc.TIMESTAMP_TYPE)


def warn_of_copies(num_copies: int, num_rows: int) -> None:
    if num_copies:
        logger.warning(
            "%d of %d interactions are exact copies of others and are left out; set `tables.keep_duplicates: true` "
            "in the configuration to keep them", num_copies, num_rows,
        )  # fmt: skip


def find_exact_copies(path: Path | str, columns: Collection[str] = ()) -> np.ndarray:
    """Whether each interaction of a folder is an exact copy of an earlier one: bool[n], in file order.

    Rows are compared in the columns that `read_tables` reads and in the other columns `columns`.
    """
    path, memory = tables_folder(path), MappedFiles(None)
    log, _ = _read_log(path, None, memory, sc.REQUIRED_COLUMNS["interactions"].__contains__)
    run_of, num_before = np.full(log.num_rows, -1), 0  # row -> run of rows with the same moment, user and item
    for block in logs.in_order(log.rows() | {"row": np.arange(log.num_rows)}, memory):
        places, run_of_place = logs.alike(block)
        run_of[block["row"][places]] = num_before + run_of_place
        num_before += len(block["row"])
    is_copy = run_of >= 0
    if is_copy.any():
        keys, parts = [run_of[is_copy]], open_parts(path, "interactions")
        ends = np.cumsum([part.metadata.num_rows for part in parts])[:-1]
        masks = [pa.array(of_part) for of_part in np.split(is_copy, ends)]
        for name in names_in(parts, lambda name: name in ("event", "rating", *columns)):
            values = read_columns(parts, [name], masks)[name].combine_chunks()
            if pt.is_nested(values.type):
                values = pa.array(map(repr, values.to_pylist()))
            keys.append(values.dictionary_encode(null_encoding="encode").indices.to_numpy())
        is_copy[is_copy] = logs.equal_to_earlier(keys)
    return is_copy


def _read_log(
    path: Path, cutoff: pa.Scalar | None, files: MappedFiles, is_read: Callable[[str], bool]
) -> tuple[logs.StoredLog, dict[str, pa.ChunkedArray]]:
    """The interactions before a moment, in file order and with sorted id codes, and the result of `sort_ids`."""
    parts = open_parts(path, "interactions")
    kinds = plain_kinds(parts, names_in(parts, is_read))
    log = logs.StoredLog(kinds, sum(part.metadata.num_rows for part in parts), files)
    for batch in (batch for part in parts for batch in plain_batches(part, kinds)):
        if cutoff is not None:
            is_early = pc.fill_null(pc.less(batch["timestamp"], cutoff), False)
            if not pc.all(is_early, min_count=0).as_py():
                for name in sc.ID_COLUMNS.values():
                    log.see(name, batch[name].filter(pc.invert(is_early)))
                batch = batch.filter(is_early)
        log.append(dict(zip(kinds, batch.columns, strict=True)))
    return log, log.sort_ids()


def describe(path: Path | str) -> dict[str, dict]:
    """The manifest's `inputs`: for each table its `path` in the folder, `num_rows` and `sha256`.

    The hash of a file is that of its contents; the hash of a folder covers the names of its files and their hashes. A
    table that an import made from a query also has `database` and `query_sha256`.
    """
    path, described = tables_folder(path), {}
    for name in sc.TABLE_NAMES:
        parts = typed_parts(list_table(path, name).files, name, root=path)
        num_rows, record = 0, {}
        for part in parts:
            num_rows += part.metadata.num_rows
            record |= json.loads((part.metadata.metadata or {}).get(QUERY_KEY, b"{}"))
        top, *within = Path(parts[0].name).parts
        sha256 = sha256_file(parts[0].path)
        if within:
            lines = (f"{sha256_file(part.path)}  {part.name.removeprefix(f'{top}/')}\n" for part in parts)
            sha256 = hashlib.sha256("".join(lines).encode()).hexdigest()
        described[name] = record | {"path": top, "num_rows": num_rows, "sha256": sha256}
    return described
