"""The plan of a night: nothing lost, nothing twice, the same again after a restart."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge import records as earlier_records
from laserbatch.pipeline.knowledge.entities import Entity
from laserbatch.pipeline.knowledge.prompts import RenderedPrompt
from laserbatch.pipeline.knowledge.records import PreviousKnowledge, knowledge_schema
from laserbatch.pipeline.planning.plan import load_plan, read_shard, save_plan
from laserbatch.pipeline.planning.planner import FIRST_TEXTS, default_shard_size, plan_side
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.routing.router import Route

RECORD = {
    "is_stale": False,
    "side": "user", "framework": "kar", "template": "t@1", "text": "old", "token_ids": [1, 2], "token_sources": [0, 0],
    "fields_json": "{}", "run_id": "2025-01-01-00000000", "model_id": "m", "pool_version": None, "pool_group": None,
    "decoding_json": "{}", "num_prompt_tokens": 3, "num_history": 0, "num_history_dropped": 0, "num_tokens": 2,
    "num_steps": 2, "num_drafted": 0, "num_accepted": 0, "finish_reason": "end_of_text",
}  # fmt: skip


def records(fingerprints: dict[str, str]) -> pa.Table:
    rows = [RECORD | {"entity_id": key, "fingerprint": value} for key, value in fingerprints.items()]
    return pa.Table.from_pylist(rows, schema=knowledge_schema(pa.string()))


def prompt_of(entity):
    def render():
        if entity.attributes.get("bad"):
            raise RowError("too-long: of no use")
        return RenderedPrompt(np.arange(3, dtype=np.int32), "prompt", 0, 0)

    return f"fingerprint-{entity.attributes['version']}", render


def plan(entities, run_dir, previous=None, force=False, shard_size=4, apart=()):
    return plan_side(
        "user",
        entities,
        pa.string(),
        prompt_of=prompt_of,
        route=lambda entity: Route(f"g{len(entity.entity_id) % 3}", "attribute"),
        previous=PreviousKnowledge(None if previous is None else previous_folder(previous, run_dir)),
        force=force,
        shard_size=shard_size,
        batch_size=1,
        run_dir=run_dir,
        apart=apart,
    )


def previous_folder(table, run_dir):
    """Where an earlier run keeps them, in files of a few rows."""
    folder = run_dir.parent / f"before-{run_dir.name}"
    for start in range(0, table.num_rows, 2):
        write_parquet(table.slice(start, 2), folder / f"{start:05d}.parquet")
    return folder


def users(ids, version="1", **attributes):
    return [Entity("user", key, {"version": version, **attributes}) for key in ids]


@given(st.lists(st.text(min_size=1, max_size=6), unique=True, max_size=30), st.integers(1, 9))
@settings(max_examples=30)
def test_every_entity_is_in_exactly_one_shard(tmp_path_factory, ids, shard_size):
    run_dir = tmp_path_factory.mktemp("run")
    planned = plan(users(ids), run_dir, shard_size=shard_size)
    rows = [row for shard in planned.shards for row in read_shard(run_dir / shard.path)]
    assert sorted(row.entity_id for row in rows) == sorted(ids)
    assert [row.group for row in rows] == sorted(row.group for row in rows)
    assert all(shard.num_rows <= shard_size for shard in planned.shards)


def test_unchanged_entities_are_carried_over_and_changed_ones_bring_their_old_text(tmp_path):
    previous = records({"a": "fingerprint-1", "b": "fingerprint-0", "gone": "fingerprint-1"})
    planned = plan(users(["a"], bad=True) + users(["b", "new"]), tmp_path, previous)  # `bad` if it were rendered
    assert planned.num_carried_over == 1
    carried = read_parquet(RunFolder(tmp_path).knowledge_folder("user"))
    assert carried["entity_id"].to_pylist() == ["a"]
    assert carried["run_id"].to_pylist() == ["2025-01-01-00000000"]
    rows = {row.entity_id: row for shard in planned.shards for row in read_shard(tmp_path / shard.path)}
    assert set(rows) == {"b", "new"}
    assert rows["b"].previous_ids.tolist() == [1, 2]
    assert rows["new"].previous_ids is None


def test_rows_of_an_earlier_version_are_carried_over_in_the_form_of_this_one(tmp_path):
    table = records({"a": "fingerprint-1", "b": "fingerprint-1"})
    alternatives = pa.array([[7, -1], None], pa.list_(pa.int32()))  # which versions 2 and 3 could have
    old = table.drop_columns(["is_stale"]).append_column("alternative_ids", alternatives)  # 1 and 2 had no is_stale
    plan(users(["a", "b"]), tmp_path, old.replace_schema_metadata({"laserbatch.version": "2"}))
    carried = read_parquet(RunFolder(tmp_path).knowledge_folder("user"))
    assert carried.equals(table) and carried.schema.metadata == knowledge_schema(pa.string()).metadata


def test_force_generates_unchanged_entities(tmp_path):
    planned = plan(users(["a"]), tmp_path, records({"a": "fingerprint-1"}), force=True)
    assert planned.num_carried_over == 0
    assert sum(shard.num_rows for shard in planned.shards) == 1


def test_an_entity_that_cannot_be_asked_about_is_refused_with_its_reason(tmp_path):
    planned = plan(users(["a"]) + users(["b"], bad=True), tmp_path)
    assert planned.num_refused == sum(shard.num_rows for shard in planned.shards) == 1
    run = RunFolder(tmp_path)
    run.merge_quarantine("user", run.finished_shards("user").values(), [], pa.string())
    (row,) = run.read_quarantine("user").to_pylist()
    assert (row["entity_id"], row["reason"], row["detail"]) == ("b", "too-long", "of no use")


def test_entities_that_are_kept_apart_share_no_shard_with_others_and_come_first(tmp_path):
    planned = plan(users(["a", "b", "c", "dd", "e"]), tmp_path, shard_size=2, apart={"dd", "a", "e", "elsewhere"})
    ids = [[row.entity_id for row in read_shard(tmp_path / shard.path)] for shard in planned.shards]
    assert [(part, shard.is_apart) for part, shard in zip(ids, planned.shards, strict=True)] == [
        (["a", "e"], True), (["dd"], True), (["b", "c"], False)
    ]  # fmt: skip


def test_a_plan_comes_back_from_disk_as_it_was(tmp_path):
    planned = plan(users(["a", "b", "c"]) + users(["d"], bad=True), tmp_path, records({"c": "fingerprint-1"}))
    save_plan(planned, tmp_path)
    assert load_plan(tmp_path, "user") == planned
    assert load_plan(tmp_path, "item") is None


@pytest.mark.parametrize("ids", [[1, 2, 3]])
def test_integer_ids_stay_integers(tmp_path, ids):
    entities = [Entity("user", key, {"version": "1"}) for key in ids]
    planned = plan_side(
        "user", entities, pa.int64(), prompt_of=prompt_of, route=lambda entity: Route("", "none"),
        previous=PreviousKnowledge(None), force=False, shard_size=2, batch_size=1, run_dir=tmp_path,
    )  # fmt: skip
    rows = [row for shard in planned.shards for row in read_shard(tmp_path / shard.path)]
    assert [row.entity_id for row in rows] == ids
    assert rows[0].group is None


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "expected"),
    [(1, 16, 64), (900, 16, 64), (1600, 16, 100), (8000, 16, 500), (10**6, 16, 512), (10**6, 64, 2048), (0, 1, 4)],
)
def test_shards_are_long_where_there_are_many_rows_and_never_less_than_a_few_batches(num_rows, batch_size, expected):
    assert default_shard_size(num_rows, batch_size) == expected


def test_without_a_size_shards_have_the_default_one(tmp_path):
    planned = plan(users([f"u{number:03}" for number in range(100)]), tmp_path, shard_size=None)
    assert [shard.num_rows for shard in planned.shards] == [7] * 14 + [2]


def test_long_shards_come_after_a_few_rows_of_all_groups(tmp_path):
    entities = users([f"{n:0{1 + n % 3}}" for n in range(150)])
    made = plan(entities, tmp_path, shard_size=60)
    assert [shard.num_rows for shard in made.shards] == [FIRST_TEXTS, 60, 58]
    rows = [row for shard in made.shards for row in read_shard(tmp_path / shard.path)]
    assert sorted(row.entity_id for row in rows) == sorted(entity.entity_id for entity in entities)
    assert {row.group for row in rows[:FIRST_TEXTS]} == {row.group for row in rows}
    assert [shard.num_rows for shard in plan(entities[:50], tmp_path, shard_size=60).shards] == [50]


def test_more_than_2_gib_of_text_is_carried_over_a_part_at_a_time(tmp_path, monkeypatch):
    """One text of 64 MiB, which 33 records share, and a short one: no Arrow `string` array can hold all of them."""
    one = records({"a": "fingerprint-0"}).drop_columns(["text", "entity_id"])
    text = pa.array(["x" * 2**26])
    batches = [
        one.append_column("text", [text if number != 7 else ["short"]])
        .append_column("entity_id", [[f"u{number}"]])
        .to_batches()[0]
        for number in range(34)
    ]
    assert sum(batch["text"].nbytes for batch in batches) > 2**31
    with pytest.raises(pa.ArrowInvalid, match="offset overflow"):
        pa.Table.from_batches(batches).take([7])
    read = lambda path, columns: (batch.select(columns or batch.schema.names) for batch in batches)  # noqa: E731
    monkeypatch.setattr(earlier_records, "iter_parquet", read)
    previous = PreviousKnowledge(tmp_path)
    written = RunFolder(tmp_path / "run").write_shard("user", "carried", previous.records([7], pa.string(), False))
    assert written.num_rows == 1
    assert previous.rows_of(pa.chunked_array([["u31", "u2", "nobody"]])) == [2, 31]
    assert {row: ids.tolist() for row, ids in previous.token_ids([31, 2]).items()} == {2: [1, 2], 31: [1, 2]}
