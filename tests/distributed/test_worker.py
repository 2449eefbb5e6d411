"""One worker's record of a text, without Ray."""

from dataclasses import replace

import pytest
from test_actors import planned

from pipeline.distributed.worker import ShardWorker
from pipeline.storage.run_folder import RunFolder
from pipeline.tables.sample_world import write_sample_world


@pytest.mark.parametrize("records", [False, True])
def test_alternatives_are_recorded_with_the_tokens_only_when_asked_for(tmp_path, records):
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    shards, spec = planned(tmp_path / "tables", tmp_path / "run")
    decoding = spec.decoding.model_copy(update={"record_alternatives": records})
    ShardWorker(replace(spec, decoding=decoding)).run(shards[0])
    rows = RunFolder(tmp_path / "run").read_knowledge("item").to_pylist()
    assert len(rows) > 0
    for row in rows:
        if records:
            assert len(row["alternative_ids"]) == len(row["token_ids"])
        else:
            assert row["alternative_ids"] is None
    assert any(token >= 0 for row in rows for token in row["alternative_ids"] or ()) == records


def test_a_worker_that_was_warmed_up_writes_the_same_texts(tmp_path):
    write_sample_world(tmp_path / "tables", num_users=4, num_items=20)
    written = []
    for name in ("cold", "warm"):
        shards, spec = planned(tmp_path / "tables", tmp_path / name)
        worker = ShardWorker(spec)
        if name == "warm":
            worker.warm_up()
        worker.run(shards[0])
        written.append(RunFolder(tmp_path / name).read_knowledge("item").drop_columns(["run_id"]).to_pylist())
    assert written[0] == written[1] and len(written[0]) > 0
