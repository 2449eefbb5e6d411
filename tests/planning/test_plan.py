"""The plan of a night loses no entity, plans none twice, and is the same after a restart."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_side import plan_side

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.knowledge import records as earlier_records
from laserbatch.pipeline.knowledge.questions import SideQuestions
from laserbatch.pipeline.knowledge.records import PreviousKnowledge, knowledge_schema
from laserbatch.pipeline.knowledge.templates import PromptTemplate
from laserbatch.pipeline.planning import planner
from laserbatch.pipeline.planning.plan import load_plan, read_shard, save_plan
from laserbatch.pipeline.planning.planner import (
    FIRST_TEXTS,
    Sharding,
    WriteRules,
    decide_side,
    default_shard_size,
    write_side_plan,
)
from laserbatch.pipeline.planning.postpone import Refresh
from laserbatch.pipeline.planning.refresh import RefreshSettings
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.run_folder import POSTPONED, RunFolder
from laserbatch.pipeline.tables.read import Tables
from laserbatch.retrieval_pools.routing.router import Routes

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


DATE = datetime.date(2025, 3, 1)
SHARED = "template-prompt-model-decoding"
TEMPLATE = PromptTemplate(name="u", version=1, framework="kar", side="user", parser="free", instruction="Explain.")


def tables_of(rows) -> Tables:
    """Users from (id, version) rows; there is one item and no interaction."""
    kind = pa.int64() if rows and isinstance(rows[0][0], int) else pa.string()
    users = {"user_id": pa.array([key for key, _ in rows], kind), "version": [version for _, version in rows]}
    interactions = {"user_id": pa.array([], kind), "item_id": pa.array([], pa.int64())}
    return Tables(pa.table(users), pa.table({"item_id": [1], "title": ["A"]}), pa.table(interactions))


def fingerprint_of(version="1") -> str:
    return SideQuestions(tables_of([("a", version)]), "user", TEMPLATE, SHARED).fingerprints(0, 1)[0].as_py()


NOW, BEFORE = fingerprint_of("1"), fingerprint_of("0")


def by_length(ids) -> Routes:
    names = pa.array([f"g{len(str(key)) % 3}" for key in ids], pa.string()).dictionary_encode()
    return Routes(names, pa.array(["attribute"] * len(ids), pa.string()).dictionary_encode())


def plan(rows, run_dir, previous=None, force=False, shard_size=4, isolate_ids=None, routes=True):
    return plan_side(
        tables_of(rows),
        "user",
        TEMPLATE,
        SHARED,
        run_dir,
        routes=by_length([key for key, _ in rows]) if routes else None,
        previous=previous_folder(previous, run_dir) if isinstance(previous, pa.Table) else previous,
        force=force,
        shard_size=shard_size,
        batch_size=1,
        isolate_ids=isolate_ids,
    )


def previous_folder(table, run_dir):
    """Write the records of an earlier run to a folder, two rows a file."""
    folder = run_dir.parent / f"before-{run_dir.name}"
    for start in range(0, table.num_rows, 2):
        write_parquet(table.slice(start, 2), folder / f"{start:05d}.parquet")
    return folder


def users(ids, version="1"):
    return [(key, version) for key in ids]


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
    previous = records({"a": NOW, "b": BEFORE, "gone": NOW})
    planned = plan(users(["a", "b", "new"]), tmp_path, previous)
    assert planned.num_carried_over == 1
    carried = read_parquet(RunFolder(tmp_path).knowledge_folder("user"))
    assert carried["entity_id"].to_pylist() == ["a"]
    assert carried["run_id"].to_pylist() == ["2025-01-01-00000000"]
    rows = {row.entity_id: row for shard in planned.shards for row in read_shard(tmp_path / shard.path)}
    assert set(rows) == {"b", "new"}
    assert rows["b"].previous_ids.tolist() == [1, 2]
    assert rows["new"].previous_ids is None


def test_a_text_of_another_tokenizer_is_not_drafted_from(tmp_path):
    """Its token ids mean other words in tonight's vocabulary, or none."""
    same_model, other = (BEFORE.replace(SHARED, f"t-other-{model}-d") for model in ("model", "prompt"))
    planned = plan(users("ab"), tmp_path, records({"a": same_model, "b": other}))
    rows = {row.entity_id: row for shard in planned.shards for row in read_shard(tmp_path / shard.path)}
    assert rows["a"].previous_ids.tolist() == [1, 2] and rows["b"].previous_ids is None


def test_rows_of_an_earlier_version_are_carried_over_in_the_form_of_this_one(tmp_path):
    table = records({"a": NOW, "b": NOW})
    alternatives = pa.array([[7, -1], None], pa.list_(pa.int32()))  # versions 2 and 3 had this optional column
    old = table.drop_columns(["is_stale"]).append_column("alternative_ids", alternatives)  # 1 and 2 had no is_stale
    plan(users(["a", "b"]), tmp_path, old.replace_schema_metadata({"laserbatch.version": "2"}))
    carried = read_parquet(RunFolder(tmp_path).knowledge_folder("user"))
    assert carried.equals(table) and carried.schema.metadata == knowledge_schema(pa.string()).metadata


def test_force_generates_unchanged_entities(tmp_path):
    planned = plan(users(["a"]), tmp_path, records({"a": NOW}), force=True)
    assert planned.num_carried_over == 0
    assert sum(shard.num_rows for shard in planned.shards) == 1


def test_an_item_without_a_title_is_refused(tmp_path):
    items = pa.table({"item_id": ["a", "b"], "title": ["A", " "]})
    template = TEMPLATE.model_copy(update={"side": "item"})
    planned = plan_side(
        Tables(items, items, items), "item", template, SHARED, tmp_path, batch_size=1,
    )  # fmt: skip
    assert planned.num_unpromptable == sum(shard.num_rows for shard in planned.shards) == 1
    run = RunFolder(tmp_path)
    run.merge_quarantine("item", run.shards("item").finished().values(), [], pa.string())
    (row,) = run.read_quarantine("item").to_pylist()
    assert (row["entity_id"], row["reason"]) == ("b", "no-title")


def test_entities_that_are_kept_apart_share_no_shard_with_others_and_come_first(tmp_path):
    isolate_ids = pa.array(["dd", "a", "e", "elsewhere"])
    planned = plan(users(["a", "b", "c", "dd", "e"]), tmp_path, shard_size=2, isolate_ids=isolate_ids)
    ids = [[row.entity_id for row in read_shard(tmp_path / shard.path)] for shard in planned.shards]
    assert [(part, shard.is_isolated) for part, shard in zip(ids, planned.shards, strict=True)] == [
        (["a", "e"], True), (["dd"], True), (["b", "c"], False)
    ]  # fmt: skip


def test_a_plan_comes_back_from_disk_as_it_was(tmp_path):
    planned = plan(users(["a", "b", "c", "d"]), tmp_path, records({"c": NOW}))
    save_plan(planned, tmp_path)
    assert load_plan(tmp_path, "user") == planned
    assert load_plan(tmp_path, "item") is None


def test_integer_ids_stay_integers(tmp_path):
    ids = [1, 2, 3]
    planned = plan(users(ids), tmp_path, shard_size=2, routes=False)
    rows = [row for shard in planned.shards for row in read_shard(tmp_path / shard.path)]
    assert [row.entity_id for row in rows] == ids
    assert rows[0].group is None


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "expected"),
    [
        (1, 16, 64),
        (31, 16, 64),
        (32, 16, 16),
        (41, 16, 21),
        (900, 16, 64),
        (1600, 16, 100),
        (8000, 16, 500),
        (10**6, 16, 512),
        (10**6, 64, 2048),
        (0, 1, 4),
    ],
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
    assert sorted(row.entity_id for row in rows) == sorted(key for key, _ in entities)
    assert {row.group for row in rows[:FIRST_TEXTS]} == {row.group for row in rows}
    assert [shard.num_rows for shard in plan(entities[:50], tmp_path, shard_size=60).shards] == [50]


def test_more_than_2_gib_of_text_is_carried_over_a_part_at_a_time(tmp_path, monkeypatch):
    """A text of 64 MiB, shared by 33 records, and a short one: an Arrow `string` array cannot hold all of them."""
    record = records({"a": BEFORE}).drop_columns(["text", "entity_id"])
    text = pa.array(["x" * 2**26])
    batches = [
        record.append_column("text", [text if number != 7 else ["short"]])
        .append_column("entity_id", [[f"u{number}"]])
        .to_batches()[0]
        for number in range(34)
    ]
    assert sum(batch["text"].nbytes for batch in batches) > 2**31
    with pytest.raises(pa.ArrowInvalid, match="offset overflow"):
        pa.Table.from_batches(batches).take([7])
    read = lambda path, columns: (batch.select(columns or batch.schema.names) for batch in batches)  # noqa: E731
    monkeypatch.setattr(earlier_records, "iter_parquet", read)
    monkeypatch.setattr(earlier_records, "parquet_files", lambda folder: [folder])
    previous = PreviousKnowledge(tmp_path)
    carried = previous.records(np.array([7]), pa.string(), False)
    written = RunFolder(tmp_path / "run").shards("user").write("carried", carried)
    assert written.num_rows == 1
    assert previous.rows_of(pa.chunked_array([["u31", "u2", "nobody"]])).tolist() == [31, 2, -1]
    assert previous.token_ids(np.array([31, -1, 2])).take(pa.array([0, 1, 2])).to_pylist() == [[1, 2], None, [1, 2]]


def test_files_whose_records_all_stay_are_shared_and_the_others_brought_together(tmp_path, monkeypatch):
    """Small files, files with records that do not stay, and files without their shard's record are not shared."""
    monkeypatch.setattr(planner, "FILE_ROWS", 2)
    monkeypatch.setattr(planner, "MIN_SHARED_ROWS", 2)
    runs = [RunFolder(tmp_path / name) for name in ("first", "gone", "same", "no-record", "damaged")]
    for number, ids in enumerate(["ab", "cd", "e", "f"]):
        runs[0].shards("user").write(f"{number:05d}", records(dict.fromkeys(ids, NOW)))

    def files_of(run: RunFolder, ids: str, earlier: RunFolder) -> dict[str, list[str]]:
        """The ids in each carried-over file, after a check that each is a finished shard."""
        assert plan(users(ids), run.root, earlier.knowledge_folder("user")).num_carried_over == len(ids)
        files = sorted(run.knowledge_folder("user").glob("*.parquet"))
        assert {file.stem for file in files} == set(run.shards("user").finished())
        return {file.stem: read_parquet(file)["entity_id"].to_pylist() for file in files}

    expected = {"carried": ["d", "e"], "carried-00000": ["a", "b"], "carried-00001": ["f"]}
    assert files_of(runs[1], "abdef", runs[0]) == expected
    file_of = lambda run, name: run.knowledge_folder("user") / f"{name}.parquet"  # noqa: E731
    assert file_of(runs[1], "carried-00000").samefile(file_of(runs[0], "00000"))
    expected = {"carried": ["f"], "carried-00000": ["a", "b"], "carried-00001": ["d", "e"]}
    assert files_of(runs[2], "abdef", runs[1]) == expected
    assert file_of(runs[2], "carried-00001").samefile(file_of(runs[1], "carried"))
    (runs[1].root / "shards" / "user" / "carried-00000.json").unlink()
    assert files_of(runs[3], "abdef", runs[1])["carried"] == ["a", "b"]
    damaged = file_of(runs[1], "carried-00000")
    damaged.write_bytes(damaged.read_bytes().replace(b"2025-01-01-00000000", b"2025-01-01-00000001"))
    with pytest.raises(WorkspaceError, match=r"carried-00000\.parquet is damaged"):
        files_of(runs[4], "abdef", runs[1])


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("is_by_score", "expected"), [(True, ["b", "d", "a", "c"]), (False, ["a", "b", "c", "d"])])
def test_the_texts_that_are_worth_most_come_first_where_they_are_wanted_so(
    tmp_path, monkeypatch, is_by_score, expected, force
):
    num_events = np.array([3, 90, 0, 7])
    monkeypatch.setattr(SideQuestions, "num_events", lambda questions, rows=slice(None): num_events[rows])
    questions = SideQuestions(tables_of([(key, "1") for key in "abcd"]), "user", TEMPLATE, SHARED)
    known, rule = PreviousKnowledge(None), Refresh(RefreshSettings(), DATE, None, 100, POSTPONED.empty_table())
    decision = decide_side(questions, known, WriteRules(force, rule))
    sharding = Sharding(1, 3, is_by_score=is_by_score)
    side_plan, _ = write_side_plan(decision, questions, known, sharding, RunFolder(tmp_path))
    assert [row.entity_id for shard in side_plan.shards for row in read_shard(tmp_path / shard.path)] == expected
    assert side_plan.postponed == {} and side_plan.num_waiting == 0
