"""Folders in the layouts of exporters: partition names become columns, or are refused; ignored files are named."""

import os
import re

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from sound_world import sound_world, write_world

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.check import check_tables
from laserbatch.pipeline.tables.layout import list_pattern
from laserbatch.pipeline.tables.mapping import import_mapped
from laserbatch.pipeline.tables.parts import partition_type
from laserbatch.pipeline.tables.read import describe, read_tables
from laserbatch.pipeline.tables.settings import ImportMapping
from laserbatch.pipeline.tables.streamed import iter_rows, open_tables

EVENTS = sound_world()["interactions"]


def write(rows: pa.Table, path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path)


@pytest.fixture
def folder(tmp_path):
    """Tables with an empty folder of interactions."""
    write_world(tmp_path / "t", interactions=None)
    (tmp_path / "t" / "interactions").mkdir()
    return tmp_path / "t" / "interactions"


def warnings_of(folder) -> list[str]:
    findings = check_tables(folder.parent)
    assert all(finding.is_warning for finding in findings), findings
    return [finding.found for finding in findings]


def test_partitions_and_sub_folders_are_read_beside_other_files(folder):
    write(EVENTS.slice(0, 1), folder / "part-old.parquet")
    write(EVENTS.slice(1, 1), folder / "date=2025-02-28" / "part-0.snappy.parquet")
    write(EVENTS.slice(2, 1), folder / "2025" / "03" / "01" / "part-0.parq")
    write(EVENTS.slice(0, 0), folder / "date=2025-02-27" / "000000_0")  # a file name of Hive and Athena
    assert warnings_of(folder) == []
    assert read_tables(folder.parent).interactions.num_rows == open_tables(folder.parent).interactions.count_rows() == 3
    assert describe(folder.parent)["interactions"]["num_rows"] == 3
    assert describe(folder.parent)["interactions"]["path"] == "interactions"


def test_columns_of_partitions_are_read_in_one_type(folder):
    rows = EVENTS.drop_columns("rating")
    for row, (event, rating) in enumerate([("add%20to%2Fcart", "4"), ("caf%C3%A9", "4.5"), ("caf%C3%A9", None)]):
        rating = "__HIVE_DEFAULT_PARTITION__" if rating is None else rating
        write(rows.slice(row, 1), folder / f"event={event}" / f"rating={rating}" / "x.parquet")
    assert warnings_of(folder) == []
    tables = read_tables(folder.parent)
    read = dict(zip(tables.interactions["item_id"].to_pylist(), tables.interactions["rating"].to_pylist(), strict=True))
    assert sorted(tables.interactions["rating"].to_pylist(), key=str) == [4.0, 4.5, None] and len(read) == 2
    assert set(tables.interactions["event"].cast(pa.string()).to_pylist()) == {"add to/cart", "café"}
    streamed = pa.Table.from_batches(open_tables(folder.parent).interactions.to_batches(["event", "rating"]))
    assert sorted(streamed["event"].to_pylist()) == ["add to/cart", "café", "café"]
    assert streamed["rating"].to_pylist().count(None) == 1


@pytest.mark.parametrize(
    ("texts", "kind"),
    [(["2025", "-3"], pa.int64()), (["01234", "99999"], pa.string()), (["2025-02-28"], pa.date32()),
     (["2025-02-30"], pa.string()), (["20250228"], pa.int64()), (["4", "4.5"], pa.float64()), (["1.10"], pa.string()),
     (["true"], pa.string()), ([], pa.string()), ([str(2**63)], pa.string()), (["٣"], pa.string()),
     (["nan"], pa.string()), (["1", "x"], pa.string())],
)  # fmt: skip
def test_a_type_of_partitions_loses_no_character(texts, kind):
    assert partition_type(texts) == kind


def test_partitions_are_attributes_of_entities(folder, tmp_path):
    write(EVENTS, folder / "x.parquet")
    users = folder.parent / "users.parquet"
    rows = pq.read_table(users)
    users.unlink()
    for row, zip_code in enumerate(["01234", "99999", "01234"]):
        write(rows.slice(row, 1), folder.parent / "users" / f"zip={zip_code}" / f"{row}.parquet")
    assert warnings_of(folder) == []
    assert read_tables(folder.parent).users["zip"].to_pylist() == ["01234", "01234", "99999"]  # in the order of names


def test_a_column_in_the_file_and_in_the_name_of_its_folder_has_one_value(folder):
    write(EVENTS.append_column("event", pa.array(["view"] * 3)), folder / "event=view" / "x.parquet")
    assert warnings_of(folder) == []
    write(EVENTS.append_column("event", pa.array(["view", "buy", "view"])), folder / "event=view" / "x.parquet")
    (finding,) = check_tables(folder.parent)
    assert (finding.kind, finding.column, finding.row, finding.value) == ("partition-differs", "event", 1, "buy")
    with pytest.raises(TableError, match=r"interactions\.event .*x\.parquet, row 1.*'buy'; expected 'view'"):
        read_tables(folder.parent)


@pytest.mark.parametrize(
    ("name", "message"),
    [("date=1/date=2", "repeats the column date of"), ("=1", "names no column"), ("city=%E9", "UTF-8")],
)
def test_names_of_partitions_that_cannot_be_read_are_refused(folder, name, message):
    write(EVENTS, folder / name / "x.parquet")
    (finding,) = check_tables(folder.parent)
    assert finding.kind == "bad-partition" and message in str(finding)


def test_what_is_left_out_is_named(folder, caplog):
    write(EVENTS, folder / "date=1" / "part-0.parquet")
    write(EVENTS, folder / "_old" / "part-0.parquet")
    write(EVENTS, folder / ".part-1.parquet")
    write(EVENTS, folder / "part-0.parquet.bak")
    (folder / "part-2.parquet").touch()
    (folder / "part-3.csv.gz").write_bytes(b"x")
    (folder / "newest").symlink_to(folder / "date=1")
    for name in ("_SUCCESS", "_common_metadata", "date=1_$folder$"):  # files without rows
        (folder / name).touch()
    warnings = " | ".join(warnings_of(folder))
    for name in ("_old", ".part-1.parquet", "part-0.parquet.bak", "part-2.parquet", "part-3.csv.gz", "newest"):
        assert os.fspath(folder / name) in warnings
    assert open_tables(folder.parent).interactions.count_rows() == 3
    assert all(sentence in caplog.text for sentence in warnings.split(" | "))
    assert "_SUCCESS" not in warnings and "_common_metadata" not in warnings and "$folder$" not in warnings
    assert read_tables(folder.parent).interactions.num_rows == 3
    (folder / "date=1" / "part-0.parquet").unlink()
    assert "is empty: " in str(next(finding for finding in check_tables(folder.parent)))


@pytest.mark.parametrize(
    ("name", "message"),
    [("_temporary/0", "_temporary holds"), (".spark-staging-1/x", "staging-1 holds"), (".hive-staging_1/x", "holds"),
     ("__magic_job-1/x", "holds"), ("+tmp/x", "holds"), ("date=1/_temporary/0/x", "date=1/_temporary holds"),
     ("part-1.parquet.tmp", "still being written"), ("part-1.parquet._COPYING_", "still being written"),
     (".part-0-0.inprogress.5f-a", "still being written"), (".part-1.parquet.Ab12Cd", "still being written"),
     ("part-1.parquet_.gstmp", "still being written"), ("date=1/part-1.parquet.crdownload", "still being written"),
     (".part-1.parquet.crc", "checksum of a missing file"), (".part-0.parquet.crc", "does not fit"),
     ("_started_12", "has no _committed_"), ("_committed_12", "a complete JSON"), ("date=2/_SUCCESS", "date=1 has no"),
     ("../users/_SUCCESS", "interactions has no _SUCCESS, but .*users next to it has"), ("@link", "missing file")],
)  # fmt: skip
def test_what_is_not_finished_is_refused(folder, name, message):
    write(EVENTS, folder / "part-0.parquet")
    for date in (1, 2):
        write(EVENTS, folder / f"date={date}" / "part-0.parquet")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if name == "@link":
        (folder / "part-9.parquet").symlink_to(folder / "gone.parquet")
    else:
        (folder / name).write_bytes(b"crc\0\0\0\2\0abcd" if name.endswith(".crc") else b"")
    findings = [finding for finding in check_tables(folder.parent) if finding.kind == "unfinished"]
    assert len(findings) == 1 and re.search(message, str(findings[0]))
    with pytest.raises(TableError, match="wait until its writer has ended"):
        list_pattern(folder.parent, "interactions/**/*", "interactions")
    with pytest.raises(TableError, match="wait until its writer has ended"):
        list_pattern(folder.parent, "interactions", "interactions")


def test_what_finished_writers_leave_beside_their_files_is_no_fault(folder):
    write(EVENTS, folder / "part-0.parquet")
    write(EVENTS, folder / "part-tid-1-old.parquet")
    num_sums = -(-(folder / "part-0.parquet").stat().st_size // 512)
    (folder / ".part-0.parquet.crc").write_bytes(b"crc\0\0\0\2\0" + b"sums" * num_sums)
    for name in ("_SUCCESS", "../users/_SUCCESS", "_started_12", ".hive-staging_hive_1/-ext-1/empty/"):
        path = folder / name
        path.mkdir(parents=True) if name.endswith("/") else path.parent.mkdir(exist_ok=True)
        path.is_dir() or path.touch()
    (folder / "_committed_12").write_text('{"added": [], "removed": ["part-tid-1-old.parquet"]}')
    replaced, hidden = warnings_of(folder)
    assert "replaced by a later commit" in replaced + hidden and "hive-staging" in replaced + hidden
    assert read_tables(folder.parent).interactions.num_rows == 3


def test_of_a_missing_table_files_of_like_names_are_shown(folder):
    folder.rmdir()
    (folder.parent / "interactions.parquet._COPYING_").touch()
    (finding,) = check_tables(folder.parent)
    assert "the table is missing; files with similar names are interactions.parquet._COPYING_" in finding.found


def test_links_are_followed_to_where_nothing_is_read_otherwise(folder, tmp_path):
    write(EVENTS.slice(0, 2), folder / "..2025_03_01" / "part-0.parquet")  # like a Kubernetes volume
    (folder / "part-0.parquet").symlink_to(folder / "..2025_03_01" / "part-0.parquet")
    write(EVENTS.slice(2), tmp_path / "elsewhere" / "x.parquet")
    (folder / "date=1").symlink_to(tmp_path / "elsewhere")
    assert [text.count("2025_03_01") for text in warnings_of(folder)] == [1]
    assert read_tables(folder.parent).interactions.num_rows == 3


def test_an_import_reads_a_folder_with_its_partitions_and_names_what_it_leaves_out(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write(sound_world()["items"], source / "items" / "items.parquet.gzip")  # a file name of pandas' documentation
    for row in range(3):
        write(EVENTS.slice(row, 1).drop_columns("timestamp"), source / "log" / f"day=2025-03-0{row + 1}" / "x.parquet")
    (source / "log" / "README").write_text("rows")
    (source / "users.csv").write_text("user_id,age\nu1,1\n")
    mapping = {
        "items": {"files": "items", "id": "item_id", "title": "title"},
        "interactions": {"files": "log", "user_id": "user_id", "item_id": "item_id", "timestamp": "day"},
    }
    notes: list[str] = []
    import_mapped(ImportMapping.model_validate(mapping), source, out, note=notes.append)
    times = pc.strftime(read_tables(out).interactions["timestamp"], "%Y-%m-%d").to_pylist()
    assert times == ["2025-03-01", "2025-03-02", "2025-03-03"]
    assert [note.rpartition("/")[2] for note in notes] == ["README", "users.csv"]
    mapping["interactions"]["files"] = "log/*/*.parquet"
    (source / "log" / "day=2025-03-02" / ".hidden.parquet").write_bytes(b"x")
    again: list[str] = []
    import_mapped(ImportMapping.model_validate(mapping), source, tmp_path / "again", note=again.append)
    assert describe(tmp_path / "again") == describe(out)
    assert [note.rpartition("/")[2] for note in again] == [".hidden.parquet", "users.csv"] or "README" in str(again)


def test_partitions_of_csv_files_are_text(tmp_path):
    for item_id, zip_code in enumerate(["01234", "99999"]):
        (tmp_path / "s" / f"zip={zip_code}").mkdir(parents=True)
        (tmp_path / "s" / f"zip={zip_code}" / "x.csv").write_text(f"item_id,title\n{item_id},a\n")
    mapping = {
        "items": {"files": "s", "id": "item_id", "title": "title"},
        "interactions": {"files": "s/*/*.csv", "user_id": "zip", "item_id": "item_id", "timestamp": "zip"},
    }
    import_mapped(ImportMapping.model_validate(mapping), tmp_path, tmp_path / "out")
    tables = read_tables(tmp_path / "out")
    assert tables.items["zip"].to_pylist() == ["01234", "99999"]
    assert tables.users["user_id"].to_pylist() == ["01234", "99999"]


def test_rows_of_a_log_are_read_as_those_of_a_table(tmp_path):
    write(EVENTS, tmp_path / "log" / "date=2025-03-01" / "x.parquet")
    (batch,) = iter_rows(tmp_path / "log", "interactions", "timestamp")
    assert batch.schema.names == [*EVENTS.column_names, "date"] and batch.num_rows == 3
    other = EVENTS.select(EVENTS.column_names[::-1])  # nights read such files too
    write(other, tmp_path / "log" / "date=2025-03-02" / "x.parquet")
    rows = pa.Table.from_batches(iter_rows(tmp_path / "log", "interactions", "timestamp"))
    assert rows.drop_columns("date").equals(pa.concat_tables([EVENTS, EVENTS]))
    write(other.drop_columns("item_id"), tmp_path / "log" / "date=2025-03-03" / "x.parquet")
    with pytest.raises(TableError, match=r"03/x.parquet has the columns .*date=2025-03-01/x.parquet has user_id"):
        list(iter_rows(tmp_path / "log", "interactions", "timestamp"))
    (tmp_path / "empty").mkdir()
    for path, reason in ((tmp_path / "gone.parquet", "is not there"), (tmp_path / "empty", "has no Parquet file with")):
        with pytest.raises(TableError, match=f"{path.name} {reason}.*expected a Parquet file.* with timestamp"):
            next(iter_rows(path, "interactions", "timestamp"))
    (alone,) = iter_rows(tmp_path / "log" / "date=2025-03-01" / "x.parquet", "interactions", "timestamp")
    assert alone.schema.names == EVENTS.column_names
