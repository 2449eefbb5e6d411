"""Tables with several versions: the current version is read, or the table is refused by name."""

import json
import shutil
import sys
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sound_world import sound_world, write_world

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.check import check_tables
from laserbatch.pipeline.tables.mapping import import_mapped
from laserbatch.pipeline.tables.read import describe, read_tables
from laserbatch.pipeline.tables.settings import ImportMapping
from laserbatch.pipeline.tables.streamed import open_tables

EVENTS = sound_world()["interactions"]
ROW_1 = "^Bg9^0rr910000000000iXQKl0rr91000005c8Xg0rr91"  # a Roaring bitmap, in base 85


@pytest.fixture
def folder(tmp_path):
    """The folder of interactions, which is empty."""
    write_world(tmp_path / "t", interactions=None)
    (tmp_path / "t" / "interactions").mkdir()
    return tmp_path / "t" / "interactions"


@pytest.mark.parametrize(
    ("marks", "name"),
    [(["_delta_log/00000000000000000000.json"], "Delta.*pip install 'laserbatch\\[delta\\]'"),
     (["metadata/v1.metadata.json"], "Iceberg.*pip install 'laserbatch\\[iceberg\\]'"),
     (["metadata/00000-6f.gz.metadata.json"], "Iceberg.*pip install"), ([".hoodie/hoodie.properties"], "Hudi"),
     (["_spark_metadata/0"], "Structured Streaming"), (["snapshot/s", "manifest/m", "schema/s"], "Paimon"),
     (["_versions/1.manifest"], "Lance"), (["delta_0000002_0000002_0000/bucket_00000"], "transactional Hive")],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(folder, monkeypatch, marks, name):
    libraries = ("deltalake", "pyiceberg")
    for module in [name for name in sys.modules if name.split(".")[0] in libraries]:
        monkeypatch.delitem(sys.modules, module)  # imported by another test
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)
    pq.write_table(EVENTS, folder / "part-0.parquet")
    for mark in marks:
        (folder / mark).parent.mkdir(parents=True, exist_ok=True)
        (folder / mark).write_text("{}")
    with pytest.raises(TableError, match=name):
        read_tables(folder.parent)
    (finding,) = check_tables(folder.parent)
    assert finding.kind == "versioned-table"
    for files in ("interactions", "interactions/*.parquet", "interactions/part-0.parquet"):
        mapping = {
            "items": {"files": "items.parquet", "id": "item_id", "title": "title"},
            "interactions": {"files": files, "user_id": "user_id", "item_id": "item_id", "timestamp": "timestamp"},
        }
        with pytest.raises(TableError, match=name.partition(".*")[0]):
            import_mapped(ImportMapping.model_validate(mapping), folder.parent, folder.parents[1] / "out")


def test_a_versioned_table_below_the_folder_of_another_is_refused(folder):
    pq.write_table(EVENTS, folder / "part-0.parquet")
    (folder / "date=1" / "_delta_log").mkdir(parents=True)
    (finding,) = check_tables(folder.parent)
    assert "date=1 is a Delta table, with files of several versions" in finding.found


def test_a_delta_table_is_read_at_its_current_version(folder, tmp_path):
    deltalake = pytest.importorskip("deltalake")
    rows = EVENTS.append_column("event", pa.array(["a b", "c/d%20", None]))
    deltalake.write_deltalake(str(folder), rows, partition_by=["event"])
    assert check_tables(folder.parent) == []
    assert read_tables(folder.parent).interactions.num_rows == 3
    deltalake.write_deltalake(str(folder), rows.slice(0, 2), mode="overwrite")
    opened = deltalake.DeltaTable(str(folder))
    opened.create_checkpoint()
    for path in folder.glob("_delta_log/*.json"):
        path.unlink()  # like the clean-up of old logs, which leaves the checkpoint
    tables = read_tables(folder.parent)
    assert sorted(tables.interactions["event"].to_pylist()) == ["a b", "c/d%20"]
    assert open_tables(folder.parent).interactions.count_rows() == 2
    assert describe(folder.parent)["interactions"]["path"] == "interactions"
    mapping = {
        "items": {"files": "items.parquet", "id": "item_id", "title": "title"},
        "interactions": {"files": "interactions", "user_id": "user_id", "item_id": "item_id", "timestamp": "timestamp"},
    }
    notes: list[str] = []
    import_mapped(ImportMapping.model_validate(mapping), folder.parent, tmp_path / "out", note=notes.append)
    assert not any("interactions" in note for note in notes)
    assert read_tables(tmp_path / "out").interactions.num_rows == 2
    (folder / "_delta_log" / f"{2:020}.json").write_text("{")
    (finding,) = check_tables(folder.parent)
    assert finding.kind == "versioned-table" and "cannot be read" in finding.found


@pytest.mark.parametrize("feature", ["deletionVectors", "columnMapping"])
def test_rows_that_delta_has_deleted_and_columns_it_has_renamed_are_known(folder, feature):
    pytest.importorskip("deltalake")
    renamed = feature == "columnMapping"
    stored = EVENTS.rename_columns([f"c{number}" for number in range(4)]) if renamed else EVENTS
    pq.write_table(stored, folder / "a.parquet")
    kinds = dict(zip(EVENTS.column_names, ("string", "long", "long", "long"), strict=True))
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata":
         {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"c{number}"} if renamed else {}}
        for number, (name, kind) in enumerate(kinds.items())
    ]  # fmt: skip
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5} if renamed else {
        "minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [feature], "writerFeatures": [feature],
    }  # fmt: skip
    configuration = {"delta.columnMapping.mode": "name"} if renamed else {"delta.enableDeletionVectors": "true"}
    add = {"path": "a.parquet", "partitionValues": {}, "size": (folder / "a.parquet").stat().st_size,
           "modificationTime": 1, "dataChange": True, "stats": json.dumps({"numRecords": 3})}  # fmt: skip
    if not renamed:
        add["deletionVector"] = {"storageType": "i", "pathOrInlineDv": ROW_1, "sizeInBytes": 34, "cardinality": 1}
    table = {"id": str(uuid.uuid4()), "format": {"provider": "parquet", "options": {}}, "partitionColumns": [],
             "schemaString": json.dumps({"type": "struct", "fields": fields}), "configuration": configuration,
             "createdTime": 1}  # fmt: skip
    (folder / "_delta_log").mkdir()
    log = "\n".join(map(json.dumps, ({"protocol": protocol}, {"metaData": table}, {"add": add})))
    (folder / "_delta_log" / f"{0:020}.json").write_text(log)
    assert check_tables(folder.parent) == []
    assert read_tables(folder.parent).interactions["rating"].to_pylist() == ([1, 5, 4] if renamed else [1, 4])


def test_an_iceberg_table_is_read_at_its_current_snapshot_wherever_its_folder_is(folder):
    pytest.importorskip("pyiceberg")
    table = iceberg_table(folder)
    table.append(EVENTS)
    table.overwrite(EVENTS.slice(0, 2))
    with table.update_schema() as update:
        update.rename_column("rating", "stars")
    assert check_tables(folder.parent) == []
    assert read_tables(folder.parent).interactions.num_rows == open_tables(folder.parent).interactions.count_rows() == 2
    assert "stars" in open_tables(folder.parent).interactions.schema.names
    moved = folder.parent.rename(folder.parents[1] / "moved") / "interactions"
    shutil.rmtree(folder.parent, ignore_errors=True)
    assert read_tables(moved.parent).interactions.num_rows == 2
    newest = max(moved.glob("metadata/*.metadata.json"))
    shutil.copy(newest, newest.with_name(newest.name.replace("-x", "-y")))
    (finding,) = check_tables(moved.parent)
    assert finding.kind == "versioned-table" and "have the same version" in finding.found


def iceberg_table(folder):
    """An empty table of interactions, whose folder is its catalogue."""
    from folder_catalog import FolderCatalog

    return FolderCatalog("n", warehouse=str(folder.parent)).create_table((folder.name,), EVENTS.schema)
