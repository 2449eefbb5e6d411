"""Tables that are queries to a DuckDB or SQLite file or a PostgreSQL server: streamed, read-only, and recorded."""

import datetime
import hashlib
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.tables.check import check_tables
from laserbatch.pipeline.tables.database import BATCH_ROWS, query_rows
from laserbatch.pipeline.tables.findings import FaultyTable
from laserbatch.pipeline.tables.mapping import import_mapped, load_mapping
from laserbatch.pipeline.tables.read import describe, read_tables
from laserbatch.pipeline.tables.settings import ImportMapping

NUM_EVENTS = 2 * BATCH_ROWS + 5
WORLD = (
    "CREATE TABLE products (sku INTEGER, name TEXT, price DECIMAL(10, 2))",
    "INSERT INTO products VALUES (1, 'Heat', 4), (2, 'Ran', 4.5), (3, NULL, 5)",
    "CREATE TABLE events (who TEXT, sku INTEGER, moment BIGINT, stars DECIMAL(2, 1))",
    f"""INSERT INTO events WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {NUM_EVENTS - 1})
        SELECT 'u' || (i % 7), i % 2 + 1, 1740787200 + i, CASE WHEN i > {BATCH_ROWS} THEN 4.5 ELSE 4 END FROM n""",
)
MAPPING = """
database: {database}
items: {{query: SELECT * FROM products WHERE name IS NOT NULL ORDER BY sku, id: sku, title: name}}
interactions:
  {{query: SELECT * FROM events ORDER BY moment, user_id: who, item_id: sku, timestamp: moment, rating: stars}}
"""


@pytest.fixture(scope="module")
def sqlite_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("databases") / "shop.sqlite"
    with closing(sqlite3.connect(path)) as database:
        for statement in WORLD:
            database.execute(statement)
        database.commit()
    return path


@pytest.fixture(scope="module")
def duckdb_file(tmp_path_factory):
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path_factory.mktemp("databases") / "shop.duckdb"
    with duckdb.connect(path) as database:
        for statement in WORLD:
            database.execute(statement)
    return path


@pytest.fixture(params=["sqlite_file", "duckdb_file"])
def shop(request, tmp_path):
    return Path(shutil.copy(request.getfixturevalue(request.param), tmp_path))


def mapping_of(folder, text) -> ImportMapping:
    (folder / "mapping.yaml").write_text(text)
    return load_mapping(folder / "mapping.yaml")


@pytest.mark.parametrize("is_absolute", [False, True])
def test_queries_become_tables(shop, tmp_path, is_absolute):
    before = shop.read_bytes()
    source = tmp_path / "exports" if is_absolute else tmp_path
    source.mkdir(exist_ok=True)
    mapping = mapping_of(tmp_path, MAPPING.format(database=shop if is_absolute else shop.name))
    notes = []
    import_mapped(mapping, source, tmp_path / "out", note=notes.append)
    assert (notes, check_tables(tmp_path / "out")) == ([], [])
    tables = read_tables(tmp_path / "out")
    assert [float(price) for price in tables.items["price"].to_pylist()] == [4.0, 4.5]
    assert tables.users["user_id"].to_pylist() == [f"u{number}" for number in range(7)]
    last = tables.interactions.slice(NUM_EVENTS - 1).to_pylist()[0]
    moment = datetime.datetime.fromtimestamp(1740787200 + NUM_EVENTS - 1, datetime.UTC)
    assert (tables.interactions.num_rows, last["timestamp"], last["rating"]) == (NUM_EVENTS, moment, 4.5)
    assert shop.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} - {"exports"} == {shop.name, "mapping.yaml", "out"}


def test_what_was_asked_is_recorded(shop, tmp_path):
    mapping = mapping_of(tmp_path, MAPPING.format(database=shop.name))
    for name in ("out", "again"):
        import_mapped(mapping, tmp_path, tmp_path / name)
    described = describe(tmp_path / "out")
    assert described == describe(tmp_path / "again")
    events = described["interactions"]
    assert events["query_sha256"] == hashlib.sha256(b"SELECT * FROM events ORDER BY moment").hexdigest()
    assert (events["database"], events["num_rows"]) == (shop.name, NUM_EVENTS)
    assert "database" not in described["users"]  # users are derived from the interactions


def test_tables_of_a_query_and_of_files_stand_side_by_side(shop, tmp_path):
    pq.write_table(pa.table({"nr": [1, 2], "name": ["Heat", "Ran"]}), tmp_path / "items.parquet")
    shop.with_name(f"{shop.name}{'-wal' if shop.suffix == '.sqlite' else '.wal'}").write_bytes(b"")
    (tmp_path / "other.parquet").write_bytes(b"PAR1")
    data = yaml.safe_load(MAPPING.format(database=shop.name))
    data["items"] = {"files": "items.parquet", "id": "nr", "title": "name"}
    notes = []
    import_mapped(ImportMapping.model_validate(data), tmp_path, tmp_path / "out", note=notes.append)
    (note,) = notes
    assert note == f"left out, because it is not named by `files` of the mapping: {tmp_path / 'other.parquet'}"


def test_rows_are_streamed(shop):
    batches = query_rows(shop, "SELECT * FROM events ORDER BY moment", "interactions")
    first = next(batches)
    assert 0 < first.num_rows < NUM_EVENTS
    assert first.num_rows + sum(batch.num_rows for batch in batches) == NUM_EVENTS


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT * FROM events WHERE sku > 9", "returned no rows for the query.*correct `query`"),
        ("SELECT colour FROM products", "cannot be queried .*colour"),
        ("SELEC", "cannot be queried .*syntax error"),
        ("DELETE FROM events", "cannot be queried"),
        ("SELECT 1; SELECT 2", "cannot be queried .*one"),
        ("ATTACH 'other.db' AS other", "cannot be queried"),
        ("COPY events TO 'other.csv'", "cannot be queried"),
    ],
)
def test_a_query_that_cannot_be_answered_is_refused(shop, tmp_path, monkeypatch, query, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FaultyTable, match=f"^users: .*{shop.name} {message}"):
        list(query_rows(shop, query, "users"))
    assert [path.name for path in tmp_path.iterdir()] == [shop.name]


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "shop.csv").write_text("a,b\n")
    for name, message in (
        ("shop.csv", "is neither a DuckDB nor"),
        ("gone.db", "No such file"),
        (".", "Is"),
    ):
        with pytest.raises(FaultyTable, match=message):
            list(query_rows(tmp_path / name, "SELECT 1", "users"))


def test_without_duckdb_the_extra_is_named(duckdb_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(FaultyTable, match=r"read with duckdb .*pip install 'laserbatch\[duckdb\]'"):
        list(query_rows(duckdb_file, "SELECT 1", "users"))


def sqlite_rows(tmp_path, values):
    with closing(sqlite3.connect(tmp_path / "one.sqlite")) as database:
        database.execute("CREATE TABLE one (id INTEGER, value)")
        database.executemany("INSERT INTO one VALUES (?, ?)", enumerate(values))
        database.commit()
    batches = list(query_rows(tmp_path / "one.sqlite", "SELECT * FROM one ORDER BY id", "items"))
    return pa.Table.from_batches(batches)["value"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([None, 1, 2], pa.int64()), ([1, None, 0.5], pa.float64()), (["ä", None], pa.string()), ([b"x"], pa.binary()),
        ([None], pa.null()), ([None] * BATCH_ROWS + ["late"], pa.string()), ([1] * BATCH_ROWS + [0.5], pa.float64()),
    ],
)  # fmt: skip
def test_values_give_a_column_of_sqlite_its_type(tmp_path, values, kind):
    column = sqlite_rows(tmp_path, values)
    assert column.type == kind and column.to_pylist() == values


def test_values_of_several_types_are_refused_with_column_row_and_value(tmp_path):
    with pytest.raises(FaultyTable) as refused:
        sqlite_rows(tmp_path, [None, 31, 32.5, *[32] * (BATCH_ROWS - 1), "n/a"])
    finding = refused.value.finding
    assert (finding.column, finding.row, finding.value) == ("value", BATCH_ROWS + 2, "n/a")
    assert "than the one in row 1 (31)" in str(finding) and "CAST(value AS TEXT) AS value" in str(finding)


def test_a_column_of_the_query_that_the_mapping_does_not_name_is_said_without_advice_for_csv(shop, tmp_path):
    data = yaml.safe_load(MAPPING.format(database=shop.name))
    data["items"]["title"] = "nam"
    with pytest.raises(TableError, match=r"has no column 'nam', .*did you mean 'name'\?$"):
        import_mapped(ImportMapping.model_validate(data), tmp_path, tmp_path / "out")


def test_intervals_are_named_with_their_column(duckdb_file, tmp_path):
    data = yaml.safe_load(MAPPING.format(database=duckdb_file))
    data["items"]["query"] = "SELECT sku, name, INTERVAL 1 DAY AS lasts FROM products"
    with pytest.raises(TableError, match=r"column lasts: an attribute of type month_day_nano_interval"):
        import_mapped(ImportMapping.model_validate(data), tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("database", "items", "message"),
    [
        ("", "query: SELECT 1", "items: `query` and `database` belong together"),
        ("", "database: a.db", "items: expected either `files`, or a `query`"),
        ("", "{}", "items: expected either `files`, or a `query`"),
        ("", "files: a.csv, database: a.db", "items: `query` and `database` belong together"),
        ("database: a.db", "files: a.csv, query: SELECT 1", "items: expected either `files`, or a `query`"),
        ("database: a.db", "files: a.csv", "`database` is set, but no table has a `query`"),
        ("database: a.db", "querry: SELECT 1", "items.querry: no such key; did you mean 'query'"),
        ("database: ../a.db", "query: SELECT 1", "items: expected the `database` as a file"),
        ("database: postgres://me:secret@host/db", "query: SELECT 1", "has a password or key in it; .*PGPASSWORD"),
        ("database: postgresql:///db?password=secret", "query: SELECT 1", "has a password or key in it"),
        ("database: mysql://me@host/db", "query: SELECT 1", "items: expected the `database` as a file"),
        ("database: a.db", "query: SELECT 1, encoding: latin-1", "items: `encoding` applies only to files"),
    ],
)
def test_a_table_has_files_or_a_query_with_its_database(tmp_path, database, items, message):
    items = f"{{id: a, title: b, {items}}}" if items != "{}" else "{id: a, title: b}"
    events = "{files: b.csv, user_id: a, item_id: b, timestamp: c}"
    with pytest.raises(ConfigError, match=message) as refused:
        mapping_of(tmp_path, f"{database}\nitems: {items}\ninteractions: {events}\n")
    assert "secret" not in str(refused.value)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URI of a PostgreSQL server with the tables of the shop."""
    pytest.importorskip("adbc_driver_postgresql")
    pgserver = pytest.importorskip("pgserver")
    started = pgserver.get_server(tmp_path_factory.mktemp("server") / "data", cleanup_mode="delete")
    for statement in (*WORLD, "ALTER TABLE products ADD COLUMN made uuid DEFAULT gen_random_uuid()"):
        started.psql(f"{statement};")
    yield started.get_uri().replace("postgres:@", "postgres@")
    started.cleanup()


def test_queries_to_a_server_become_tables(server, tmp_path):
    source = tmp_path / "exports"
    source.mkdir()
    mapping = mapping_of(tmp_path, MAPPING.format(database=server))
    import_mapped(mapping, source, tmp_path / "out")
    tables = read_tables(tmp_path / "out")
    assert check_tables(tmp_path / "out") == [] and tables.interactions.num_rows == NUM_EVENTS
    assert [str(price) for price in tables.items["price"].to_pylist()] == ["4.00", "4.50"]
    assert [len(made) for made in tables.items["made"].to_pylist()] == [36, 36]
    events = describe(tmp_path / "out")["interactions"]
    assert (events["database"], events["num_rows"]) == ("postgres", NUM_EVENTS)


def test_a_server_that_goes_away_in_the_middle_of_a_query_ends_the_import_and_leaves_the_tables(server, tmp_path):
    from adbc_driver_postgresql.dbapi import connect

    many = "SELECT i AS sku, repeat('x', 500) AS name FROM generate_series(1, 200000) i"
    batches = query_rows(server, many, "items")
    num_rows = next(batches).num_rows
    with connect(server) as other, other.cursor() as cursor:
        whose = "query LIKE '%generate_series(1, 2%' AND pid <> pg_backend_pid()"
        cursor.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {whose}")
        assert cursor.fetchall() == [(True,)]
    with pytest.raises(FaultyTable, match=r"postgresql:/postgres cannot be queried after [\d,]+ rows .*try again"):
        for batch in batches:
            num_rows += batch.num_rows
    assert num_rows < 200000


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT * FROM events WHERE sku > 9", "returned no rows for the query.*correct `query`"),
        ("SELECT colour FROM products", "cannot be queried .*colour"),
        ("SELECT 1; SELECT 2", "cannot be queried .*multiple commands"),
        ("DELETE FROM events", "cannot be queried .*one SELECT"),
        ("DELETE FROM events RETURNING sku", "cannot be queried .*read-only transaction"),
        ("COPY events TO '/tmp/events.csv'", "cannot be queried .*one SELECT"),
        ("SELECT avg(price) AS price FROM products", r"type numeric of any number .*CAST\(price AS double"),
        ("SELECT CAST(12.34 AS money) AS price", r"type money; .*CAST\(price AS numeric\(20, 2\)\)"),
        ("SELECT time '24:00:00' AS closes", r"time and a value of 24:00:00; .*CAST\(closes AS text\)"),
        ("SELECT ARRAY[5::oid] AS files", r"type oid\[\]; .*CAST\(files AS bigint\[\]\)"),
        ("SELECT ARRAY[['a'], ['b']] AS \"a b\"", r"type array of arrays; .*CAST\(a b AS text\)"),
        ("SELECT point(1, 2) AS place", r"column has the type point.*CAST\(place AS text\) AS place"),
    ],
)
def test_what_a_server_is_not_to_do_is_refused(server, query, message):
    with pytest.raises(FaultyTable, match=message):
        list(query_rows(server, query, "items"))


def test_options_of_the_uri_an_encoding_a_last_comment_nan_and_blanks_are_read_right(server):
    uri = f"{server}{'&' if '?' in server else '?'}options=-csearch_path%3Dpg_catalog"
    uri += "&client_encoding=LATIN1"  # the default for a server's database in Latin-1
    query = "SELECT current_schemas(false)::text || U&' \\00e9' AS path, CAST('NaN' AS numeric(9, 2)) AS price, "
    query += "CAST('a' AS char(3)) AS id, '{x,NULL}'::text[] AS tags, 4000000000::oid AS file"
    for end in (" -- all", ";\n"):
        (rows,) = query_rows(uri, query + end, "items")
        assert rows.to_pylist() == [{"path": "{pg_catalog} é", "price": None, "id": "a", "tags": ["x", None],
                                     "file": 4_000_000_000}]  # fmt: skip


def test_a_server_that_cannot_be_reached_is_named_without_its_user(server):
    with pytest.raises(FaultyTable, match=r"postgresql:localhost/shop cannot be queried .*PGPASSFILE") as refused:
        list(query_rows("postgresql://somebody@localhost:1/shop", "SELECT 1", "items"))
    assert "somebody" not in str(refused.value)


def test_without_adbc_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "adbc_driver_postgresql", None)
    with pytest.raises(FaultyTable, match=r"read with ADBC .*pip install 'laserbatch\[postgresql\]'"):
        list(query_rows("postgresql://host/shop", "SELECT 1", "users"))
