"""Import by a mapping: the output follows the mapping, and input that does not fit is named."""

import csv
import datetime
import math
import re
import uuid
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sound_world import DAY_1

from laserbatch.pipeline.errors import ConfigError, TableError
from laserbatch.pipeline.tables.check import check_tables
from laserbatch.pipeline.tables.conversion import ConversionFault, to_path, to_time, to_type
from laserbatch.pipeline.tables.guess import read_sources
from laserbatch.pipeline.tables.mapping import import_mapped, load_mapping
from laserbatch.pipeline.tables.read import read_tables
from laserbatch.pipeline.tables.settings import ImportMapping

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
UTC = datetime.UTC
PEOPLE = "person\tage\tzip\thome\tsince\n"

MAPPING = """
ids: {item_id: int64}
users:
  files: people.tsv
  id: person
  attributes: {age: {column: age, type: int64}, zip: zip, home: {column: home, null_values: ["?"]}}
  created_at: {column: since, unit: "%d/%m/%Y"}
items:
  files: things-*.csv
  id: nr
  title: name
  attributes: {category: {column: path, separator: ">"}}
interactions:
  files: log/*.csv
  column_names: [who, what, when, stars]
  user_id: who
  item_id: what
  timestamp: {column: when, unit: iso}
  rating: stars
  drop_unknown: true
"""


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    (folder / "log").mkdir(parents=True)
    (folder / "people.tsv").write_text(
        "person\tage\tzip\thome\tsince\nädä\t31\t01234\t?\t01/03/2025\nbob\t\t99999\tUlm\t28/02/2025\n"
    )
    (folder / "things-1.csv").write_text('nr,name,path\n1,"Heat, ""the"" film",Film > Crime\n')
    (folder / "things-2.csv").write_text("nr,name,path\n2,Ran,\n")
    (folder / "log" / "a.csv").write_text("bob,1,2025-03-01T12:00:00+02:00,4.5\nghost,1,2025-03-01,1\n")
    (folder / "log" / "b.csv").write_text("ädä,2,2025-03-01 08:00:00.5,3\n")
    return folder


def mapping_of(tmp_path: Path, text: str = MAPPING) -> ImportMapping:
    path = tmp_path / "mapping.yaml"
    path.write_text(text)
    return load_mapping(path)


def test_csv_files_become_tables(tmp_path, source):
    import_mapped(mapping_of(tmp_path), source, tmp_path / "out")
    assert check_tables(tmp_path / "out") == []
    tables = read_tables(tmp_path / "out")
    assert tables.users.to_pylist() == [
        {"user_id": "ädä", "age": 31, "zip": "01234", "home": None, "created_at": DAY_1},
        {
            "user_id": "bob",
            "age": None,
            "zip": "99999",
            "home": "Ulm",
            "created_at": DAY_1 - datetime.timedelta(days=1),
        },
    ]
    assert tables.items.to_pylist() == [
        {"item_id": 1, "title": 'Heat, "the" film', "category": ["Film", "Crime"]},
        {"item_id": 2, "title": "Ran", "category": None},
    ]
    assert tables.interactions.to_pylist() == [
        {
            "user_id": "ädä",
            "item_id": 2,
            "timestamp": datetime.datetime(2025, 3, 1, 8, 0, 0, 500_000, UTC),
            "rating": 3.0,
        },
        {"user_id": "bob", "item_id": 1, "timestamp": datetime.datetime(2025, 3, 1, 10, tzinfo=UTC), "rating": 4.5},
    ]


def test_without_a_users_table_users_are_those_that_interact(tmp_path, source):
    data = yaml.safe_load(MAPPING)
    del data["users"], data["interactions"]["drop_unknown"]
    import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")
    assert check_tables(tmp_path / "out") == []
    assert read_tables(tmp_path / "out").users["user_id"].to_pylist() == ["bob", "ghost", "ädä"]


def test_without_attributes_named_all_other_columns_are(tmp_path, source):
    data = yaml.safe_load(MAPPING)
    del data["users"]["attributes"]
    import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")
    assert read_tables(tmp_path / "out").users.column_names == ["user_id", "age", "zip", "home", "created_at"]


def test_the_same_import_writes_the_same_bytes(tmp_path, source):
    for name in ("a", "b"):
        import_mapped(mapping_of(tmp_path), source, tmp_path / name)
    for file in ("users.parquet", "items.parquet", "interactions.parquet"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("people.tsv", PEOPLE + "a\tforty\t1\tx\t01/03/2025\n", r"column age, row 0: found 'forty'.*an integer"),
        ("people.tsv", PEOPLE + "a\t1\t1\tx\t2025-03-01\n", r"since, row 0: found '2025-03-01'.*%d/%m/%Y"),
        ("people.tsv", PEOPLE.replace("age", "Age") + "a\t1\t1\tx\t01/03/2025\n", r"no column 'age'.*you mean 'Age'"),
        ("people.tsv", PEOPLE, "table users: its source files have no rows"),
        ("things-2.csv", "nr,name,name,path\n2,Ran,Ran,\n", r"things-2\.csv has 2 columns 'name'"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, source, file, text, message):
    (source / file).write_text(text)
    with pytest.raises(TableError, match=message):
        import_mapped(mapping_of(tmp_path), source, tmp_path / "out")


def test_decimal_commas_are_read_if_the_mapping_says_so_and_never_guessed_on_the_way(tmp_path):
    (tmp_path / "items.csv").write_text("id;title;price\na;Tee;1,234\nb;Milch;12\n")

    def prices(**csv_options) -> list:
        items = {"files": "items.csv", "id": "id", "title": "title", "csv": {"delimiter": ";"} | csv_options}
        items["attributes"] = {"price": {"column": "price", "type": "float64"}}
        log = {"files": "log.csv", "user_id": "user", "item_id": "id", "timestamp": "time"}
        (tmp_path / "log.csv").write_text("user,id,time\nu,a,1740000000\n")
        mapping = ImportMapping.model_validate({"items": items, "interactions": log})
        import_mapped(mapping, tmp_path, tmp_path / "out")
        return read_tables(tmp_path / "out").items["price"].to_pylist()

    with pytest.raises(TableError, match=r"row 0: found '1,234', expected a number\..* `csv: \{decimal: \",\"\}`"):
        prices()
    assert prices(decimal=",") == [1.234, 12.0]
    (tmp_path / "items.csv").write_text("id;title;price\na;Tee;1.234,5\n")
    with pytest.raises(
        TableError, match=r"row 0: found '1\.234,5', expected a number with a decimal comma and no point"
    ):
        prices(decimal=",")


def test_bytes_of_another_encoding_are_refused_and_read_when_named(tmp_path, source):
    (source / "things-2.csv").write_bytes("nr,name,path\n2,Räni,\n".encode("latin-1"))
    with pytest.raises(TableError, match=r"things-2\.csv, line 2: .*not utf-8\. Set `csv: \{encoding: cp1252\}`"):
        import_mapped(mapping_of(tmp_path), source, tmp_path / "out")
    import_mapped(
        mapping_of(tmp_path, MAPPING.replace("-*.csv", "-2.csv\n  encoding: latin-1")), source, tmp_path / "out"
    )
    assert read_tables(tmp_path / "out").items["title"].to_pylist() == ["Räni"]


def test_ids_of_two_types_are_refused_before_all_is_unknown(tmp_path, source):
    with pytest.raises(TableError, match=r"item_id is string, but int64 .* Set `ids: \{item_id: int64\}`"):
        data = yaml.safe_load(MAPPING)
        data["ids"] = {}
        pq.write_table(pa.table({"nr": [1, 2], "name": ["a", "b"], "path": ["", ""]}), source / "things.parquet")
        data["items"]["files"] = "things.parquet"
        import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("items:", "things:", "things: no such key; there are database, ids, interactions, items, users"),
        ("unit: iso", "unit: hours", r"interactions\.timestamp.*'hours' is not a time unit"),
        ("separator: ", "seperator: ", r"attributes\.category\.seperator: no such key; did you mean 'separator'"),
        (
            "  rating: stars",
            "  rating: stars\n  rating: grade",
            r"has the key rating twice, in lines 19 and 20",
        ),
        ("timestamp: {column: when, unit: iso}", "timestamp:", r"timestamp: expected keys .* unit \(found nothing"),
        ('attributes: {category: {column: path, separator: ">"}}', "attributes: [path]", r"expected names with values"),
        ("files: people.tsv", "files: a\n  encoding: utf-9", r"encoding that Python knows.*\(found 'utf-9'\)"),
        ("  title: name\n", "", r"items\.title: the key is missing"),
    ],
)
def test_a_faulty_mapping_is_refused_before_any_work(tmp_path, old, new, message):
    assert old in MAPPING
    with pytest.raises(ConfigError, match=message) as caught:
        mapping_of(tmp_path, MAPPING.replace(old, new))
    assert "pydantic" not in str(caught.value)


def test_rows_are_left_out_by_stated_rules_and_counted(tmp_path, source):
    (source / "things-2.csv").write_text("nr,name,path\n2,Ran,\n3, ,\n4,,\n")
    (source / "log" / "a.csv").write_text("bob,1,2025-03-01,\nghost,3,2025-03-01,1\nbob,4,2025-03-01,1\n")
    data = yaml.safe_load(MAPPING)
    data["items"]["drop_without"], data["interactions"]["drop_without"] = ["title"], ["rating"]
    dropped = import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")
    assert dropped == {
        "items without title": 2,
        "interactions without rating": 1,
        "interactions of unknown user_id": 1,
        "interactions of unknown item_id": 1,
    }
    assert check_tables(tmp_path / "out") == []
    data["items"]["drop_without"] = ["titel"]
    with pytest.raises(ConfigError, match=r"items\.drop_without: .*'titel'; did you mean 'title'"):
        import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")


def test_exact_copies_of_an_interaction_are_left_to_runs_however_they_are_written(tmp_path, source):
    line = "bob,1,2025-03-01T12:00:00+02:00,4.5\n"
    (source / "log" / "a.csv").write_text(line + "bob,1,2025-03-01T12:00:00+02:00,4\n" + line)
    (source / "log" / "b.csv").write_text("bob,1,2025-03-01T10:00:00Z,4.50\n")
    import_mapped(ImportMapping.model_validate(yaml.safe_load(MAPPING)), source, tmp_path / "out")
    assert read_tables(tmp_path / "out", keep_duplicates=True).interactions.num_rows == 4
    tables = read_tables(tmp_path / "out")
    assert tables.interactions["rating"].to_pylist() == [4.5, 4.0] and tables.num_copies == 2


LONG_IDS = [123456789012, 98765, 345678901234]
WITH_LONG_IDS = {
    "ids": {"user_id": "string"},
    "users": {"files": "users.csv", "id": "id"},
    "items": {"files": "items.csv", "id": "id", "title": "title"},
    "interactions": {"files": "log.parquet", "user_id": "u", "item_id": "i", "timestamp": "t", "drop_unknown": True},
}


def import_of_log(folder: Path, user_ids: pa.Array, **changed) -> dict[str, int]:
    """Import three users, an item, and interactions with the given user ids; returns the counts of left-out rows."""
    (folder / "users.csv").write_text("id\n" + "".join(f"{user_id}\n" for user_id in LONG_IDS))
    (folder / "items.csv").write_text("id,title\ni1,Heat\n")
    num = len(user_ids)
    pq.write_table(pa.table({"u": user_ids, "i": ["i1"] * num, "t": list(range(1, num + 1))}), folder / "log.parquet")
    return import_mapped(ImportMapping.model_validate(WITH_LONG_IDS | changed), folder, folder / "out")


@pytest.mark.parametrize("kind", [pa.float64(), pa.decimal128(24, 2)])
def test_whole_numbers_that_are_stored_as_floats_are_the_ids_that_they_are(tmp_path, kind):
    ids = pa.array(LONG_IDS).cast(kind)
    assert sum(import_of_log(tmp_path, ids).values()) == 0
    assert read_tables(tmp_path / "out").interactions["user_id"].to_pylist() == list(map(str, LONG_IDS))
    import_of_log(tmp_path, ids, users=None)
    assert read_tables(tmp_path / "out").users["user_id"].to_pylist() == sorted(map(str, LONG_IDS))
    import_of_log(tmp_path, pa.array(LONG_IDS).cast(kind), users=None, ids={})
    assert read_tables(tmp_path / "out").users["user_id"].to_pylist() == sorted(LONG_IDS)


def test_uuids_of_parquet_are_ids_as_text(tmp_path):
    user = uuid.UUID("50992b3e-63d6-40d9-b155-ffbf6ad50e6e")
    import_of_log(tmp_path, pa.array([user.bytes], pa.uuid()), users=None, ids={})
    assert read_tables(tmp_path / "out").users["user_id"].to_pylist() == [str(user)]


@pytest.mark.parametrize("value", [1.5, 2.0**60])
def test_floats_that_are_no_exact_whole_numbers_are_no_ids(tmp_path, value):
    with pytest.raises(TableError, match=r"log\.parquet, column u, row 1: .*expected an id: a whole number"):
        import_of_log(tmp_path, pa.array([1.0, value]))


def test_an_id_in_scientific_notation_is_refused(tmp_path):
    with pytest.raises(TableError, match=r"row 0: found '1\.23457E\+11', expected an id with all of its digits"):
        import_of_log(tmp_path, pa.array(["1.23457E+11"]), users=None)


@pytest.mark.parametrize(
    ("users", "log", "is_read_as_number"),
    [
        (["12", "7", "300"], ["12.0", "7.0"], True),
        (["12.0", "7.0"], ["12", "7"], True),
        (["1.0", "1.10"], ["1.0", "1.10"], False),
        (["1.0", "1.10"], ["1.0", "1.0"], False),
        (["1.0", "a"], ["1.0", "a"], False),
        (["1", "1.0"], ["1", "1.0"], False),
        (["00123", "123"], ["123", "00123"], False),
    ],
)
def test_text_with_a_point_and_zero_is_a_whole_number_where_all_of_a_column_is(tmp_path, users, log, is_read_as_number):
    notes = import_of_texts(tmp_path, users, log)
    tables = read_tables(tmp_path / "out")
    for read, written in ((tables.users, users), (tables.interactions, log)):
        expected = [user_id.removesuffix(".0" if is_read_as_number else "") for user_id in written]
        assert read["user_id"].to_pylist() == expected
    assert any("ids such as 123.0 were read as whole numbers" in note for note in notes) == is_read_as_number


def import_of_texts(folder: Path, users: list[str], log: list[str], **changed) -> list[str]:
    """Import users and a log with the given ids from CSV files; returns the notes."""
    (folder / "users.csv").write_text("id\n" + "".join(f'"{user_id}"\n' for user_id in users))
    (folder / "items.csv").write_text("id,title\ni1,Heat\n")
    (folder / "log.csv").write_text("u,i,t\n" + "".join(f'"{user_id}",i1,{n}\n' for n, user_id in enumerate(log)))
    data, notes = WITH_LONG_IDS | {"interactions": WITH_LONG_IDS["interactions"] | {"files": "log.csv"}} | changed, []
    import_mapped(ImportMapping.model_validate(data), folder, folder / "out", note=notes.append)
    return notes


def test_text_ids_become_numbers_by_the_rules_of_floats(tmp_path):
    import_of_texts(tmp_path, ["12", "0007"], ["12.0", " 7.00"], ids={"user_id": "int64"})
    assert read_tables(tmp_path / "out").interactions["user_id"].to_pylist() == [12, 7]
    for text, message in (
        ("1.10", "an integer"),
        ("18014398509481984.0", "which floats hold exactly"),
        ("1E+11", "all of its digits"),
        ("1.2e11", "all of its digits"),
        ("1,23457E+11", "all of its digits"),
        ("123,456", "all of its digits"),
    ):
        with pytest.raises(TableError, match=f"column u, row 1: found .*{message}"):
            import_of_texts(tmp_path, ["12"], ["12", text], ids={"user_id": "int64"})


ALLOWED = WITH_LONG_IDS["interactions"] | {"files": "log.csv", "max_unknown_share": 0.8}


def test_unknown_ids_are_named_beside_known_ones(tmp_path):
    (note,) = import_of_texts(
        tmp_path, ["00123", "ab", "7"], ["7", "7", "7", "123", "AB", "x", " 7", "'7"], interactions=ALLOWED
    )
    assert "5 of 8 rows have a user_id that is in no table, such as '123', 'AB', 'x'" in note
    assert "has ids such as '00123', 'ab', '7'. These rows are left out" in note


def test_an_import_stops_where_most_interactions_are_of_ids_in_no_table(tmp_path):
    ids = pa.array(["98765", "123456789012.0", "98765.0", "345678901234.0", "1.0"])
    with pytest.raises(TableError) as caught:
        import_of_log(tmp_path, ids)
    assert "4 of 5 rows have a user_id" in str(caught.value)
    assert "'123456789012.0', '98765.0', '345678901234.0'; " in str(caught.value)
    assert "'123456789012', '98765', '345678901234'. " in str(caught.value)
    allowed = WITH_LONG_IDS["interactions"] | {"max_unknown_share": 0.8}
    assert import_of_log(tmp_path, ids, interactions=allowed)["interactions of unknown user_id"] == 4


def import_of_times(source: Path, out: Path, first: list, second: list, **stated) -> tuple[list[str], list[str]]:
    """Import a log of two files with the given times; returns the times as read, and the notes."""
    data, notes = yaml.safe_load(MAPPING), []
    data["interactions"]["timestamp"] = {"column": "when", **stated}
    for name, times in (("a", first), ("b", second)):
        (source / "log" / f"{name}.csv").write_text("".join(f"bob,1,{time},4\n" for time in times))
    import_mapped(ImportMapping.model_validate(data), source, out, note=notes.append)
    return [f"{time:%Y-%m-%d %H:%M}" for time in read_tables(out).interactions["timestamp"].to_pylist()], notes


@pytest.mark.parametrize(
    ("first", "second", "read", "noted"),
    [
        ([1740787200], [1740787260], ["2025-03-01 00:00", "2025-03-01 00:01"], None),
        ([1740787200000], [1740787260000], ["2025-03-01 00:00", "2025-03-01 00:01"], "milliseconds"),
        (["1740787200000000"], [1740787260000000], ["2025-03-01 00:00", "2025-03-01 00:01"], "microseconds"),
        ([1740787200 * 10**9], [1740787260 * 10**9], ["2025-03-01 00:00", "2025-03-01 00:01"], "nanoseconds"),
        (["1740787200.5"], [1740787260], ["2025-03-01 00:00", "2025-03-01 00:01"], None),
        ([5, 7], [9], ["1970-01-01 00:00"] * 3, None),
        ([1740787200000], [1740787200], None, r"b\.csv, column when: not all numbers from 1740787200 .* in millis"),
        ([1740787200], [1740787200000], None, r"b\.csv, column when, row 0: found '1740787200000', expected .* in s"),
        ([20240531], [20240601], None, r"a\.csv, column when: the numbers from 20240531 to 20240601 look like dates"),
        ([45443, 45444], ["45443.5"], None, r"from 45443 to 45444 look like days"),
        ([2019], [2024], None, "from 2019 to 2024 look like years"),
        ([202312], [202405], None, "from 202312 to 202405 look like months"),
        ([638500000000000000], [], None, r"row 0: found '638500000000000000', expected"),  # ticks of .NET
        (["2025-03-01"], [], None, r"found '2025-03-01', expected .* in s since 1970, or another `unit`: s, ms,"),
    ],
)
def test_a_unit_that_is_not_stated_is_the_one_that_values_leave(tmp_path, source, first, second, read, noted):
    if read is None:
        with pytest.raises(TableError, match=noted):
            import_of_times(source, tmp_path / "out", first, second)
        return
    times, notes = import_of_times(source, tmp_path / "out", first, second)
    assert times == read
    assert [f"was read as {noted} since 1970 (2025-03-01 to 2025-03-01)" in note for note in notes] == [True] * bool(
        noted
    )


def test_dates_that_are_written_as_numbers_are_read_by_their_format_and_never_as_seconds(tmp_path, source):
    times, notes = import_of_times(source, tmp_path / "out", [20240531], [20240601], unit="%Y%m%d")
    assert (times, notes) == (["2024-05-31 00:00", "2024-06-01 00:00"], [])
    times = [1717113600000, 1717200000000]
    read = import_of_times(source, tmp_path / "out", times[:1], times[1:], unit="ms")
    assert read == (["2024-05-31 00:00", "2024-06-01 00:00"], [])
    with pytest.raises(TableError, match="look like dates such as 20240531"):
        import_of_times(source, tmp_path / "out", [20240531], [20240601], unit="s")


def test_files_of_a_table_that_differ_are_named_with_the_column(tmp_path, source):
    data = yaml.safe_load(MAPPING)
    del data["items"]["attributes"]
    for text, message in (("nr,name\n2,Ran\n", "path"), ("nr,name,path,extra\n2,Ran,,x\n", "extra")):
        (source / "things-2.csv").write_text(text)
        with pytest.raises(TableError, match=rf"column '{message}' is [^ ]* in .*things-2.csv, [^ ]* in .*things-1"):
            import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")


@pytest.mark.parametrize("ids", [pa.array([1, 2**63], pa.uint64()), pa.array([1, 2**63], pa.decimal128(38, 0))])
def test_ids_too_large_for_an_integer_are_refused_with_what_to_do(tmp_path, ids):
    pq.write_table(pa.table({"user_id": ids, "item_id": [1, 1], "time": [1717113600] * 2}), tmp_path / "log.parquet")
    pq.write_table(pa.table({"item_id": [1], "title": ["A"]}), tmp_path / "items.parquet")
    log = {"files": "log.parquet", "user_id": "user_id", "item_id": "item_id", "timestamp": "time"}
    mapping = {"items": {"files": "items.parquet", "id": "item_id", "title": "title"}, "interactions": log}
    with pytest.raises(TableError, match=rf"column user_id, row 1: .*{2**63}.*, set `ids: \{{user_id: string\}}` in"):
        import_mapped(ImportMapping.model_validate(mapping), tmp_path, tmp_path / "out")
    mapping["ids"] = {"user_id": "string"}
    import_mapped(ImportMapping.model_validate(mapping), tmp_path, tmp_path / "out")
    assert read_tables(tmp_path / "out").users["user_id"].to_pylist() == ["1", str(2**63)]


@pytest.mark.parametrize(
    ("column", "first", "second", "expected"),
    [
        ("item_id", 1, "2", [1, 2]),
        ("item_id", "1", 2, ["1", "2"]),
        ("item_id", 1, "02", None),
        ("x", datetime.date(2024, 5, 31), datetime.datetime(2024, 5, 31, 23, 59), None),
        ("x", True, 5, None),
        ("x", Decimal("1.5"), 1.25, None),
        ("x", Decimal("1.5"), 2.5, [Decimal("1.5"), Decimal("2.5")]),
    ],
)
def test_files_of_other_types_are_refused_if_the_type_of_the_first_would_change_a_value(
    tmp_path, column, first, second, expected
):
    for number, value in enumerate((first, second)):
        rows = {"item_id": [number], "title": ["A"]} | {column: [value]}
        pq.write_table(pa.table(rows), tmp_path / f"i{number}.parquet")
    known = first if column == "item_id" else 1
    pq.write_table(pa.table({"user": [1], "item": [known], "time": [1717113600]}), tmp_path / "log.parquet")
    items = {"files": "i*.parquet", "id": "item_id", "title": "title"}
    log = {"files": "log.parquet", "user_id": "user", "item_id": "item", "timestamp": "time"}
    mapping = ImportMapping.model_validate({"items": items, "interactions": log})
    refused = pytest.raises(TableError, match=rf"column '{column}' is .* in .*i1.parquet, .* in .*i0.parquet")
    with nullcontext() if expected else refused:
        import_mapped(mapping, tmp_path, tmp_path / "out")
        assert pq.read_table(tmp_path / "out" / "items.parquet")[column].to_pylist() == expected


def test_times_of_spark_are_read_beyond_the_range_of_nanoseconds(tmp_path):
    until = [datetime.datetime(1600, 1, 1), datetime.datetime(9999, 12, 31)]
    items = pa.table({"item_id": [1, 2], "title": ["A", "B"], "until": pa.array(until, pa.timestamp("us"))})
    pq.write_table(items, tmp_path / "items.parquet", use_deprecated_int96_timestamps=True)
    pq.write_table(pa.table({"user_id": [1]}), tmp_path / "users.parquet")
    log = pa.table({"user_id": [1], "item_id": [1], "timestamp": [1717113600]})
    pq.write_table(log, tmp_path / "interactions.parquet")
    assert read_tables(tmp_path).items["until"].to_pylist() == until


def test_float32_beside_float64_is_imported_as_the_number_that_was_written(tmp_path):
    for number, kind in enumerate((pa.float64(), pa.float32())):
        price = pa.array([11.36], kind)
        pq.write_table(pa.table({"item_id": [number], "title": ["A"], "price": price}), tmp_path / f"i{number}.parquet")
    log = {"user_id": [1], "item_id": [1], "time": [1717113600], "stars": pa.array([4.1], pa.float32())}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    items = {"files": "i*.parquet", "id": "item_id", "title": "title"}
    log = {"files": "log.parquet", "user_id": "user_id", "item_id": "item_id", "timestamp": "time", "rating": "stars"}
    import_mapped(ImportMapping.model_validate({"items": items, "interactions": log}), tmp_path, tmp_path / "out")
    tables = read_tables(tmp_path / "out")
    assert tables.items["price"].to_pylist() == [11.36, 11.36] and tables.interactions["rating"].to_pylist() == [4.1]
    items["files"] = "i[12].parquet"
    for price, refused in (
        (11.36, None),
        (math.nan, None),
        (12345678.91, "column 'price' is double in .*i2.parquet, float in .*i1"),
    ):
        pq.write_table(pa.table({"item_id": [2], "title": ["A"], "price": [price]}), tmp_path / "i2.parquet")
        with pytest.raises(TableError, match=refused) if refused else nullcontext():
            import_mapped(ImportMapping.model_validate({"items": items, "interactions": log}), tmp_path, tmp_path / "o")


def test_a_column_named_like_a_part_of_the_table_is_no_attribute_by_itself(tmp_path, source):
    data = yaml.safe_load(MAPPING)
    del data["items"]["attributes"]
    (source / "things-2.csv").unlink()
    (source / "things-1.csv").write_text("nr,name,created_at\n1,Heat,2025-03-01\n2,Ran,2025-03-01\n")
    with pytest.raises(
        ConfigError, match=r"items\.created_at cannot be .*name the `attributes` that you want, or set `created_at`"
    ):
        import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")
    data["items"]["created_at"] = {"column": "created_at", "unit": "iso"}
    import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")
    assert check_tables(tmp_path / "out") == []


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path, source):
    data = yaml.safe_load(MAPPING)
    data["ids"], data["interactions"]["drop_unknown"] = {}, False
    (source / "things-2.csv").unlink()
    (source / "things-1.csv").write_bytes(b"\xef\xbb\xbfnr,name,path\n01,Heat,\n")
    (source / "log" / "a.csv").write_text("bob,01,2025-03-01,1\n")
    (source / "log" / "b.csv").unlink()
    import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")
    assert read_tables(tmp_path / "out").items["item_id"].to_pylist() == ["01"]


@pytest.mark.parametrize("kind", [pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.int64()), pa.binary()])
def test_a_column_that_cannot_be_an_attribute_is_named_and_can_be_left_out(tmp_path, source, kind):
    things = pa.table({"nr": [1, 2], "name": ["a", "b"], "extra": pa.nulls(2, kind)})
    pq.write_table(things, source / "things.parquet")
    data = yaml.safe_load(MAPPING)
    data["items"] = {"files": "things.parquet", "id": "nr", "title": "name"}
    with pytest.raises(TableError, match=r"column extra: .* naming the `attributes`"):
        import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")
    data["items"]["attributes"] = {}
    import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")
    assert check_tables(tmp_path / "out") == []


def test_unsigned_ids_become_what_the_mapping_says(tmp_path, source):
    things = pa.table({"nr": pa.array([1, 2**64 - 1], pa.uint64()), "name": ["a", "b"]})
    pq.write_table(things, source / "things.parquet")
    data = yaml.safe_load(MAPPING) | {"ids": {}}
    data["items"] = {"files": "things.parquet", "id": "nr", "title": "name"}
    with pytest.raises(TableError, match=r"row 1: found 18446744073709551615, expected an integer below 2\*\*63"):
        import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")
    data["ids"] = {"item_id": "string"}
    import_mapped(ImportMapping.model_validate(data), source, tmp_path / "out")
    assert read_tables(tmp_path / "out").items["item_id"].to_pylist() == ["1", "18446744073709551615"]


def test_a_mapping_that_is_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory"):
        load_mapping(tmp_path)


def test_the_shipped_mappings_are_valid():
    assert load_mapping(CONFIGS / "import_example.yaml").interactions.drop_unknown
    load_mapping(CONFIGS / "import_movielens_parquet.yaml")


def test_movielens_as_it_is_published(tmp_path):
    """Fields separated by two colons, titles with a colon, and codes that stand for words."""
    files = {
        "ratings.dat": "1::2::5::978300760\n1::3::4.5::978302109\n",
        "movies.dat": '2::Déjà: "Vu" (1995)::Action|Film-Noir\n3::"Seven::(no genres listed)\n',
        "users.dat": "1::F::1::10::48067\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    mapping = load_mapping(CONFIGS / "import_movielens_1m.yaml")
    import_mapped(mapping, tmp_path, tmp_path / "out")
    assert check_tables(tmp_path / "out") == []
    tables = read_tables(tmp_path / "out")
    assert tables.items.to_pylist() == [
        {"item_id": 2, "title": 'Déjà: "Vu" (1995)', "genres": ["Action", "Film-Noir"]},
        {"item_id": 3, "title": '"Seven', "genres": None},
    ]
    assert tables.users.to_pylist() == [
        {"user_id": 1, "gender": "F", "age": "under 18", "occupation": "K-12 student", "zip_code": "48067"}
    ]
    assert tables.interactions["rating"].to_pylist() == [5.0, 4.5]
    assert str(tables.interactions["timestamp"][0].as_py()) == "2000-12-31 22:12:40+00:00"
    (tmp_path / "movies.dat").write_text("2::Heat\n")
    with pytest.raises(TableError, match=r"movies\.dat cannot be read: .*Expected 3 columns, got 2"):
        import_mapped(mapping, tmp_path, tmp_path / "out")


def test_movielens_100k_as_it_is_published(tmp_path):
    """No header lines, three delimiters, and a 0/1 column for each genre, which become a list."""
    flags = "|".join("1" if place in (4, 8) else "0" for place in range(19))
    (tmp_path / "u.user").write_text("1|24|M|technician|85711\n")
    (tmp_path / "u.item").write_bytes(f'1|Déjà "Vu" (1995)|01-Jan-1995||http://x|{flags}\n'.encode("latin-1"))
    (tmp_path / "u.data").write_text("1\t1\t3\t881250949\n")
    import_mapped(load_mapping(CONFIGS / "import_movielens_100k.yaml"), tmp_path, tmp_path / "out")
    assert check_tables(tmp_path / "out") == []
    items = read_tables(tmp_path / "out").items.to_pylist()
    assert items == [{"item_id": 1, "title": 'Déjà "Vu" (1995)', "genres": ["Children", "Drama"]}]


def test_movielens_repacked_as_parquet(tmp_path, shared_data):
    import_mapped(load_mapping(CONFIGS / "import_movielens_parquet.yaml"), shared_data / "ml-100k", tmp_path)
    assert check_tables(tmp_path) == []
    tables = read_tables(tmp_path)
    assert (tables.users.num_rows, tables.items.num_rows, tables.interactions.num_rows) == (943, 1682, 100_000)
    assert tables.items.slice(0, 1).to_pylist() == [
        {"item_id": 1, "title": "Toy Story", "year": 1995, "genres": ["Animation", "Children's", "Comedy"]}
    ]
    assert str(tables.interactions["timestamp"][0].as_py()) == "1997-09-20 03:05:10+00:00"


QUOTED = {"items": {"files": "items.tsv", "id": "id", "title": "title"},
          "interactions": {"files": "log.csv", "user_id": "user", "item_id": "item", "timestamp": "time"}}  # fmt: skip
OPEN_QUOTE = 'id\tgenre\ttitle\nt1\tDrama\t"Great" Cats\nt2\tNews\t"Fixer Upper\nt3\tDrama\tRan\nt4\tDrama\tAlien"s\n'


def imported_titles(tmp_path: Path, text: str | None, file: str = "items.tsv", **csv_options) -> tuple[list, list[str]]:
    """The titles and the notes of an import of `file`, which is written first if `text` is given."""
    if text is not None:
        (tmp_path / file).write_text(text, "utf-8", newline="")
    (tmp_path / "log.csv").write_text("user,item,time\nu1,t1,5\n")
    items, notes = QUOTED["items"] | {"files": file, "csv": csv_options}, []
    import_mapped(
        ImportMapping.model_validate(QUOTED | {"items": items}), tmp_path, tmp_path / "out", note=notes.append
    )
    return read_tables(tmp_path / "out").items["title"].to_pylist(), notes


def test_a_tsv_has_no_quoted_fields(tmp_path):
    titles, notes = imported_titles(tmp_path, OPEN_QUOTE)
    assert titles == ['"Great" Cats', '"Fixer Upper', "Ran", 'Alien"s']
    assert notes == []
    assert imported_titles(tmp_path, OPEN_QUOTE.replace("\t", ","), "items.csv", quote=None)[0] == titles
    assert imported_titles(tmp_path, OPEN_QUOTE, "items.csv", delimiter="\t")[0] == titles


def test_fields_of_a_tsv_that_look_quoted_are_counted_and_read_so_when_asked(tmp_path):
    text = 'id\ttitle\nt1\t"Heat, ""the"" film"\nt2\tRan\n'
    titles, (note,) = imported_titles(tmp_path, text)
    assert titles == ['"Heat, ""the"" film"', "Ran"]
    assert re.search(r"items\.tsv: 1 field in quotes.*column title, row 0.*csv: \{quote: '\"'\}", note)
    assert imported_titles(tmp_path, text, quote='"') == (['Heat, "the" film', "Ran"], [])


def test_a_quoted_field_over_several_lines_is_counted_and_shown(tmp_path):
    text = 'id,title\nt1,Ran\nt2,"Heat\nthe film"\nt3,"A\r\nB"\n'
    titles, (note,) = imported_titles(tmp_path, text, "items.csv")
    assert titles == ["Ran", "Heat\nthe film", "A\r\nB"]
    assert re.search(r"2 quoted fields over several lines, first in column title, row 1: 'Heat\\nthe film'", note)


def test_a_field_that_goes_on_after_its_closing_quote_is_refused_where_rows_are_in_it(tmp_path):
    with pytest.raises(TableError, match=r"items\.csv, line 2: .*closing quote.*csv: \{quote: null\}"):
        imported_titles(tmp_path, 'id,title\nt1,"Fixer Upper\nt2,Ran\nt3,Alien"s\nt4,Last\n', "items.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('id,title\nt1,"Ran"\nt2,"Great" Cats\n', r"""items\.csv, line 3: 't2,"Great" Cats': .*csv: \{quote: null\}"""),
        ('id,title\nt1,"He said \\"hi\\" to"\n', r"""line 2: .*backslash escapes quotes.*escape: "\\\\"\}"""),
        ('id,title\nt1,"said \\"a, b\\" c"\n', r"line 2: .*escape: "),  # Arrow splits it into too many fields
        ('id,title\nt1,"a ""b"" c" d\n', r"line 2: .*continues after its closing quote"),
        ('id,"ti" tle\nt1,Ran\n', r"line 1: .*continues after its closing quote"),
        ("id,title\nt1,Ran\nt2,He\0at\n", r"column 'title', row 1: the text has a zero byte"),
        ("id,title\nt1,Ran\nt2\n", r"Row #3: Expected 2 columns, got 1: t2"),
        ("id,title\nt1,Ran,\n", r"Row #2: Expected 2 columns, got 3: t1,Ran,"),
        ("id,title,title\nt1,Ran,Heat\n", r"2 columns 'title'; rename or drop all but one"),
        ("id,title\n", r"its source files have no rows"),
        ("id,title,\nt1,Ran,\nid,title,\nt2,Heat,\n", r"items\.csv, row 1: the row repeats the names of the columns"),
        ("id,title\nt1,Ran\n\ufeffid,title\nt2,Heat\n", r"items\.csv, row 1: the row begins with a byte order mark"),
        ("id,title\nt1," + "x" * 9_000_000 + "\n", r"line 2: the row has 9,000,002 characters"),
        ('id,title\nt1,"' + "x,y\n" * 3_000_000, r"line 2: 't1,\"x,y': a quote is never closed"),
        ('{"id":"t1","title":"Ran"}\n' * 2, r"items\.csv is no CSV, but JSON"),
        ("sep=;\nid,title\nt1,Ran\n", r"no line is above the header \(a title, a comment, Excel's `sep=;`\)"),
    ],
)
def test_a_csv_that_would_lose_something_is_refused_by_its_place(tmp_path, text, message):
    with pytest.raises(TableError, match=message):
        imported_titles(tmp_path, text, "items.csv")


def test_empty_lines_above_a_header_change_no_value(tmp_path):
    assert imported_titles(tmp_path, "\n\r\nid,title\n01,007\n", "items.csv") == (["007"], [])


@pytest.mark.parametrize(
    ("encoding", "place", "advised"),
    [
        ("latin-1", "line 3: ", "cp1252"),
        ("utf-16", "line 1: ", "utf-16"),
        ("utf-16-le", "looks like UTF-16", "utf-16-le"),
        ("utf-32", "line 1: ", "utf-32"),
    ],
)
def test_a_file_in_another_encoding_is_refused_with_the_line_to_write(tmp_path, encoding, place, advised):
    text = "id,title\nt1,Ran\nt2,Déjà vu\n"
    (tmp_path / "items.csv").write_bytes(text.encode(encoding))
    with pytest.raises(TableError, match=rf"items\.csv.*{place}.*csv: \{{encoding: {advised}\}}"):
        imported_titles(tmp_path, None, "items.csv")
    assert imported_titles(tmp_path, None, "items.csv", encoding=advised) == (["Ran", "Déjà vu"], [])
    titles, (note,) = imported_titles(tmp_path, text, "items.csv", encoding="latin-1")
    assert titles[1] != "Déjà vu" and "but all of it is valid UTF-8" in note


def test_advice_about_an_encoding_is_another_than_the_one_that_failed(tmp_path):
    (tmp_path / "items.csv").write_bytes("id,title\nt1,赤い傘\n".encode("cp932"))
    with pytest.raises(TableError, match=r"is not cp1252\. Set `csv: \{encoding: cp932\}`"):
        imported_titles(tmp_path, None, "items.csv", encoding="cp1252")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_and_unnamed_columns_are_no_part_of_the_rows(tmp_path, end):
    """Row numbers as written by pandas, and a delimiter at the end of lines."""
    lines = [",id,title,", '0,t1,"5"" screen",', "1,t2,5 screen,", ""]
    titles, notes = imported_titles(tmp_path, "\ufeff" + end.join(lines), "items.csv")
    assert titles == ['5" screen', "5 screen"]
    assert read_tables(tmp_path / "out").items.column_names == ["item_id", "title"]
    assert len(notes) == 1 and "the column '' has no real name" in notes[0]


def test_what_quotes_leave_in_doubt_is_said_of_the_first_rows_too(tmp_path):
    (tmp_path / "a.csv").write_text('id,title\nt1,"Heat\nthe film"\nt2,"Great" Cats\n')
    notes: list[str] = []
    assert read_sources(tmp_path, notes.append)[0].head.num_rows == 2
    assert "1 quoted field over several lines" in notes[0] and "a.csv, line 4: 't2" in notes[1]


def test_a_first_line_that_looks_like_values_is_said(tmp_path):
    (tmp_path / "a.csv").write_text("1,Heat,2019,1.5\n2,Ran,,2.5\n3,Up,1985,3\n")
    notes: list[str] = []
    read_sources(tmp_path, notes.append)
    assert len(notes) == 1 and "'1', '1.5' looks like a value. If the file has no header" in notes[0]
    (tmp_path / "a.csv").rename(tmp_path / "a.csv.gz")
    with pytest.raises(TableError, match=r"a\.csv\.gz cannot be read: .*\. Write it again"):
        read_sources(tmp_path)


def test_what_databases_write_for_nothing_is_said_unless_the_mapping_says_what_it_is(tmp_path):
    text = "id\ttitle\tyear\nt1\tRan\t\\N\nt2\tNULL\t1995\n"
    titles, (note,) = imported_titles(tmp_path, text)
    assert titles == ["Ran", "NULL"] and r"2 fields kept as text, first in column year, row 0: '\\N'" in note
    assert r'csv: {null_values: ["\\N", "NULL"]}' in note
    _, (note,) = imported_titles(tmp_path, "id\ttitle\tyear\nt1\tRan\t#N/A\nt2\tHeat\t1995\n")
    assert 'csv: {null_values: ["#N/A"]}' in note
    assert imported_titles(tmp_path, text, null_values=["\\N", "NULL"]) == (["Ran", None], [])


def test_a_spreadsheet_is_no_csv(tmp_path):
    (tmp_path / "items.csv").write_bytes(b"PK\x03\x04\x14\0\x06\0\x08\0\xe9\xff, title\n")
    with pytest.raises(TableError, match=r"items\.csv is not text, but a spreadsheet \(\.xlsx, "):
        imported_titles(tmp_path, None, "items.csv")


def test_a_column_in_single_quotes_is_said(tmp_path):
    text = "id,title\nt1,'Ran'\nt2,'Heat'\n"
    titles, (note,) = imported_titles(tmp_path, text, "items.csv")
    assert titles == ["'Ran'", "'Heat'"] and "2 fields in single quotes" in note
    assert imported_titles(tmp_path, text, "items.csv", quote="'") == (["Ran", "Heat"], [])


def test_a_quoted_field_behind_a_blank_is_said(tmp_path):
    titles, (note,) = imported_titles(tmp_path, 'id,title\nt1, "Heat"\nt2,Ran\n', "items.csv")
    assert titles == [' "Heat"', "Ran"] and "1 field in quotes after a blank" in note


def test_escapes_and_null_values_of_a_csv_are_as_the_mapping_says(tmp_path):
    text = "id,title\nt1,'Heat, \\'the\\' film'\nt2,NULL\n"
    options = {"quote": "'", "escape": "\\", "null_values": ["NULL"]}
    assert imported_titles(tmp_path, text, "items.csv", **options)[0] == ["Heat, 'the' film", None]
    assert imported_titles(tmp_path, "id;title\nt1;\\N\n", "items.csv", delimiter=";", null_values=["\\N"])[0] == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quote": "''"}, "csv.quote: expected one ASCII character"),
        ({"escape": "\\", "null_values": ["\\N"]}, "begins with the `escape`"),
        ({"delimiter": "::", "quote": '"'}, "need a `delimiter` of one character"),
        ({"encoding": "utf-9"}, "encoding that Python knows"),
        ({"sep": ";"}, "csv.sep: no such key"),
    ],
)
def test_a_csv_format_that_cannot_be_read_is_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        mapping_of(tmp_path, yaml.safe_dump(QUOTED | {"items": QUOTED["items"] | {"csv": options}}))


cell = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6)


@given(
    rows=st.lists(
        st.tuples(cell, cell, st.lists(cell, max_size=3)), min_size=1, max_size=6, unique_by=lambda row: row[0]
    )
)
def test_any_text_survives_a_csv(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("csv")
    with (folder / "items.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["id", "title", "path"])
        writer.writerows([[f"x{id_}", title, "|".join(path)] for id_, title, path in rows])
    (folder / "log.csv").write_text("user,item,time\nu1,x,5\n")
    data = {
        "items": {
            "files": "items.csv",
            "id": "id",
            "title": "title",
            "attributes": {"path": {"column": "path", "separator": "|"}},
        },
        "interactions": {"files": "log.csv", "user_id": "user", "item_id": "item", "timestamp": "time"},
    }
    import_mapped(ImportMapping.model_validate(data), folder, folder / "out")
    items = read_tables(folder / "out").items
    assert items["item_id"].to_pylist() == [f"x{id_}" for id_, _, _ in rows]
    assert items["title"].to_pylist() == [title or None for _, title, _ in rows]
    paths = [[part.strip() for part in "|".join(path).split("|") if part.strip()] for _, _, path in rows]
    assert [path or [] for path in items["path"].to_pylist()] == paths


@given(values=st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), max_size=6), bad=st.integers(0, 6))
def test_the_first_value_that_does_not_convert_is_the_one_named(values, bad):
    texts = [None if value is None else f" {value} " for value in values]
    assert to_type(pa.array(texts, pa.string()), pa.int64()).to_pylist() == values
    texts[bad:bad] = ["x1"]
    with pytest.raises(ConversionFault, match="row 1: ' 1e400' is not a finite number"):
        to_type(pa.array(["1e308", " 1e400"]), pa.float64())
    with pytest.raises(ConversionFault) as caught:
        to_type(pa.array([*texts, "x2"]), pa.int64())
    assert (caught.value.row, caught.value.value) == (min(bad, len(values)), "x1")


moment = st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2199, 1, 1)).map(
    lambda m: m.replace(microsecond=0)
)


@given(moments=st.lists(st.one_of(st.none(), moment), max_size=5))
def test_a_moment_is_the_same_however_it_was_written(moments):
    expected = [None if m is None else m.replace(tzinfo=UTC) for m in moments]
    seconds = [None if m is None else int(m.timestamp()) for m in expected]
    times = {
        "s": pa.array(seconds, pa.int64()),
        "ms": pa.array([None if s is None else s * 1000 for s in seconds], pa.int64()),
        "us": pa.array([None if s is None else f"{s * 10**6}" for s in seconds], pa.string()),
        "ns": pa.array([None if s is None else s * 10**9 for s in seconds], pa.int64()),
        "iso": pa.array([None if m is None else f"{m.isoformat()}Z" for m in moments], pa.string()),
        "%d.%m.%Y %H:%M:%S": pa.array(
            [None if m is None else f"{m.day}.{m.month}.{m.year:04} {m:%H:%M:%S}" for m in moments], pa.string()
        ),
    }
    for unit, column in times.items():
        assert to_time(column, unit).to_pylist() == expected, unit
    assert to_time(pa.array(seconds, pa.float64()), "s").to_pylist() == expected
    assert to_time(pa.array(moments, pa.timestamp("ms")), "s").to_pylist() == expected


@pytest.mark.parametrize(
    "text",
    ["2024-05-01 10:00:00.123456789Z", "2024-05-01 10:00:00.123456 UTC", "2024-05-01 12:00:00.1234567 +02:00",
     "2024-05-01 10:00:00,123456", "20240501T100000.123456Z"],
)  # fmt: skip
def test_iso_times_may_have_nanoseconds_commas_blanks_before_the_zone_and_no_separators(text):
    expected = datetime.datetime(2024, 5, 1, 10, 0, 0, 123456, UTC)
    assert to_time(pa.array([text]), "iso").to_pylist() == [expected]


def test_times_of_which_a_spreadsheet_has_six_digits_left_are_refused():
    assert to_time(pa.array(["1.7145648e+18"]), "ns").to_pylist() == [datetime.datetime(2024, 5, 1, 12, tzinfo=UTC)]
    with pytest.raises(ConversionFault, match=r"row 1: '1.71457E\+12' is not a time with all of its digits"):
        to_time(pa.array(["1714564800000", "1.71457E+12"]), "ms")


def test_paths_are_split_and_trimmed():
    column = pa.array([" a > b ", None, "", ">", "c"]).dictionary_encode()
    assert to_path(column, ">").to_pylist() == [["a", "b"], None, [], [], ["c"]]
    assert to_path(column.slice(4), ">").to_pylist() == [["c"]]
