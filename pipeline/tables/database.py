"""Rows of a query to a DuckDB or SQLite file, streamed as Arrow batches.

The file is opened for reading only. DuckDB files are read by their own library (the extra `duckdb`), which may fetch no
extension here, and SQLite files by Python's `sqlite3`. A column of SQLite has no type; its values give it one.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa

from laserbatch.pipeline.errors import first_line
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.pipeline.tables.findings import FaultyTable, Finding

BATCH_ROWS = 16 * 1024
NOT_A_QUERY = "expected one SELECT statement"
QUERY_KEY = b"laserbatch.query"  # of a Parquet file's metadata
_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}


def query_record(path: Path, query: str) -> dict[bytes, bytes]:
    """The metadata of a Parquet file that is made from a query: the name of the database and the query's SHA-256."""
    record = {"database": path.name, "query_sha256": hashlib.sha256(query.encode()).hexdigest()}
    return {QUERY_KEY: json.dumps(record).encode()}


def query_rows(path: Path, query: str, table: str) -> Iterator[pa.RecordBatch]:
    """The rows of a query in batches, at least one row.

    Raises FaultyTable where the file is no DuckDB or SQLite database, the library is missing, the query fails or
    returns no rows, or a column of SQLite holds values of several types.
    """
    num_rows = 0
    try:
        with path.open("rb") as file:
            head = file.read(16)
        if head == b"SQLite format 3\0":
            batches = _sqlite_rows(path, query, table)
        elif head[8:12] == b"DUCK":
            batches = _duckdb_rows(path, query)
        else:
            raise _refused(path, table, "is neither a DuckDB nor an SQLite file", "correct `database` in the mapping")
        for batch in batches:
            num_rows += batch.num_rows
            if batch.num_rows:
                yield batch
    except FaultyTable:
        raise
    except ImportError as error:
        found = f"is a DuckDB file, which is read with duckdb ({first_line(error)})"
        raise _refused(path, table, found, "pip install 'laserbatch[duckdb]'") from None
    except Exception as error:  # duckdb's errors have no class that is known without the library
        found = f"cannot be asked ({first_line(error)})"
        raise _refused(path, table, found, "correct `database` or `query` in the mapping") from None
    if not num_rows:
        raise _refused(path, table, "has no rows for the query", "correct `query` in the mapping")


def _duckdb_rows(path: Path, query: str) -> Iterator[pa.RecordBatch]:
    import duckdb

    with ScratchFolder("query") as spilled:
        options = {"temp_directory": str(spilled), "autoinstall_known_extensions": False}
        with duckdb.connect(str(path), read_only=True, config={**options}) as database:
            if [part.type for part in database.extract_statements(query)] != [duckdb.StatementType.SELECT]:
                raise ValueError(NOT_A_QUERY)  # COPY would write a file
            yield from database.sql(query).to_arrow_reader(BATCH_ROWS)


def _sqlite_rows(path: Path, query: str, table: str) -> Iterator[pa.RecordBatch]:
    uri = f"{path.resolve().as_uri()}?mode=ro"
    # The first rows are asked for by another thread than the next ones (`write_parquet`).
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)) as database:
        database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # ATTACH would make a file
        database.execute("BEGIN")  # the query is asked twice, of one state of the database
        schema = _sqlite_schema(database.execute(query), path, table)
        for rows in _fetched(database.execute(query)):
            columns = [
                pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), schema.types, strict=True)
            ]
            yield pa.record_batch(columns, schema=schema)


def _sqlite_schema(cursor: sqlite3.Cursor, path: Path, table: str) -> pa.Schema:
    """The type that all values of a column have; float64 of a column that has whole numbers among others."""
    if cursor.description is None:
        raise ValueError(NOT_A_QUERY)
    names = [column[0] for column in cursor.description]
    first_of: list[dict[type, tuple[int, object]]] = [{} for _ in names]  # type -> row and value
    first_row = 0
    for rows in _fetched(cursor):
        for name, first_of_kind, values in zip(names, first_of, zip(*rows, strict=True), strict=True):
            for kind in dict.fromkeys(map(type, values)):
                if kind is not type(None) and kind not in first_of_kind:
                    row = next(row for row, value in enumerate(values) if type(value) is kind)
                    first_of_kind[kind] = first_row + row, values[row]
                    if len(first_of_kind) > 1 and first_of_kind.keys() != {int, float}:
                        raise _mixed(path, table, name, *first_of_kind.values())
        first_row += len(rows)
    kinds = [float if float in first_of_kind else next(iter(first_of_kind), None) for first_of_kind in first_of]
    return pa.schema([(name, _TYPES[kind] if kind else pa.null()) for name, kind in zip(names, kinds, strict=True)])


def _fetched(cursor: sqlite3.Cursor) -> Iterator[list[tuple]]:
    return iter(lambda: cursor.fetchmany(BATCH_ROWS), [])


def _mixed(path: Path, table: str, column: str, first: tuple[int, object], other: tuple[int, object]) -> FaultyTable:
    (first_row, first_value), (row, value) = first, other
    found = f"the value has another type than that of row {first_row} ({first_value!r}):"
    advice = f"correct the row, or write `CAST({column} AS TEXT) AS {column}` in the query"
    expected = "values of one type in a column"
    return FaultyTable(
        Finding("mixed-types", table, found, expected, advice, column, str(path), row, value, num_rows=1)
    )


def _refused(path: Path, table: str, found: str, advice: str) -> FaultyTable:
    expected = "a query that returns rows of a DuckDB or SQLite file"
    return FaultyTable(Finding("database", table, f"{path} {found}", expected, advice))
