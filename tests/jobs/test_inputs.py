"""What a run starts from: checked before anything is written, recorded, and the same when it goes on."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.night import open_night
from jobs.report.page import render_report
from jobs.settings import load_settings
from pipeline.errors import WorkspaceError
from pipeline.storage.atomic import sha256_file
from pipeline.tables.read import read_tables
from pipeline.tables.sample_world import write_sample_world
from retrieval_pools.errors import PoolError

DATE = datetime.date(2025, 3, 1)


@pytest.fixture
def world(tmp_path):
    """Tables, a configuration that brings vectors of items, and those, in the folder of the configuration."""
    write_sample_world(tmp_path / "tables", num_users=20, num_items=24)
    config = "workspace: workspace\ntables: {path: tables}\nrouting: {item_embeddings: item.parquet}\n"
    (tmp_path / "laserbatch.yaml").write_text(config)
    item_ids = read_tables(tmp_path / "tables", as_of=DATE).items["item_id"].to_pylist()
    write_vectors(tmp_path, [*item_ids, "nobody", "nothing"])
    return tmp_path


def write_vectors(folder, ids, value=0.5):
    table = pa.table({"item_id": ids, "vector": list(np.full((len(ids), 4), value, np.float32))})
    pq.write_table(table, folder / "item.parquet")


def opened(world):
    return open_night(load_settings(world / "laserbatch.yaml"), DATE)


def test_embeddings_are_recorded_with_checksum_and_ids_that_are_of_nobody(world):
    manifest = opened(world).manifest
    recorded = manifest["inputs"]
    assert list(recorded) == ["users", "items", "interactions", "item_embeddings"]
    assert recorded["item_embeddings"] == {
        "path": "item.parquet",
        "num_rows": pq.read_metadata(world / "item.parquet").num_rows,
        "sha256": sha256_file(world / "item.parquet"),
        "num_unknown_ids": 2,
    }
    assert "2 of unknown ids" in render_report(manifest.data)


def test_a_run_does_not_go_on_with_other_embeddings(world):
    opened(world)
    opened(world)
    write_vectors(world, ["i1"], 0.25)
    with pytest.raises(WorkspaceError, match=r"started from other inputs \(item_embeddings changed since\)"):
        opened(world)


def test_wrong_embeddings_fail_before_anything_is_written(world):
    write_vectors(world, ["a", "b"], np.nan)
    with pytest.raises(PoolError, match=r"routing.item_embeddings: .*item.parquet, column vector, row 0"):
        opened(world)
    assert not (world / "workspace").exists()
