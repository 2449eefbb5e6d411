"""Rows of a query to a DuckDB or SQLite file or to a PostgreSQL server, streamed as Arrow batches.

The database is only read: DuckDB files by the library `duckdb` (an extra), which must not download extensions here,
SQLite files by Python's `sqlite3`, servers through ADBC (the extra `postgresql`). A column of SQLite has no type; it
takes that of its values.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.errors import first_line
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.pipeline.tables.findings import FaultyTable, Finding

DAY_US = 86_400_000_000
BATCH_ROWS, BATCH_BYTES = 16 * 1024, 4 << 20  # rows per batch of a file, bytes per batch of a server
NOT_A_QUERY = "expected one SELECT statement"
SERVERS = ("postgresql://", "postgres://")
_MAX_DIGITS = 38  # most digits of a decimal128
QUERY_KEY = b"laserbatch.query"  # key in a Parquet file's metadata
_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}


def query_record(path: Path, query: str) -> dict[bytes, bytes]:
    """The metadata of a Parquet file made from a query: the name of the database and the query's SHA-256."""
    record = {"database": path.name, "query_sha256": hashlib.sha256(query.encode()).hexdigest()}
    return {QUERY_KEY: json.dumps(record).encode()}


def is_server(database: str) -> bool:
    """Whether a `database` of a mapping is the URI of a server, and not a file."""
    return database.startswith(SERVERS)


def shown_database(uri: str) -> Path:
    """The name of a server's database in messages and records: host and name, without user and options."""
    parts = urlsplit(uri)
    return Path(f"postgresql:{parts.hostname or ''}{parts.path}")


def query_rows(database: Path | str, query: str, table: str) -> Iterator[pa.RecordBatch]:
    """The rows of a query to a file, or to the server at a URI, in batches of at least one row.

    Raises FaultyTable if the file is no DuckDB or SQLite database, the library is missing, the query fails or returns
    no rows, the server goes away, or a column has values without an Arrow type.
    """
    num_rows = 0
    path = shown_database(database) if isinstance(database, str) else database
    try:
        for batch in _server_rows(database, query, table) if isinstance(database, str) else _rows(path, query, table):
            num_rows += batch.num_rows
            if batch.num_rows:
                yield batch
    except FaultyTable:
        raise
    except ImportError as error:
        kind, library = ("server", "ADBC") if isinstance(database, str) else ("DuckDB file", "duckdb")
        found = f"is a {kind}, which is read with {library} ({first_line(error)})"
        extra = "postgresql" if isinstance(database, str) else "duckdb"
        raise _refused(path, table, found, f"pip install 'laserbatch[{extra}]'") from None
    except Exception as error:  # the classes of the libraries' errors are unknown without them
        after = f" after {num_rows:,} rows" if num_rows else ""
        found = f"cannot be queried{after} ({first_line(error)})"
        advice = "correct `database` or `query` in the mapping"
        if isinstance(database, str):
            advice += ", check that the server runs and accepts the password in PGPASSWORD or PGPASSFILE, and try again"
        raise _refused(path, table, found, advice) from None
    if not num_rows:
        raise _refused(path, table, "returned no rows for the query", "correct `query` in the mapping")


def _rows(path: Path, query: str, table: str) -> Iterator[pa.RecordBatch]:
    with path.open("rb") as file:
        head = file.read(16)
    if head == b"SQLite format 3\0":
        return _sqlite_rows(path, query, table)
    if head[8:12] == b"DUCK":
        return _duckdb_rows(path, query)
    raise _refused(path, table, "is neither a DuckDB nor an SQLite file", "correct `database` in the mapping")


def _server_rows(uri: str, query: str, table: str) -> Iterator[pa.RecordBatch]:
    from adbc_driver_postgresql import StatementOptions
    from adbc_driver_postgresql.dbapi import connect

    query = query.rstrip("; \t\r\n") + "\n"  # ADBC writes `COPY (query) TO ...`, which a last comment would hide
    with connect(uri) as server, server.cursor() as cursor:
        for setting in ("TRANSACTION READ ONLY", "client_encoding TO 'UTF8'"):  # ADBC passes text on as it comes
            cursor.execute(f"SET {setting}")
        # The query is not run yet: COPY, which has no columns, would write a file even in a read-only transaction.
        schema = cursor.adbc_execute_schema(query)
        if not len(schema):
            raise ValueError(NOT_A_QUERY)
        # ADBC flattens an array of arrays. Only the server knows which arrays are such.
        lists = [field.name for field in schema if pt.is_list(field.type)]
        if lists:
            dims = ", ".join('array_ndims("{}")'.format(name.replace('"', '""')) for name in lists)
            query = f"SELECT *, {dims} FROM ({query}) AS rows"
        cursor.adbc_statement.set_options(**{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)})
        cursor.execute(query)
        for batch in cursor.fetch_record_batch():
            for name, num_dims in zip(lists, batch.columns[len(schema) :], strict=True):
                if (pc.max(num_dims).as_py() or 0) > 1:
                    raise _own_type(uri, table, name, "array of arrays")
            columns = [_plain(column, field, uri, table) for column, field in zip(batch.columns, schema, strict=False)]
            yield pa.record_batch(columns, names=schema.names)


def _plain(column: pa.Array, field: pa.Field, uri: str, table: str) -> pa.Array:
    """A column in Arrow's types: decimals as they are declared, `char(n)` without the blanks that fill it up.

    Raises FaultyTable for a type or value that ADBC does not give as it is.
    """
    metadata = field.metadata or {}
    kind = metadata.get(b"POSTGRESQL:type", b"unknown").decode()
    if kind == "bpchar":
        return pc.utf8_rtrim(column, " ")
    if kind == "oid":
        return column.view(pa.uint32())  # ADBC gives the upper half as negative numbers
    if kind == "_oid":
        raise _own_type(uri, table, field.name, "oid[]", "bigint[]")
    if kind in ("time", "_time"):
        times = column.flatten() if kind == "_time" else column
        if pc.any(pc.equal(times.cast(pa.int64()), DAY_US)).as_py():  # Arrow's times end before it
            raise _own_type(
                uri, table, field.name, "time and a value of 24:00:00", "text[]" if kind == "_time" else "text"
            )
    is_own = isinstance(field.type, pa.BaseExtensionType) and not isinstance(field.type, pa.UuidType | pa.JsonType)
    if not is_own and kind != "money":  # ADBC gives money as a count of cents
        return column
    declared = int(metadata.get(b"POSTGRESQL:typmod", b"-1")) - 4  # digits and scale, as PostgreSQL stores them
    if kind == "numeric" and declared >= 0 and declared >> 16 <= _MAX_DIGITS:
        numbers = pc.if_else(pc.equal(column.storage, "nan"), pa.scalar(None, pa.string()), column.storage)
        return numbers.cast(pa.decimal128(declared >> 16, declared & 0x7FF))
    plain = {"numeric": "double precision", "money": "numeric(20, 2)"}.get(kind, "text")
    raise _own_type(uri, table, field.name, f"{kind}{' of any number of digits' * (kind == 'numeric')}", plain)


def _own_type(uri: str, table: str, column: str, kind: str, plain: str = "text") -> FaultyTable:
    found, expected = f"the column has the type {kind}", "a type that Arrow supports"
    advice, where = f"write `CAST({column} AS {plain}) AS {column}` in the query", str(shown_database(uri))
    return FaultyTable(Finding("database-type", table, found, expected, advice, column, where))


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
    # One thread reads the first rows, another one the rest (`write_parquet`).
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)) as database:
        database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # ATTACH would make a file
        database.execute("BEGIN")  # the query runs twice, on the same state of the database
        schema = _sqlite_schema(database.execute(query), path, table)
        for rows in _fetched(database.execute(query)):
            columns = [
                pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), schema.types, strict=True)
            ]
            yield pa.record_batch(columns, schema=schema)


def _sqlite_schema(cursor: sqlite3.Cursor, path: Path, table: str) -> pa.Schema:
    """The type of each column's values; float64 for integers and floats. Raises FaultyTable for other mixed types."""
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
                        first, *_, other = first_of_kind.values()
                        raise _mixed(path, table, name, first, other)
        first_row += len(rows)
    kinds = [float if float in first_of_kind else next(iter(first_of_kind), None) for first_of_kind in first_of]
    return pa.schema([(name, _TYPES[kind] if kind else pa.null()) for name, kind in zip(names, kinds, strict=True)])


def _fetched(cursor: sqlite3.Cursor) -> Iterator[list[tuple]]:
    return iter(lambda: cursor.fetchmany(BATCH_ROWS), [])


def _mixed(path: Path, table: str, column: str, first: tuple[int, object], other: tuple[int, object]) -> FaultyTable:
    (first_row, first_value), (row, value) = first, other
    found = f"the value has another type than the one in row {first_row} ({first_value!r}):"
    advice = f"correct the row, or write `CAST({column} AS TEXT) AS {column}` in the query"
    expected = "values of one type in a column"
    return FaultyTable(
        Finding("mixed-types", table, found, expected, advice, column, str(path), row, value, num_rows=1)
    )


def _refused(path: Path, table: str, found: str, advice: str) -> FaultyTable:
    expected = "a query that returns rows of a DuckDB or SQLite file, or of a PostgreSQL server"
    return FaultyTable(Finding("database", table, f"{path} {found}", expected, advice))
