"""The check finds every fault, names its place, and accepts sound tables."""

import datetime
import json
import math
import os
import resource
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sound_world import DAY_1, DAY_1_S, replaced, sound_world, write_world

from laserbatch.pipeline.errors import ConfigError, TableError, first_line
from laserbatch.pipeline.knowledge.histories import labels_of
from laserbatch.pipeline.tables import check
from laserbatch.pipeline.tables.check import check_tables, require_sound
from laserbatch.pipeline.tables.read import describe, read_tables
from laserbatch.pipeline.tables.settings import TablesSettings


def test_what_a_library_says_ends_without_a_stop_of_its_own():
    assert first_line(OSError("magic bytes not found.\nmore")) == "magic bytes not found"
    assert first_line(OSError()) == "OSError"


def test_sound_tables_have_no_findings(tmp_path):
    path = write_world(tmp_path)
    assert check_tables(path) == []
    require_sound([], path)


def interactions(**columns: object) -> dict:
    return {"interactions": replaced("interactions", **columns)}


TWICE_HEAT = pa.concat_tables([sound_world()["items"], sound_world()["items"].slice(0, 1)])
DAY_1_MS = DAY_1_S * 1000
END_MS = (2**63 - 1) // 1000 * 1000  # the last second that Parquet holds
NOT_UTF8 = pa.array([b"Heat", b"\xff"]).view(pa.string())

FAULTS = [  # (kind, table, column, row, value) of the expected finding, and the change that causes it
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
    ("unknown-entity", "interactions", "user_id", 1, "u9", interactions(user_id=["u2", "u9", "u8"])),
    ("unknown-entity", "interactions", "item_id", 0, -2, interactions(item_id=[-2, 2, -1])),
    ("types-differ", "interactions", "item_id", None, None, interactions(item_id=["2", "2", "1"])),
    ("bad-timestamp", "interactions", "timestamp", 1, None, interactions(timestamp=[DAY_1_S, None, DAY_1_S])),
    ("bad-timestamp", "interactions", "timestamp", 2, DAY_1_MS, interactions(timestamp=[DAY_1_S, DAY_1_S, DAY_1_MS])),
    ("bad-timestamp", "users", "created_at", 0, 2**62, {"users": replaced("users", created_at=[2**62, None, DAY_1_S])}),
    ("bad-timestamp", "users", "created_at", 0, f"{END_MS} (timestamp[ms])",
     {"users": replaced("users", created_at=pa.array([END_MS, None, None], pa.timestamp("ms")))}),
    ("bad-text", "items", "title", 1, b"\xff", {"items": replaced("items", title=NOT_UTF8)}),
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
    with pytest.raises(TableError, match=r"^[12] faults? in the tables"):
        require_sound(findings, path)


def test_who_left_the_tables_may_stay_in_the_log(tmp_path):
    path = write_world(tmp_path, **interactions(user_id=["u2", "u9", "u1"]))
    (finding,) = check_tables(path)
    assert finding.is_warning and finding.kind == "unknown-entity" and (finding.row, finding.value) == (1, "u9")
    assert finding.expected == "ids of users, such as 'u1', 'u2', 'u3'"
    require_sound([finding], path)
    assert set(read_tables(path, as_of=datetime.date(2030, 1, 1)).interactions["user_id"].to_pylist()) == {"u1", "u2"}


def test_of_events_some_have_a_rating(tmp_path):
    events = {"rating": [None, float("nan"), 3.0], "event": ["view", "view", "rate"]}
    assert not check_tables(write_world(tmp_path / "some", interactions=replaced("interactions", **events)))
    without = replaced("interactions", **(events | {"rating": pa.nulls(3)}))
    (finding,) = check_tables(write_world(tmp_path / "none", interactions=without))
    assert (finding.kind, finding.column) == ("wrong-type", "rating")  # the advice is to leave the column out
    infinite = replaced("interactions", **(events | {"rating": [math.inf, 1.0, None]}))
    (finding,) = check_tables(write_world(tmp_path / "infinite", interactions=infinite))
    assert (finding.kind, finding.row) == ("bad-rating", 0)


def test_a_rating_that_no_float_holds_exactly_is_one(tmp_path):
    path = write_world(tmp_path, interactions=replaced("interactions", rating=[10**18 + 1, 1, 2]))
    assert check_tables(path, positive_rating=4) == []
    assert labels_of(read_tables(path).interactions, {}).interacted == "rated"


def test_a_missing_rating_is_a_warning_unless_most_are_missing(tmp_path):
    path = write_world(tmp_path / "one", interactions=replaced("interactions", rating=[1.0, float("nan"), 3.0]))
    (finding,) = check_tables(path)
    assert (finding.kind, finding.row, str(finding.value)) == ("no-rating", 1, "nan") and finding.is_warning
    assert [replace(finding, value=value).as_json()["value"] for value in (math.nan, 4.5)] == ["nan", 4.5]
    require_sound([finding], path)
    assert read_tables(path).interactions["rating"].null_count == 1
    path = write_world(tmp_path / "two", interactions=replaced("interactions", rating=[None, None, 3]))
    (finding,) = check_tables(path)
    assert (finding.kind, finding.num_rows) == ("no-rating", 2) and not finding.is_warning


def test_text_where_times_and_ratings_belong_is_told_once_with_what_converts_it(tmp_path):
    changed = interactions(timestamp=["2025-03-01T10:00:00Z", "yesterday", "17"], rating=["4.5", "five", None])
    advice = [(f.kind, f.column, f.advice) for f in check_tables(write_world(tmp_path, **changed))]
    assert advice == [
        ("wrong-type", "timestamp", "`laserbatch data import` converts it, if its mapping names the `unit`"),
        ("wrong-type", "rating", "`laserbatch data import` converts it"),
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


def test_rows_with_one_fault_are_one_line_that_counts_them_over_batches_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "BATCH_ROWS", 7)
    path = write_world(tmp_path, interactions=None)
    (path / "interactions").mkdir()
    for number in range(2):
        rows = pa.table({"user_id": ["u1"] * 30, "item_id": [99] * 30, "timestamp": [DAY_1_S] * 30})
        pq.write_table(rows, path / "interactions" / f"{number}.parquet")
    (finding,) = check_tables(path)
    assert (finding.row, finding.num_rows, finding.file) == (0, 60, "interactions/0.parquet")
    assert "interactions.item_id (interactions/0.parquet, 60 rows, first row 0): items has no" in str(finding)
    with pytest.raises(TableError, match="60 faults"):
        require_sound([finding], path)


def test_duplicates_over_files_name_the_file_of_the_second(tmp_path):
    path = write_world(tmp_path, users=None)
    (path / "users").mkdir()
    for number in range(2):
        pq.write_table(pa.table({"user_id": [f"u{number + 1}", "u3"]}), path / "users" / f"{number}.parquet")
    (finding,) = check_tables(path)
    assert (finding.kind, finding.file, finding.row, finding.value) == ("duplicate-id", "users/1.parquet", 1, "u3")


def test_a_table_may_have_more_files_than_a_process_may_have_open(tmp_path):
    path = write_world(tmp_path, users=None)
    (path / "users").mkdir()
    for number in range(1, 60):
        pq.write_table(pa.table({"user_id": [f"u{number}"]}), path / "users" / f"{number}.parquet")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
        assert check_tables(path) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_files_of_a_table_that_differ_are_found(tmp_path):
    path = write_world(tmp_path, users=None)
    (path / "users").mkdir()
    pq.write_table(pa.table({"user_id": ["u1", "u2"], "mood": ["a", "b"]}), path / "users" / "0.parquet")
    pq.write_table(pa.table({"user_id": ["u3"], "mood": [["a"]]}), path / "users" / "1.parquet")
    assert [(f.kind, f.column, f.file) for f in check_tables(path)] == [("types-differ", "mood", "users/1.parquet")]
    pq.write_table(pa.table({"user_id": [3], "mood": ["a"]}), path / "users" / "1.parquet")
    assert [(f.kind, f.column, f.file) for f in check_tables(path)] == [("types-differ", "user_id", "users/1.parquet")]


def test_a_folder_that_is_not_there_is_a_finding(tmp_path):
    assert "is not there" in str(check_tables(tmp_path / "none")[0])
    (tmp_path / "file").touch()
    assert "is not a folder" in str(check_tables(tmp_path / "file")[0])
    with pytest.raises(ConfigError, match=r"set tables\.path in the configuration"):
        _ = TablesSettings().required_path
    for use in (read_tables, describe):
        with pytest.raises(TableError, match=r"none is not there; expected a folder"):
            use(tmp_path / "none")


some_ids = st.one_of(
    st.lists(
        st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=3)), min_size=1, max_size=8
    ),
    st.lists(st.one_of(st.none(), st.integers(-3, 3)), min_size=1, max_size=8),
)


@given(user_ids=some_ids, rows=st.lists(st.integers(0, 9), min_size=1, max_size=8), stray=st.booleans())
def test_the_check_agrees_with_the_obvious_one(tmp_path_factory, user_ids, rows, stray):
    kind = pa.string() if any(isinstance(id_, str) for id_ in user_ids) else pa.int64()
    mentioned = [user_ids[row % len(user_ids)] for row in rows]
    if stray:
        mentioned[0] = "stray" if kind == pa.string() else 77
    users = pa.table({"user_id": pa.array(user_ids, kind)})
    times = [DAY_1_S + 86_400 * (row % 2) for row in rows]
    mentions = pa.table({"user_id": pa.array(mentioned, kind), "item_id": [1] * len(rows), "timestamp": times})
    path = write_world(tmp_path_factory.mktemp("world"), users=users, interactions=mentions)
    expected: list[tuple[str, str, int]] = []
    for row, id_ in enumerate(user_ids):
        if id_ is None or (isinstance(id_, str) and not id_.strip()):
            expected.append(("null-id", "users", row))
        if id_ is not None and id_ in user_ids[:row]:
            expected.append(("duplicate-id", "users", row))
    for row, id_ in enumerate(mentioned):
        if id_ is None or (isinstance(id_, str) and not id_.strip()):
            expected.append(("null-id", "interactions", row))
        elif id_ not in user_ids:
            expected.append(("unknown-entity", "interactions", row))
    findings = check_tables(path)
    actual = {(f.kind, f.table): (f.row, f.num_rows) for f in findings}
    assert len(actual) == len(findings)
    assert findings == check_tables(path, logged_ids=read_tables(path, DAY_1.date()).logged_ids)
    rows_of = {key: [row for *other, row in expected if tuple(other) == key] for key in {e[:2] for e in expected}}
    assert actual == {key: (min(rows), len(rows)) for key, rows in rows_of.items()}
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
    if all(finding.is_warning for finding in check_tables(path)):
        for as_of in (None, DAY_1.date()):
            read_tables(path, as_of)


def findings_of(path, **limits) -> list[tuple[str, str | None, int, bool]]:
    return [(f.kind, f.column, f.num_rows, f.is_warning) for f in check_tables(path, **limits)]


def test_a_column_twice_is_a_fault(tmp_path):
    for table, column in (("users", "mood"), ("users", "user_id"), ("interactions", "rating")):
        twice = sound_world()[table]
        path = write_world(tmp_path / column, **{table: twice.append_column(column, twice[column])})
        assert findings_of(path) == [("duplicate-column", column, 0, False)]


def test_files_with_other_columns_are_a_fault_that_names_both_and_the_column(tmp_path):
    path = write_world(tmp_path, users=None, interactions=None)
    for table in ("users", "interactions"):
        (path / table).mkdir()
        rows = sound_world()[table]
        pq.write_table(rows.slice(0, 2), path / table / "0.parquet")
        pq.write_table(rows.slice(2).drop_columns(rows.column_names[-1]), path / table / "1.parquet")
    pq.write_table(sound_world()["users"].slice(0, 0), path / "users" / "2.parquet")
    missing = "the column is missing, but it is in"
    assert [str(finding).split(";")[0] for finding in check_tables(path)] == [
        f"users.mood (users/1.parquet): {missing} users/0.parquet",
        f"interactions.rating (interactions/1.parquet): {missing} interactions/0.parquet",
    ]
    extra = sound_world()["interactions"].append_column("source", pa.array(["mail"] * 3))
    pq.write_table(extra, path / "interactions" / "1.parquet")  # no run reads this column
    assert findings_of(path) == [("columns-differ", "mood", 0, False)]


def test_a_file_that_cannot_be_read_makes_no_other_rows_wrong(tmp_path):
    path = write_world(tmp_path, users=None)
    (path / "users").mkdir()
    pq.write_table(sound_world()["users"].slice(0, 1), path / "users" / "0.parquet")
    (path / "users" / "1.parquet").write_bytes(b"PAR1")
    assert findings_of(path) == [("unreadable", None, 0, False)]


def test_unsigned_ids_are_read_and_those_that_do_not_fit_are_named(tmp_path):
    for top, faults in ((9, []), (2**64 - 1, ["bad-id", "bad-id"])):
        ids = pa.array([1, 2, top], pa.uint64())
        users, mentions = replaced("users", user_id=ids), interactions(user_id=ids)
        path = write_world(tmp_path / str(top), users=users, **mentions)
        assert [finding.kind for finding in check_tables(path)] == faults
    assert read_tables(tmp_path / "9").users["user_id"].to_pylist() == [1, 2, 9]


def test_blank_titles_are_warnings_up_to_the_share_that_may_fail(tmp_path):
    path = write_world(tmp_path, items=replaced("items", title=["", "b"]))
    assert findings_of(path, max_failed_share=0.5) == [("null-title", "title", 1, True)]
    assert findings_of(path, max_failed_share=0.4) == [("null-title", "title", 1, False)]


def test_infinite_attributes_are_warnings_and_advice_about_times_fits_their_type(tmp_path):
    endless = pa.array([10**15, 2**63 - 1, None], pa.timestamp("us"))
    users = replaced("users", extra=[1.0, 2.0, -math.inf], until=endless, created_at=endless)
    found, number, time_ = map(str, check_tables(write_world(tmp_path, users=users)))
    assert "users.created_at (users.parquet, row 1): the time is out of range: '9223372036854775807 (" in found
    assert "milliseconds" not in found and "integers" not in found and "created_at may be null" in found
    assert number.startswith("warning: users.extra (users.parquet, row 2): the number is infinite: -inf;")
    assert time_.startswith("warning: users.until (users.parquet, row 1): the time is infinite or out of range: ")


def test_row_numbers_of_pandas_are_no_attribute(tmp_path):
    path = write_world(tmp_path, users=replaced("users", __index_level_0__=[5, 9, 2]))
    assert findings_of(path) == [("unnamed", "__index_level_0__", 0, True)]
    assert "__index_level_0__" not in read_tables(path).users.column_names


def test_html_in_titles_and_attributes_is_a_warning(tmp_path):
    items = replaced("items", title=["Tom &amp; Jerry", "R&B; 1 < 2 > 0 <3"], about=["<P class='a'>Soft", "warm</p>"])
    items = items.append_column("notes", pa.array([None, ["a", "&quot;b"]]))
    title, about, notes = map(str, check_tables(write_world(tmp_path, items=items)))
    assert title.startswith(
        "warning: items.title (items.parquet, row 0): the text has HTML tags or entities: 'Tom &amp"
    )
    assert about.startswith("warning: items.about (items.parquet, 2 rows, first row 0): ")
    assert notes.startswith("warning: items.notes (items.parquet, row 1): ")


def test_odd_times_are_warnings(tmp_path):
    ahead_s = int(time.time()) + 400 * 86_400
    path = write_world(tmp_path, **interactions(timestamp=[-5, 0, ahead_s]))
    assert findings_of(path) == [("odd-timestamp", "timestamp", 3, True)]
    path = write_world(tmp_path, **interactions(timestamp=[DAY_1_S, DAY_1_S, ahead_s]))
    assert findings_of(path) == [("odd-timestamp", "timestamp", 1, True)]
    require_sound(check_tables(path), path)
    path = write_world(tmp_path, **interactions(timestamp=pa.array([0, 5, DAY_1_S], pa.timestamp("s", "UTC"))))
    assert (
        "2 rows, first row 0): the time is before 1971 or more than a year ahead: '1970-01-01 00:00:00+00:00';"
        in str(check_tables(path)[0])
    )


@pytest.mark.parametrize(
    ("ratings", "message"),
    [([0, 1, 0], "all ratings are from 0 to 1"), ([5.0] * 3, "all ratings are 5"), ([True] * 3, "all ratings are 1"),
     (None, "there is no column"), ([3.5, 4, 1], None)],
)  # fmt: skip
def test_interactions_of_one_class_are_a_warning(tmp_path, ratings, message):
    path = write_world(tmp_path, **interactions(rating=ratings))
    assert check_tables(path) == []
    findings = check_tables(path, positive_rating=4.0)
    assert [(f.kind, f.is_warning, f.found[: len(message)]) for f in findings] == (
        [("one-class", True, message)] if message else []
    )
