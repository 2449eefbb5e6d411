"""Folders of `Dataset.save_to_disk` as tables: read with pyarrow alone, or refused with advice."""

import json
import re

import pyarrow as pa
import pytest
from sound_world import sound_world, write_world

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.check import check_tables
from laserbatch.pipeline.tables.mapping import import_mapped
from laserbatch.pipeline.tables.read import describe, read_tables
from laserbatch.pipeline.tables.settings import ImportMapping
from laserbatch.pipeline.tables.streamed import open_tables
from laserbatch.pipeline.tables.versioned import saved_rows

EVENTS = sound_world()["interactions"]


def save_to_disk(rows: pa.Table, folder, num_shards=1, **state):
    """Write a folder like `datasets.Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    rows = rows.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {}}})})
    names = [f"data-{shard:05}-of-{num_shards:05}.arrow" for shard in range(num_shards)]
    for shard, name in enumerate(names):
        start, stop = (rows.num_rows * at // num_shards for at in (shard, shard + 1))
        with pa.ipc.new_stream(folder / name, rows.schema) as writer:
            writer.write_table(rows.slice(start, stop - start), max_chunksize=1000)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "31923bdbcfdb883a"} | state))
    (folder / "dataset_info.json").write_text("{}")


@pytest.fixture
def tables(tmp_path):
    """Tables without interactions."""
    write_world(tmp_path / "t", interactions=None)
    return tmp_path / "t"


def test_a_saved_dataset_is_a_table(tables, tmp_path):
    save_to_disk(EVENTS, tables / "interactions", num_shards=2)
    (tables / "interactions" / "data-00000-of-00001.arrow").write_bytes(b"of an earlier save")
    assert check_tables(tables) == []
    assert read_tables(tables).interactions.num_rows == EVENTS.num_rows
    assert open_tables(tables).interactions.count_rows() == EVENTS.num_rows
    described = describe(tables)["interactions"]
    assert (described["path"], described["num_rows"]) == ("interactions", EVENTS.num_rows)
    mapping = {
        "items": {"files": "items.parquet", "id": "item_id", "title": "title"},
        "interactions": {"files": "interactions", "user_id": "user_id", "item_id": "item_id", "timestamp": "timestamp"},
    }
    import_mapped(ImportMapping.model_validate(mapping), tables, tmp_path / "out")
    assert read_tables(tmp_path / "out").interactions.num_rows == EVENTS.num_rows


def test_what_the_library_itself_writes_is_read(tables):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(EVENTS).select([2, 0]).save_to_disk(str(tables / "interactions"), num_shards=2)
    assert check_tables(tables) == []
    assert read_tables(tables).interactions.num_rows == 2


def test_a_dataset_that_is_saved_again_is_read_again(tables):
    folder = tables / "interactions"
    save_to_disk(EVENTS, folder)
    assert read_tables(tables).interactions.num_rows == 3
    folder.rename(tables / "_before")
    save_to_disk(EVENTS.slice(0, 2), folder)
    assert read_tables(tables).interactions.num_rows == 2


def test_rows_are_mapped_and_come_in_batches(tmp_path):
    save_to_disk(pa.table({"n": range(5000)}), tmp_path / "d", num_shards=2)
    before = pa.total_allocated_bytes()
    batches = saved_rows(sorted((tmp_path / "d").glob("*.arrow")))
    assert [next(batches).num_rows, batches.read_all()["n"][-1].as_py()] == [1000, 4999]
    assert pa.total_allocated_bytes() - before < 5000 * 8


def test_splits_are_named_and_one_of_them_is_read(tables, tmp_path):
    for split in ("test", "train"):
        save_to_disk(EVENTS, tables / "interactions" / split)
    (tables / "interactions" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (finding,) = check_tables(tables)
    assert finding.kind == "saved-dataset" and finding.found.endswith("interactions has the splits test, train")
    mapping = {
        "items": {"files": "items.parquet", "id": "item_id", "title": "title"},
        "interactions": {"files": "interactions/train", "user_id": "user_id", "item_id": "item_id",
                         "timestamp": "timestamp"},
    }  # fmt: skip
    import_mapped(ImportMapping.model_validate(mapping), tables, tmp_path / "out")
    assert read_tables(tmp_path / "out").interactions.num_rows == 3
    mapping["interactions"]["files"] = "interactions/*/*.arrow"
    with pytest.raises(TableError, match=r"whose `state.json` names its valid files"):
        import_mapped(ImportMapping.model_validate(mapping), tables, tmp_path / "out")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_indices_files": [{"filename": "indices.arrow"}]}, r"a selection of rows.*call `flatten_indices\(\)`"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, r"a selection of rows.*call `flatten_indices\(\)`"),
        ({"_data_files": []}, "state.json names no files"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, r"No such file.*gone\.arrow"),
        ({"_data_files": [{"filename": "../../items.parquet"}]}, "No such file.*interactions/items.parquet"),
    ],
)
def test_what_cannot_be_read_is_refused(tables, state, message):
    save_to_disk(EVENTS, tables / "interactions", **state)
    (finding,) = check_tables(tables)
    assert re.search(message, str(finding)), str(finding)


def test_a_file_that_ends_early_is_refused_though_arrow_would_read_it(tables):
    save_to_disk(EVENTS, tables / "interactions")
    (path,) = (tables / "interactions").glob("*.arrow")
    path.write_bytes(path.read_bytes()[:-8])
    assert pa.ipc.open_stream(path).read_all().num_rows == 3
    (finding,) = check_tables(tables)
    assert "does not end like a stream of Arrow record batches" in finding.found
