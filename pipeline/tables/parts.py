"""The Parquet files of a table, read with the columns in the names of their folders (Hive partitions).

A column that is both in a file and in the name of its folder must have one value there. `layout.py` lists folders.
"""

import datetime
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.storage.atomic import REPLACED_SUFFIX, folders_beside
from laserbatch.pipeline.tables import fetched, layout
from laserbatch.pipeline.tables.findings import FaultyTable, Finding, shown_value, unreadable
from laserbatch.pipeline.tables.schema import TABLE_NAMES, in_unit

BATCH_ROWS = 64 * 1024
SMALL_ROWS = 4096  # with fewer rows, starting threads takes longer than reading them in one
_INTEGER, _NUMBER = re.compile(r"-?(0|[1-9][0-9]*)"), re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")


@dataclass(frozen=True)
class TablePart:
    """One file of a table; reading it raises FaultyTable if it is damaged.

    It is open only while it is read, since a process may not open as many files as a table has. `name`: what messages
    call it. `partitions`: the value of each column in the names of its folders. `units`: by column, the unit of integer
    times other than seconds, which `batches` and `read` return as timestamps.
    """

    path: Path
    table: str
    name: str
    partitions: Mapping[str, pa.Scalar] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    @cached_property
    def _footer(self) -> tuple[pq.FileMetaData, pa.Schema]:
        with self._opened() as file:
            return file.metadata, file.schema_arrow

    @property
    def metadata(self) -> pq.FileMetaData:
        return self._footer[0]

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the file, followed by those of its folders."""
        return self.schema_of(self._footer[1])

    @property
    def doubled(self) -> frozenset[str]:
        """The columns that are both in the file and in the names of its folders."""
        return frozenset(self._footer[1].names) & self.partitions.keys()

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Turn errors of Arrow or the disk in the block into a FaultyTable that names the file and its table."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise FaultyTable(unreadable(self.table, self.name, error)) from None

    @contextmanager
    def _opened(self, metadata: pq.FileMetaData | None = None) -> Iterator[pq.ParquetFile]:
        with self.naming_errors(), pq.ParquetFile(
            self.path,
            metadata=metadata,
            pre_buffer=False,  # Arrow would keep what it reads ahead in memory until the whole file has been read
            page_checksum_verification=True,
            coerce_int96_timestamp_unit="us",  # as nanoseconds, 9999-12-31 of Spark would wrap around to 1816
        ) as file:  # fmt: skip
            yield file

    def with_partitions(self, rows: pa.RecordBatch, first_row: int, names: Sequence[str]) -> pa.RecordBatch:
        """Rows of the file, which begin at `first_row`, with the columns `names`, also those of its folders.

        Raises FaultyTable if a column has another value in the file than in the name of its folder.
        """
        if not self.partitions:
            return rows
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        for name, value in self.partitions.items():
            if name in columns:
                self._require_equal(name, columns[name], first_row)
            elif name in names:
                is_null = not value.is_valid
                columns[name] = pa.nulls(rows.num_rows, value.type) if is_null else pa.repeat(value, rows.num_rows)
        fields = self.schema_of(rows.schema)
        return pa.record_batch([columns[name] for name in names], schema=pa.schema([fields.field(n) for n in names]))

    def schema_of(self, schema: pa.Schema) -> pa.Schema:
        """The columns of a file, followed by those of its folders that it does not have itself."""
        for name, value in self.partitions.items():
            if name not in schema.names:
                schema = schema.append(pa.field(name, value.type))
        return schema

    def _require_equal(self, name: str, values: pa.Array, first_row: int) -> None:
        expected = self.partitions[name]
        plain = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
        try:
            is_equal = pc.equal(plain, expected.cast(plain.type)) if expected.is_valid else pc.is_null(plain)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            is_equal = pa.nulls(len(plain), pa.bool_())
        is_equal = pc.fill_null(is_equal, False)
        if not pc.all(is_equal, min_count=0).as_py():
            row = pc.index(is_equal, False).as_py()
            found, shown = "the row's value differs from the name of its folder:", repr(shown_value(expected))
            advice = "rename the folder, or drop the column from the file"
            place = name, self.name, first_row + row, shown_value(plain[row])
            raise FaultyTable(Finding("partition-differs", self.table, found, shown, advice, *place, num_rows=1))

    def batches(self, columns: Collection[str] | None = None, batch_size: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """The rows of the file, with all columns or those in `columns` that it has."""
        names = [name for name in self.schema.names if columns is None or name in columns]
        stored, in_file, first_row = None, self._footer[1].names, 0
        if columns is not None:  # a batch without columns has no rows, so the first column is read for their number
            stored = [name for name in names if name in in_file] or in_file[:1]
        for rows in self._stored_batches(batch_size, stored):
            batch = self.with_partitions(rows, first_row, names)
            for name in self.units.keys() & set(names):
                values = in_unit(batch[name], self.units[name])
                batch = batch.set_column(batch.schema.get_field_index(name), name, values)
            first_row += rows.num_rows
            yield batch

    def _stored_batches(self, batch_size: int, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """The rows in batches that become smaller where a list column has more than 2 GiB, which Arrow cannot read."""
        num_read, is_large = 0, self.metadata.num_rows > SMALL_ROWS
        with self._opened(self.metadata) as file:
            while True:
                try:
                    first_row = 0
                    for rows in file.iter_batches(batch_size, columns=columns, use_threads=is_large):
                        num_old = min(max(num_read - first_row, 0), rows.num_rows)
                        first_row += rows.num_rows
                        if num_old < rows.num_rows:
                            num_read = first_row
                            yield rows.slice(num_old)
                    return
                except pa.ArrowNotImplementedError:
                    if batch_size == 1:
                        raise
                    batch_size //= 2

    def read(self, names: Sequence[str], mask: pa.Array | None = None) -> dict[str, pa.ChunkedArray]:
        """Columns of all rows, or of those in a mask; nulls if the file does not have a column."""
        batches = list(self.batches(names))
        num_rows, columns = self.metadata.num_rows if mask is None else mask.true_count, {}
        for name in names:
            if self.schema.get_field_index(name) < 0:
                columns[name] = pa.chunked_array([pa.nulls(num_rows)])
                continue
            values = pa.chunked_array([rows[name] for rows in batches] or [pa.nulls(0, self.schema.field(name).type)])
            columns[name] = values if mask is None else values.filter(mask)
        return columns


def typed_parts(
    files: Sequence[layout.ListedFile], table: str, as_text: bool = False, root: Path | None = None
) -> list[TablePart]:
    """The files of a table as parts, named by their whole paths, or within the folder `root` of the tables.

    A partition column has the same type in all of them; text if `as_text`.
    """
    texts: dict[str, list[str]] = {}
    for file in files:
        for name, text in file.partitions.items():
            texts.setdefault(name, []).extend([] if text is None else [text])
    kinds = {name: pa.string() if as_text else partition_type(of_name) for name, of_name in texts.items()}
    parts = []
    for file in files:
        values = {name: pa.scalar(text, pa.string()).cast(kinds[name]) for name, text in file.partitions.items()}
        name = fetched.shown_path(file.path)
        if root is not None:  # a current version (`versioned.py`) counts as lying in it
            within = root if file.path.is_relative_to(root) else file.path.parents[1]
            name = file.path.relative_to(within).as_posix()
        parts.append(TablePart(file.path, table, name, values))
    return parts


def partition_type(texts: Sequence[str]) -> pa.DataType:
    """The type of a partition column: a number or a day only if no value loses a character by it, otherwise text."""
    if texts and all(_INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63 for text in texts):
        return pa.int64() if all(str(int(text)) == text for text in texts) else pa.string()
    if texts and all(_NUMBER.fullmatch(text) and repr(float(text)) in (text, f"{text}.0") for text in texts):
        return pa.float64()
    return pa.date32() if texts and all(map(_is_day, texts)) else pa.string()


def _is_day(text: str) -> bool:
    with suppress(ValueError):
        return datetime.date.fromisoformat(text).isoformat() == text
    return False


def tables_folder(path: Path | str) -> Path:
    """The local folder of tables, or of the local copy of tables at a URI. Raises TableError if it is not there."""
    path = fetched.local_tables(path, TABLE_NAMES)
    if not path.is_dir():
        found = f"{fetched.shown_path(path)} is not {'a folder' if path.exists() else 'there'}"
        expected, advice = "a folder with the tables users, items and interactions", "check the path"
        if replaced := folders_beside(path, REPLACED_SUFFIX):
            advice = f"a command that replaced them was killed: give it again, or move {replaced[-1]} to {path}"
        raise FaultyTable(Finding("missing-table", "tables", found, expected, advice))
    return path


def require_only_tables(folder: Path) -> None:
    """Refuse to replace a folder that holds anything other than the files of an import, one for each table."""
    expected = {f"{name}.parquet" for name in TABLE_NAMES}
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in expected or not path.is_file())
    if foreign:
        names = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise TableError(f"{folder} has {names}, and only tables are replaced. Give another folder, or move them away.")


def list_table(root: Path | str, table: str) -> layout.Listing:
    """The Parquet files of a table (for a URI, of its local copy), and the files of its folder that are left out.

    Raises FaultyTable if there is neither `<table>.parquet` nor a folder `<table>` with Parquet files, or if there are
    both, and like `list_folder`.
    """
    root = fetched.local_tables(root, TABLE_NAMES)
    file, folder = root / f"{table}.parquet", root / table
    # Spark and others make a folder named users.parquet.
    folders = [path for path in (folder, file) if path.is_dir()]
    others = [root / f"{name}{suffix}" for name in TABLE_NAMES if name != table for suffix in ("", ".parquet")]
    siblings = [other for other in others if other.is_dir()]
    try:
        listings = [layout.list_folder(path, table, siblings=siblings) for path in folders]
    except OSError as error:
        raise FaultyTable(unreadable(table, fetched.shown_path(folders[0]), error)) from None
    with_rows = [layout.Listing([layout.ListedFile(file)], {})] if file.is_file() else []
    with_rows += [listing for listing in listings if listing.files]
    if len(with_rows) > 1:
        found = f"both {fetched.shown_path(file)} and {fetched.shown_path(folder)} exist"
        raise FaultyTable(Finding("missing-table", table, found, "one of them", "remove the other"))
    if not with_rows:
        found = f"{fetched.shown_path(folders[-1])} has no .parquet files" if folders else "the table is missing"
        if not folders and (near := sorted(path.name for path in root.glob(f"*{table}*"))):
            found += f"; files with similar names are {', '.join(near)}"
        found = "; ".join([found, *(text for listing in listings for text in layout.name_left_out(listing.left_out))])
        at, advice = fetched.shown_path(root / table), "write it there, or make it with `laserbatch data import`"
        expected = f"{at}.parquet or {at}/*.parquet"
        raise FaultyTable(Finding("missing-table", table, found, expected, advice))
    return with_rows[0]


def table_parts(root: Path | str, table: str) -> list[TablePart]:
    """The Parquet files of a table with the columns of their folders. Raises FaultyTable like `list_table`."""
    return typed_parts(list_table(root, table).files, table)
