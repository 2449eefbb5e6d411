"""A night whose first texts are mostly unusable is stopped early, with advice."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.generate import require_usable_texts
from laserbatch.pipeline.errors import RunFailed
from laserbatch.pipeline.planning.planner import FIRST_TEXTS
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder


@pytest.fixture
def judge(tmp_path):
    """A function that judges a side whose first rows are `num_failed` failures and `num_kept` texts."""
    tables = tmp_path / "tables"
    write_sample_world(tables, num_users=5, num_items=20)
    run = RunFolder(tmp_path / "run")
    shard = SimpleNamespace(name="00000")

    def judge(num_failed: int, num_kept: int, allowed: float = 0.05, **sections) -> None:
        failed = [QuarantineRow.of(n + 7, "user", "unparsable: nothing") for n in range(num_failed)]
        texts = pa.table({"entity_id": pa.array(range(num_kept), pa.int64())})
        record = run.shards("user").write("00000", texts, failed)
        settings = Settings(tables={"path": tables}, gates={"max_failed_share": allowed}, **sections)
        entities = SimpleNamespace(entities=lambda side: texts.rename_columns(["user_id"]))
        night = SimpleNamespace(run=run, settings=settings, tables=entities)
        require_usable_texts(night, SimpleNamespace(side="user", shards=[shard]), {"00000": record})

    return judge


def test_most_of_the_first_texts_must_be_usable(judge):
    with pytest.raises(RunFailed, match=rf"20 of the first {FIRST_TEXTS} users failed.*unparsable \(20\)"):
        judge(20, FIRST_TEXTS - 20)
    judge(FIRST_TEXTS // 2, FIRST_TEXTS // 2)  # failures of half the rows are judged at the end of the side
    judge(FIRST_TEXTS - 1, 0)  # too few rows to judge
    judge(FIRST_TEXTS, 0, allowed=1.0)  # all failures are allowed


def test_what_to_do_depends_on_the_model_and_its_tables(judge, tmp_path):
    with pytest.raises(RunFailed, match=r"`laserbatch try --user 7`, and change decoding\.model or"):
        judge(FIRST_TEXTS, 0)  # a sample world: the bundled model should know it
    server = {"url": "http://localhost:8000/v1", "model": "qwen"}
    with pytest.raises(RunFailed, match=r"and change decoding\.endpoint\.model or knowledge\.user_template"):
        judge(FIRST_TEXTS, 0, decoding={"engine": "endpoint", "endpoint": server | {"api": "chat"}})
    pq.write_table(pa.table({"user_id": [1], "city": ["Oslo"]}), tmp_path / "tables" / "users.parquet")
    with pytest.raises(RunFailed, match="safetensors"):
        judge(FIRST_TEXTS, 0)
