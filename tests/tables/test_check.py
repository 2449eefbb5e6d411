"""The check finds every fault, names its place, and finds nothing in sound tables."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sound_world import DAY_1_S, replaced, sound_world, write_world

from pipeline.errors import TableError
from pipeline.tables import check
from pipeline.tables.check import check_tables, require_sound_tables
from pipeline.tables.read import describe, read_tables


def test_sound_tables_have_no_findings(tmp_path):
    path = write_world(tmp_path)
    assert check_tables(path) == []
    require_sound_tables(path)


def interactions(**columns: object) -> dict:
    return {"interactions": replaced("interactions", **columns)}


TWICE_HEAT = pa.concat_tables([sound_world()["items"], sound_world()["items"].slice(0, 1)])
DAY_1_MS = DAY_1_S * 1000

FAULTS = [  # (kind, table, column, row, value) of the one finding that the change must cause
    ("missing-table", "users", None, None, None, {"users": None}),
    ("missing-column", "items", "title", None, None, {"items": replaced("items", title=None)}),
    ("missing-column", "interactions", "item_id", None, None, interactions(item_id=None)),
    ("wrong-type", "users", "user_id", None, None, {"users": replaced("users", user_id=[1.0, 2.0, 3.0])}),
    ("wrong-type", "items", "title", None, None, {"items": replaced("items", title=[1, 2])}),
    ("wrong-type", "users", "extra", None, None, {"users": replaced("users", extra=[[1], [2], [3]])}),
    ("wrong-type", "users", "extra", None, None, {"users": replaced("users", extra=[b"1", b"2", b"3"])}),
    ("wrong-type", "users", "created_at", None, None, {"users": replaced("users", created_at=[0.5, 1.5, 2.5])}),
    ("duplicate-id", "users", "user_id", 2, "u1", {"users": replaced("users", user_id=["u1", "u2", "u1"])}),
    ("duplicate-id", "items", "item_id", 2, 1, {"items": TWICE_HEAT}),
    ("null-id", "users", "user_id", 2, None, {"users": replaced("users", user_id=["u1", "u2", None])}),
    ("null-id", "users", "user_id", 2, " ", {"users": replaced("users", user_id=["u1", "u2", " "])}),
    ("null-id", "interactions", "item_id", 1, None, interactions(item_id=[2, None, 1])),
    ("null-title", "items", "title", 1, None, {"items": replaced("items", title=["a", None])}),
    ("null-title", "items", "title", 0, "", {"items": replaced("items", title=["", "b"])}),
    ("null-in-list", "items", "category", 1, ["a", None], {"items": replaced("items", category=[None, ["a", None]])}),
    ("unknown-entity", "interactions", "user_id", 1, "u9", interactions(user_id=["u2", "u9", "u1"])),
    ("unknown-entity", "interactions", "item_id", 0, -2, interactions(item_id=[-2, 2, 1])),
    ("types-differ", "interactions", "item_id", None, None, interactions(item_id=["2", "2", "1"])),
    ("bad-timestamp", "interactions", "timestamp", 1, None, interactions(timestamp=[1, None, 3])),
    ("bad-timestamp", "interactions", "timestamp", 2, DAY_1_MS, interactions(timestamp=[1, 2, DAY_1_MS])),
    ("bad-timestamp", "users", "created_at", 0, 2**62, {"users": replaced("users", created_at=[2**62, None, 0])}),
    ("bad-rating", "interactions", "rating", 1, None, interactions(rating=[1, None, 3])),
    ("bad-rating", "interactions", "rating", 0, math.inf, interactions(rating=[math.inf, 2.0, 3.0])),
    ("empty-table", "interactions", None, None, None, {"interactions": sound_world()["interactions"].slice(0, 0)}),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}-{fault[1]}-{fault[2]}-{fault[4]}")
def test_each_fault_is_found_where_it_is(tmp_path, fault):
    kind, table, column, row, value, changed = fault
    path = write_world(tmp_path, **changed)
    findings = check_tables(path)
    assert [(f.kind, f.table, f.column, f.row, f.value) for f in findings] == [(kind, table, column, row, value)]
    sentence = str(findings[0])
    assert "; expected " in sentence
    for part in (table, column, None if row is None else f"row {row}", repr(value) if row is not None else None):
        assert part is None or part in sentence
    json.dumps(findings[0].as_json(), allow_nan=False)
    with pytest.raises(TableError, match="1 faults"):
        require_sound_tables(path)


def test_nan_is_no_rating(tmp_path):
    path = write_world(tmp_path, interactions=replaced("interactions", rating=[1.0, float("nan"), 3.0]))
    (finding,) = check_tables(path)
    assert (finding.kind, finding.row, str(finding.value)) == ("bad-rating", 1, "nan")
    assert finding.as_json()["value"] == "nan"


def test_text_where_times_and_ratings_belong_tells_which_rows_are_none(tmp_path):
    changed = interactions(timestamp=["2025-03-01T10:00:00Z", "yesterday", "17"], rating=["4.5", "five", None])
    found = [(f.kind, f.column, f.row, f.value) for f in check_tables(write_world(tmp_path, **changed))]
    assert found == [
        ("wrong-type", "timestamp", None, None),
        ("wrong-type", "rating", None, None),
        ("bad-timestamp", "timestamp", 1, "yesterday"),
        ("bad-rating", "rating", 1, "five"),
        ("bad-rating", "rating", 2, None),
    ]


def test_all_faults_are_reported_at_once(tmp_path):
    path = write_world(
        tmp_path,
        users=replaced("users", user_id=["u1", "u1", None]),
        items=replaced("items", title=[None, "b"]),
        interactions=replaced("interactions", item_id=[7, 2, 1], rating=[1.0, 2.0, math.inf]),
    )
    kinds = {finding.kind for finding in check_tables(path)}
    assert kinds == {"duplicate-id", "null-id", "null-title", "unknown-entity", "bad-rating"}


def test_many_faults_of_a_kind_are_cut_and_counted_over_batches_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "BATCH_ROWS", 7)
    path = write_world(tmp_path, interactions=None)
    (path / "interactions").mkdir()
    for number in range(2):
        rows = pa.table({"user_id": ["u1"] * 30, "item_id": [99] * 30, "timestamp": [5] * 30})
        pq.write_table(rows, path / "interactions" / f"{number}.parquet")
    findings = check_tables(path)
    assert len(findings) == 20
    assert [finding.row for finding in findings] == list(range(20))
    assert [finding.num_more for finding in findings] == [0] * 19 + [40]
    assert "[and 40 more rows like this]" in str(findings[-1])
    assert findings[0].file == "interactions/0.parquet"
    with pytest.raises(TableError, match="60 faults"):
        require_sound_tables(path)


def test_duplicates_over_files_name_the_file_of_the_second(tmp_path):
    path = write_world(tmp_path, users=None)
    (path / "users").mkdir()
    for number in range(2):
        pq.write_table(pa.table({"user_id": [f"u{number + 1}", "u3"]}), path / "users" / f"{number}.parquet")
    (finding,) = check_tables(path)
    assert (finding.kind, finding.file, finding.row, finding.value) == ("duplicate-id", "users/1.parquet", 1, "u3")


def test_files_of_a_table_that_differ_are_found(tmp_path):
    path = write_world(tmp_path, users=None)
    (path / "users").mkdir()
    pq.write_table(pa.table({"user_id": ["u1", "u2"], "mood": ["a", "b"]}), path / "users" / "0.parquet")
    pq.write_table(pa.table({"user_id": ["u3"], "mood": [["a"]]}), path / "users" / "1.parquet")
    assert [(f.kind, f.column, f.file) for f in check_tables(path)] == [("types-differ", "mood", "users/1.parquet")]
    pq.write_table(pa.table({"user_id": [3], "mood": ["a"]}), path / "users" / "1.parquet")
    assert [(f.kind, f.column, f.file) for f in check_tables(path)] == [("types-differ", "user_id", "users/1.parquet")]


@pytest.mark.parametrize("size", [0, 10, -5])
def test_damaged_files_are_findings(tmp_path, size):
    path = write_world(tmp_path)
    file = path / "users.parquet"
    file.write_bytes(file.read_bytes()[:size])
    assert [(f.kind, f.table, f.file) for f in check_tables(path)] == [("unreadable", "users", "users.parquet")]


def test_damage_inside_a_file_is_a_finding(tmp_path):
    path = write_world(tmp_path)
    pq.write_table(pa.table({"user_id": [f"u{n}" for n in range(5000)]}), path / "users.parquet", compression="zstd")
    content = bytearray((path / "users.parquet").read_bytes())
    content[40:400] = bytes(360)
    (path / "users.parquet").write_bytes(content)
    assert "unreadable" in {finding.kind for finding in check_tables(path)}


def test_both_a_file_and_a_folder_are_too_many(tmp_path):
    path = write_world(tmp_path)
    (path / "users").mkdir()
    pq.write_table(sound_world()["users"], path / "users" / "0.parquet")
    (finding,) = check_tables(path)
    assert "are there; expected one of them" in str(finding)


def test_a_folder_that_is_not_there_is_a_finding(tmp_path):
    assert "is not there" in str(check_tables(tmp_path / "none")[0])
    (tmp_path / "file").touch()
    assert "is not a folder" in str(check_tables(tmp_path / "file")[0])
    for use in (require_sound_tables, read_tables, describe):
        with pytest.raises(TableError, match=r"set `tables\.path` to a folder"):
            use(None)
        with pytest.raises(TableError, match=r"none is not a folder; .* Check `tables\.path`"):
            use(tmp_path / "none")


some_ids = st.one_of(
    st.lists(
        st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=3)), min_size=1, max_size=8
    ),
    st.lists(st.one_of(st.none(), st.integers(-3, 3)), min_size=1, max_size=8),
)


@settings(max_examples=60)
@given(user_ids=some_ids, rows=st.lists(st.integers(0, 9), min_size=1, max_size=8), stray=st.booleans())
def test_the_check_agrees_with_the_obvious_one(tmp_path_factory, user_ids, rows, stray):
    kind = pa.string() if any(isinstance(id_, str) for id_ in user_ids) else pa.int64()
    mentioned = [user_ids[row % len(user_ids)] for row in rows]
    if stray:
        mentioned[0] = "stray" if kind == pa.string() else 77
    users = pa.table({"user_id": pa.array(user_ids, kind)})
    mentions = pa.table(
        {"user_id": pa.array(mentioned, kind), "item_id": [1] * len(rows), "timestamp": [DAY_1_S] * len(rows)}
    )
    path = write_world(tmp_path_factory.mktemp("world"), users=users, interactions=mentions)
    expected = set()
    for row, id_ in enumerate(user_ids):
        if id_ is None or (isinstance(id_, str) and not id_.strip()):
            expected.add(("null-id", "users", row))
        if id_ is not None and id_ in user_ids[:row]:
            expected.add(("duplicate-id", "users", row))
    for row, id_ in enumerate(mentioned):
        if id_ is None or (isinstance(id_, str) and not id_.strip()):
            expected.add(("null-id", "interactions", row))
        elif id_ not in user_ids:
            expected.add(("unknown-entity", "interactions", row))
    findings = check_tables(path)
    assert {(f.kind, f.table, f.row) for f in findings} == expected
    if not findings:
        assert read_tables(path).users.num_rows == len(user_ids)


types = st.sampled_from(
    [
        *(pa.int8(), pa.uint64(), pa.float32(), pa.string(), pa.large_string(), pa.binary(), pa.bool_(), pa.null()),
        *(pa.date32(), pa.timestamp("ns"), pa.timestamp("s", "UTC"), pa.duration("s"), pa.time32("s")),
        *(pa.decimal128(10, 2), pa.list_(pa.string()), pa.list_(pa.int64()), pa.struct([("a", pa.int64())])),
        *(pa.dictionary(pa.int32(), pa.string()), pa.map_(pa.string(), pa.int64())),
    ]
)


@settings(max_examples=300)
@given(
    table=st.sampled_from(["users", "items", "interactions"]),
    column=st.sampled_from(["user_id", "item_id", "title", "timestamp", "rating", "created_at", "age"]),
    kind=types,
    num_rows=st.integers(0, 2),
)
def test_whatever_a_column_holds_check_does_not_crash_and_what_it_passes_can_be_read(
    tmp_path_factory, table, column, kind, num_rows
):
    changed = sound_world()[table].slice(0, num_rows)
    if column in changed.column_names:
        changed = changed.drop_columns(column)
    changed = changed.append_column(column, pa.nulls(num_rows, kind))
    path = write_world(tmp_path_factory.mktemp("world"), **{table: changed})
    if not check_tables(path):
        read_tables(path, as_of=None)
