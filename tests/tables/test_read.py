"""Reading: cut by date, plain types, and unchanged ids."""

import datetime
import hashlib
from dataclasses import replace
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sound_world import DAY_1, DAY_1_S, replaced, sound_world, write_world

from laserbatch.ctr.fields import fit_encoders
from laserbatch.ctr.log import read_log
from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.knowledge.questions import SideQuestions
from laserbatch.pipeline.knowledge.templates import load_template
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.tables import part_columns
from laserbatch.pipeline.tables.check import check_tables, require_sound
from laserbatch.pipeline.tables.parts import TablePart
from laserbatch.pipeline.tables.read import describe, find_exact_copies, read_tables
from laserbatch.pipeline.tables.sampled import write_sample
from laserbatch.pipeline.tables.schema import TIMESTAMP_TYPE, attribute_columns, widened
from laserbatch.pipeline.tables.streamed import log_times, open_tables
from laserbatch.pipeline.tables.times import infer_units
from laserbatch.retrieval_pools import ids

text_ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
int_ids = st.integers(-(2**63), 2**63 - 1)
# Times around the end of a day, in seconds from its beginning.
moments = st.integers(-3 * 86_400, 3 * 86_400)


def test_a_world_is_read_in_plain_types(tmp_path):
    tables = read_tables(write_world(tmp_path))
    assert tables.users.schema.field("user_id").type == pa.string()
    assert tables.items.schema.field("item_id").type == pa.int64()
    assert tables.interactions.schema.field("timestamp").type == TIMESTAMP_TYPE
    assert tables.interactions.select(["user_id", "item_id", "rating"]).to_pylist() == [
        {"user_id": "u1", "item_id": 1, "rating": 1},
        {"user_id": "u1", "item_id": 2, "rating": 5},
        {"user_id": "u2", "item_id": 2, "rating": 4},
    ]
    assert tables.items["price"].to_pylist() == [1.5, None]
    assert tables.entities("user") is tables.users
    assert attribute_columns(tables.items.schema, "items") == ["category", "price"]


def test_ids_of_another_type_than_the_entities_are_refused_where_they_are_compared(tmp_path):
    """Checks refuse such tables; code that reads them unchecked must not see users without a history."""
    tables = read_tables(write_world(tmp_path))
    users = tables.users.set_column(0, "user_id", pa.array(range(tables.users.num_rows)))
    with pytest.raises(TableError, match=r"has ids of type string, but users\.user_id has type int64"):
        replace(tables, users=users).coded("user")
    nobody = replace(tables, users=users.slice(0, 0))
    assert nobody.coded("user")[1].tolist() == [-1] * 3


@given(data=st.data(), ids=st.one_of(st.lists(text_ids, unique=True), st.lists(int_ids, unique=True)))
def test_ids_come_back_as_they_went_in_and_days_are_cut_at_their_end(tmp_path_factory, data, ids):
    kind = pa.string() if ids and isinstance(ids[0], str) else pa.int64()
    created = data.draw(st.lists(st.one_of(st.none(), moments), min_size=len(ids), max_size=len(ids)))
    num = data.draw(st.integers(0, 6)) if ids else 0
    rows = [(data.draw(st.integers(0, len(ids) - 1)), data.draw(moments)) for _ in range(num)]
    as_text = data.draw(st.booleans())
    time_type = data.draw(
        st.sampled_from([pa.timestamp("s"), pa.timestamp("ns", "UTC"), pa.timestamp("us", "Asia/Tokyo")])
    )

    def times(seconds):
        whole = pa.array([None if s is None else DAY_1_S + s for s in seconds], pa.int64())
        return whole if as_text else whole.cast(pa.timestamp("s", "UTC")).cast(time_type)

    items = pa.table({"item_id": pa.array(ids, kind), "title": ["t"] * len(ids), "created_at": times(created)})
    interactions = pa.table(
        {
            "user_id": pa.array(["u1"] * num, pa.string()),
            "item_id": pa.array([ids[index] for index, _ in rows], kind),
            "timestamp": times([moment for _, moment in rows]),
        }
    )
    path = write_world(tmp_path_factory.mktemp("world"), items=items, interactions=interactions)
    tables = read_tables(path, as_of=DAY_1.date())
    known = [id_ for id_, moment in zip(ids, created, strict=True) if moment is None or moment < 86_400]
    assert tables.items["item_id"].to_pylist() == known
    assert tables.items["item_id"].type == kind
    expected = {(moment, ids[index]) for index, moment in rows if moment < 86_400 and ids[index] in known}
    assert [
        (int(row["timestamp"].timestamp()) - DAY_1_S, row["item_id"]) for row in tables.interactions.to_pylist()
    ] == sorted(expected)  # exact copies are left out
    everything = read_tables(path)
    assert everything.items["item_id"].to_pylist() == ids
    assert everything.interactions.num_rows == len(set(rows))


def test_encodings_of_other_writers_are_read(tmp_path):
    users = pa.table(
        {
            "user_id": pa.array(["a", "b"]).dictionary_encode(),
            "large": pa.array(["x", None], pa.large_string()),
            "view": pa.array(["x", "y"], pa.string_view()),
            "path": pa.array([["x"], None], pa.large_list(pa.large_string())),
            "nothing": pa.nulls(2),
            "code": pa.array([1, 2], pa.int8()),
            "a.b": [1, 2],
        }
    )
    items = replaced("items", item_id=pa.array([1, 2], pa.int32()))
    tables = read_tables(write_world(tmp_path, users=users, items=items))
    assert tables.users.schema.field("user_id").type == pa.string()
    assert tables.users.schema.field("large").type == pa.string()
    assert tables.users.schema.field("view").type == pa.string()
    assert tables.users.schema.field("path").type == pa.list_(pa.string())
    assert tables.users.schema.field("nothing").type == pa.string()
    assert tables.users["a.b"].to_pylist() == [1, 2]
    assert tables.items.schema.field("item_id").type == pa.int64()


def test_text_of_more_than_two_gib_is_read_as_large_strings_and_shown_alike(tmp_path, monkeypatch):
    world, template = sound_world(), load_template("kar_item")
    paths = pa.array([[f"{'long ' * 20}{number}"] for number in range(world["items"].num_rows)])
    write_world(tmp_path, items=world["items"].append_column("path", paths))

    def of_night():
        tables = read_tables(tmp_path)
        codes = fit_encoders(tables.items, "item_id", np.ones(tables.items.num_rows), 1)
        fields = [encoder.encode(tables.items).codes.tolist() for encoder in codes]
        questions = SideQuestions(tables, "item", template, "a-b-c-d")
        return questions.fingerprints(0, tables.items.num_rows).to_pylist(), tables.personal, fields

    narrow = of_night()
    monkeypatch.setattr(part_columns, "MAX_BYTES", max(world[f"{side}s"][f"{side}_id"].nbytes for side in SIDES))
    assert read_tables(tmp_path).items["path"].type == pa.list_(pa.large_string()) and of_night() == narrow
    for module in (part_columns, ids):
        monkeypatch.setattr(module, "MAX_BYTES", 1)
    tables = read_tables(tmp_path, DAY_1)
    assert tables.users["user_id"].type == tables.interactions["user_id"].type.value_type == pa.large_string()
    assert of_night() == narrow


@pytest.mark.parametrize("at_once", [1, 2**25])
def test_a_wide_table_keeps_few_files_open_and_each_is_opened_a_few_times(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(part_columns, "BYTES_AT_ONCE", at_once)
    opened, open_file = [], pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda *args, **options: opened.append(args) or open_file(*args, **options))
    columns = {f"f.{n}": pa.array([None, ["a"], []] if n % 2 else [n, None, 0.5]) for n in range(300)}
    users = pa.table({"user_id": ["u1", "u2", "u3"], **columns})
    tables = read_tables(write_world(tmp_path, users=users), scratch=tmp_path)
    assert tables.users.to_pydict() == users.to_pydict()
    assert len(tables.scratch.mappings) < 100 and len(opened) < 100


def test_a_folder_of_files_is_one_table_in_name_order(tmp_path):
    path = write_world(tmp_path, users=None)
    (path / "users").mkdir()
    pq.write_table(pa.table({"user_id": ["u3"], "mood": pa.nulls(1)}), path / "users" / "1.parquet")
    pq.write_table(pa.table({"user_id": ["u1", "u2"], "mood": [1, 2]}), path / "users" / "0.parquet")
    pq.write_table(pa.table({"user_id": ["no"]}), path / "users" / ".half.parquet")
    (path / "users" / "_SUCCESS").touch()
    users = read_tables(path).users
    assert users["user_id"].to_pylist() == ["u1", "u2", "u3"]
    assert users["mood"].to_pylist() == [1, 2, None]


def test_narrow_floats_beside_float64_are_the_numbers_that_were_written(tmp_path):
    path = write_world(tmp_path, items=None, interactions=None)
    for number, kind in enumerate((pa.float64(), pa.float32(), pa.float16())):
        items = {"item_id": [f"i{number}"], "title": ["A"], "price": pa.array([11.36], kind)}
        log = {"user_id": ["u1"], "item_id": [f"i{number}"], "timestamp": [DAY_1], "rating": pa.array([4.1], kind)}
        for name, columns in {"items": items, "interactions": log}.items():
            (path / name).mkdir(exist_ok=True)
            pq.write_table(pa.table(columns), path / name / f"{number}.parquet")
    tables = read_tables(path)
    assert tables.items["price"].to_pylist() == [11.36] * 3
    for whole, kind in ((10008.0, pa.float16()), (123456792.0, pa.float32())):
        assert widened(pa.array([whole], kind), pa.float64()).to_pylist() == [whole]
    assert tables.interactions["rating"].to_pylist() == [4.1] * 3


def test_interactions_of_entities_that_are_not_yet_there_are_left_out(tmp_path):
    created = pa.array([DAY_1, DAY_1 + datetime.timedelta(days=1), None])
    path = write_world(tmp_path, users=replaced("users", created_at=created))
    tables = read_tables(path, DAY_1.date())
    assert tables.users["user_id"].to_pylist() == ["u1", "u3"]
    assert tables.interactions["user_id"].to_pylist() == ["u1", "u1"]


@pytest.mark.parametrize("name", ["users", "items", "interactions"])
def test_empty_tables_are_read_as_such(tmp_path, name):
    path = write_world(tmp_path, **{name: sound_world()[name].slice(0, 0)})
    assert getattr(read_tables(path, DAY_1.date()), name).num_rows == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"users": None}, "^users: the table is missing"),
        (
            {"items": replaced("items", title=None)},
            r"items\.title \(.*items\.parquet\): the column is missing; there are item_id, category, price",
        ),
        (
            {"users": replaced("users", user_id=[1.0, 2.0, 3.0])},
            r"users\.user_id \(.*\): the column is of type double; expected a string or",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, changed, message):
    path = write_world(tmp_path, **changed)
    with pytest.raises(TableError, match=message):
        read_tables(path)


def test_a_damaged_file_is_named(tmp_path):
    path = write_world(tmp_path)
    file = path / "items.parquet"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(TableError, match=r"items\.parquet\): the file cannot be read"):
        read_tables(path)
    with pytest.raises(TableError, match=r"items\.parquet\): the file cannot be read"):
        describe(path)
    pq.write_table(sound_world()["items"], file, compression="none", write_page_checksum=True)
    file.write_bytes(file.read_bytes().replace(b"Heat", b"Heap"))
    with pytest.raises(TableError, match=r"items\.parquet\): the file cannot be read .*CRC"):
        read_tables(path)


def test_describe_hashes_contents(tmp_path):
    path = write_world(tmp_path)
    users = describe(path)["users"]
    content = (path / "users.parquet").read_bytes()
    assert users == {"path": "users.parquet", "num_rows": 3, "sha256": hashlib.sha256(content).hexdigest()}
    (path / "users").mkdir()
    (path / "users.parquet").rename(path / "users" / "0.parquet")
    several = describe(path)["users"]
    assert (several["path"], several["num_rows"]) == ("users", 3)
    (path / "users" / "0.parquet").rename(path / "users" / "1.parquet")
    assert describe(path)["users"]["sha256"] != several["sha256"]


def test_events_are_text_in_whatever_encoding_and_a_file_may_be_without_any(tmp_path):
    path = write_world(tmp_path, interactions=None)
    (path / "interactions").mkdir()
    world = sound_world()["interactions"].drop_columns("rating")
    kinds = {"0": pa.array(["view", "click", None]).dictionary_encode(), "1": pa.nulls(3), "2": pa.array(["click"] * 3)}
    for name, events in kinds.items():
        pq.write_table(world.append_column("event", events), path / "interactions" / f"{name}.parquet")
    assert not [str(finding) for finding in check_tables(path)]
    interactions = read_tables(path, keep_duplicates=True).interactions
    assert sorted(interactions["event"].to_pylist(), key=str) == [None] * 4 + ["click"] * 4 + ["view"]
    assert read_tables(path, DAY_1.date(), keep_duplicates=True).interactions["event"].to_pylist().count("click") == 4
    pq.write_table(world.append_column("event", pa.array([1, 2, 3])), path / "interactions" / "0.parquet")
    with pytest.raises(TableError, match=r"interactions.event .*int64; expected a string; write its codes as words"):
        read_tables(path)


def test_exact_copies_of_an_interaction_are_left_out_and_counted(tmp_path, caplog):
    events = {
        "user_id": ["u1", "u2", "u1", "u1", "u1", "u1"],
        "item_id": [1] * 6,
        "timestamp": [DAY_1_S] * 5 + [DAY_1_S + 1],
        "rating": [1.0, 1.0, None, 1.0, None, 1.0],
        "event": ["view", "view", "view", "view", "buy", "view"],
    }
    write_world(tmp_path, interactions=pa.table(events))
    assert find_exact_copies(tmp_path).tolist() == [False, False, False, True, False, False]
    remaining = read_tables(tmp_path).interactions.select(["user_id", "rating", "event"]).to_pylist()
    assert [tuple(row.values()) for row in remaining] == [
        ("u1", 1.0, "view"),
        ("u1", None, "view"),
        ("u1", None, "buy"),
        ("u2", 1.0, "view"),
        ("u1", 1.0, "view"),
    ]
    assert "1 of 6 interactions are exact copies" in caplog.text
    assert read_tables(tmp_path, keep_duplicates=True).interactions.num_rows == 6


@pytest.mark.parametrize(("keep", "label", "num_left"), [(False, "all", 3), (False, "is_new", 4), (True, "all", 6)])
def test_who_streams_interactions_leaves_out_the_copies_that_nights_do(tmp_path, caplog, keep, label, num_left):
    """Whatever the file, the order of columns and the row number of a copy."""
    write_world(tmp_path, interactions=None)
    rows = pa.table(
        {
            "__index_level_0__": range(6),
            "user_id": ["u1", "u1", "u2", "u1", "u1", "u2"],
            "item_id": [1, 1, 1, 1, 1, 1],
            "timestamp": [DAY_1_S, DAY_1_S, DAY_1_S, DAY_1_S, DAY_1_S, DAY_1_S + 1],
            "is_new": [True, True, True, True, False, True],
            "tags": [[], [], [], [], [], ["a"]],
        }
    )
    (tmp_path / "interactions").mkdir()
    pq.write_table(rows.slice(0, 2), tmp_path / "interactions" / "0.parquet")
    pq.write_table(rows.slice(2).select(rows.column_names[::-1]), tmp_path / "interactions" / "1.parquet")
    opened = open_tables(tmp_path, keep)
    assert len(read_log(opened, label).users) == num_left
    assert keep or f"{6 - num_left} of 6 interactions are exact copies" in caplog.text
    assert sum(batch.num_rows for batch in opened.interactions.to_batches(["tags"])) == (6 if keep else 3)
    read = read_tables(tmp_path, keep_duplicates=keep)
    assert (read.interactions.num_rows, read.num_copies) == ((6, 0) if keep else (3, 3))


@pytest.mark.parametrize("of_second_file", [False, True])
@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("timestamp", pa.array([DAY_1_S - 5, DAY_1_S + 5])),
        ("timestamp", pa.array([(DAY_1_S - 5) * 1000, (DAY_1_S + 5) * 1000])),
        ("timestamp", pa.array([DAY_1.date(), DAY_1.date()])),
        ("timestamp", pa.array([DAY_1_S * 10**9 + 1, DAY_1_S * 10**9 + 1001], pa.timestamp("ns"))),
        ("rating", pa.array([4.5, float("nan")])),
        ("rating", pa.array([4, None]).dictionary_encode()),
        ("user_id", pa.array(["u1", "u2"], pa.string_view())),
    ],
)
def test_files_that_store_a_column_in_another_type_are_streamed_as_they_are_read(
    tmp_path, column, values, of_second_file
):
    path = write_world(tmp_path, interactions=None)
    (path / "interactions").mkdir()
    times = pa.array([DAY_1_S - 7, DAY_1_S + 7], pa.timestamp("s", "UTC"))
    rows = {"user_id": ["u1", "u2"], "item_id": [1, 2], "timestamp": times, "rating": [5, 1]}
    files = [pa.table(rows), pa.table(rows | {column: values})]
    for number, table in enumerate(files if of_second_file else files[::-1]):
        pq.write_table(table, path / "interactions" / f"{number}.parquet")
    require_sound(check_tables(path), path)
    streamed = pa.Table.from_batches(open_tables(path, True).interactions.to_batches(list(rows)))
    read = read_tables(path, keep_duplicates=True).interactions.cast(streamed.schema)
    by_row = [(name, "ascending") for name in rows]
    assert streamed.sort_by(by_row).equals(read.sort_by(by_row))
    assert streamed.schema.field("timestamp").type == TIMESTAMP_TYPE


@pytest.mark.parametrize(("unit", "per_second"), [("milli", 10**3), ("micro", 10**6), ("nano", 10**9)])
def test_infer_units_are_in_the_unit_that_all_values_leave_and_it_is_said(tmp_path, caplog, unit, per_second):
    """For all readers: checks, nights, and streams."""
    path, seconds = write_world(tmp_path, interactions=None), [DAY_1_S - 5, DAY_1_S, None, DAY_1_S + 86_400]
    (path / "interactions").mkdir()
    for name, times in (("0", seconds[:3]), ("1", seconds[3:])):
        events = {"user_id": ["u1"] * len(times), "item_id": [1] * len(times), "rating": [5] * len(times)}
        events["timestamp"] = [time and time * per_second for time in times]
        table = pa.table(events).filter(pc.is_valid(pa.array(times)))
        pq.write_table(table, path / "interactions" / f"{name}.parquet", write_statistics=name == "0")
    (finding,) = check_tables(path)
    assert (finding.kind, finding.column, finding.is_warning) == ("inferred-unit", "timestamp", True)
    assert f"read as {unit}seconds since 1970 (2025-02-28 to 2025-03-02)" in finding.found
    known = [time for time in seconds if time is not None]
    assert read_tables(path).interactions["timestamp"].cast("int64").to_pylist() == [time * 10**6 for time in known]
    assert read_tables(path, DAY_1.date()).interactions.num_rows == 2
    opened = open_tables(path)
    assert read_log(opened, "all").times_us.tolist() == [time * 10**6 for time in known]
    assert f"read as {unit}seconds" in caplog.text
    (tmp_path / "sample").mkdir()
    write_sample(opened, tmp_path / "sample", DAY_1.date(), 9, 9)
    assert pc.max(read_tables(tmp_path / "sample").interactions["timestamp"]).as_py().timestamp() == DAY_1_S + 86_400


@pytest.mark.parametrize(
    ("times", "reading"),
    [
        ([20240531, 20240601, 20240531], "dates such"),
        ([14030231, 14030301, 14030231], "dates such"),
        ([45443, 45444, 45443], "days, as"),
    ],
)
def test_integers_that_are_dates_or_days_are_no_seconds(tmp_path, times, reading):
    path = write_world(tmp_path, interactions=replaced("interactions", timestamp=times))
    message = rf"interactions\.timestamp \(.*\): the integers from {min(times)} to {max(times)} look like {reading}"
    with pytest.raises(TableError, match=message):
        require_sound(check_tables(path), path)
    for read in (read_tables, lambda path: read_log(open_tables(path), "all")):
        with pytest.raises(TableError, match=message):
            read(path)


def test_both_ends_of_a_span_of_dates_are_named_by_their_files(tmp_path):
    files = [tmp_path / f"{number}.parquet" for number in range(3)]
    for path, time in zip(files, (20240601, 20240531, 20240602), strict=True):
        pq.write_table(pa.table({"timestamp": [time]}), path)
    (finding,) = infer_units([TablePart(path, "interactions", str(path)) for path in files])
    assert "1.parquet): the integers from 20240531 to 20240602 (in " in str(finding)
    assert "2.parquet) look like dates" in str(finding)
    partitions = {"created_at": pa.scalar(20240531)}  # of a folder created_at=20240531
    assert "look like dates" in str(infer_units([TablePart(files[0], "users", "0.parquet", partitions)])[0])


@pytest.mark.parametrize("as_of", [None, DAY_1.date()])
def test_milliseconds_in_one_file_of_a_table_are_refused_and_named(tmp_path, as_of):
    path = write_world(tmp_path, interactions=None)
    (path / "interactions").mkdir()
    for name, factor in (("0", 1), ("1", 1000)):
        events = {"user_id": ["u1"] * 2, "item_id": [1, 2], "timestamp": [DAY_1_S, DAY_1_S * factor]}
        pq.write_table(pa.table(events), path / "interactions" / f"{name}.parquet")
    with pytest.raises(TableError, match=r"interactions\.timestamp \(.*1\.parquet, row 1\): the time is out of range"):
        read_tables(path, as_of)
    events = {"user_id": ["u1"], "item_id": [1], "timestamp": pa.array([2**63 - 1], pa.timestamp("us"))}
    for file in (path / "interactions").iterdir():
        pq.write_table(pa.table(events), file)
    with pytest.raises(TableError, match=r"0\.parquet, row 0\): the time is out of range: .* and 2200; correct"):
        read_tables(path, as_of)
    with pytest.raises(TableError, match=r"row 7: found '9223372036854775807 \(.*1900 and 2200\. Rows are"):
        log_times(pa.array([2**63 - 1], pa.timestamp("us")), "s", path, 7)


def test_lists_are_read_in_batches_since_arrow_reads_at_most_2_gib_of_them_at_once(tmp_path):
    pq.write_table(pa.table({"tags": [["a"]] * 70_000}), tmp_path / "items.parquet")
    tags = TablePart(tmp_path / "items.parquet", "items", "items.parquet").read(["tags"])["tags"]
    assert [len(chunk) for chunk in tags.chunks] == [65_536, 4_464]


def test_lists_of_more_than_arrow_reads_at_once_are_read_in_smaller_batches(tmp_path, monkeypatch):
    values = pa.array([[str(number)] for number in range(11)])
    pq.write_table(pa.table({"tags": values}), tmp_path / "x.parquet", row_group_size=7)
    stored = pq.ParquetFile.iter_batches

    def iter_batches(file, batch_size, **options):
        for rows in stored(file, batch_size, **options):
            if rows.num_rows > 2 and "5" in str(rows["tags"]):
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")
            yield rows

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    part = TablePart(tmp_path / "x.parquet", "items", "x.parquet")
    assert part.read(["tags"])["tags"].combine_chunks() == values
    assert next(rows.num_rows for rows in part.batches(batch_size=3)) == 3


def test_a_file_is_opened_twice_to_read_it_and_twice_to_check_it(tmp_path):
    path = write_world(tmp_path)
    with mock.patch.object(pq, "ParquetFile", side_effect=pq.ParquetFile) as opened:
        read_tables(path)
        check_tables(path)
    assert opened.call_count == 4 * 3
