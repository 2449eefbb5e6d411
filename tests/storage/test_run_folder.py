"""Shards are finished or absent; quarantine is stored with them; manifests store what they are given."""

import datetime
import signal
import subprocess
import sys
from dataclasses import asdict

import pyarrow as pa
import pytest
from manifests import manifest_of

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.atomic import write_json
from laserbatch.pipeline.storage.figures import (
    CtrFigures,
    ModelFigures,
    PoolFigures,
    PoolsUsed,
    SampleSpan,
    SampleText,
    ShardInfo,
    SideFigures,
)
from laserbatch.pipeline.storage.manifest import make_run_id
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow, count_reasons, quarantine_schema, quarantine_table
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats

FAILED = QuarantineRow("u9", "user", "too-long", "900 tokens", "ff")


def knowledge(*ids: object) -> pa.Table:
    return pa.table({"entity_id": list(ids), "text": [f"about {id_}" for id_ in ids]})


def merged(run: RunFolder, side: str, more=(), id_type=None) -> pa.Table:
    """Merge the quarantine of a side and read it."""
    ids = id_type or pa.string()
    run.merge_quarantine(side, run.shards(side).finished().values(), more, ids)
    return run.read_quarantine(side)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "2025-03-01-1a2b3c4d")


def test_a_shard_comes_back_with_what_was_recorded(run):
    counted = DecodingStats(2, 9, 4, wall_s=1.5, drafted_by_source={"pool": 3})
    info = ShardInfo("ff", "g/0", counted, ModelFigures("m", "float32", "cpu", 9), 2)
    written = run.shards("user").write("00000", knowledge("u1", "u2"), [FAILED], info)
    assert run.shards("user").finished() == {"00000": written}
    assert written.file == "knowledge/user/00000.parquet"
    assert (written.num_rows, written.num_quarantined, written.info.group) == (2, 1, "g/0")
    assert run.shards("item").finished() == {}
    assert run.plain.shards("user").finished() == {}


def test_defaults_and_empty_shards_work(run):
    run.shards("item").write("00000", knowledge("i1").slice(0, 0))
    assert run.shards("item").finished()["00000"].num_rows == 0
    assert read_parquet(run.knowledge_folder("item")).num_rows == 0
    assert read_parquet(run.knowledge_folder("user"), schema=pa.schema([("entity_id", pa.string())])).num_rows == 0
    assert merged(run, "user").schema.equals(quarantine_schema(pa.string()))
    assert run.read_quarantine("item").num_rows == 0


@pytest.mark.parametrize("lost", ["shards/user/00001.json", "knowledge/user/00001.parquet"])
def test_a_shard_with_a_lost_file_is_done_again_and_the_others_are_not(run, lost):
    for number in range(3):
        run.shards("user").write(f"{number:05d}", knowledge(number))
    (run.root / lost).unlink()
    finished = run.shards("user").finished()
    assert list(finished) == ["00000", "00002"]
    (run.knowledge_folder("user") / ".ipynb_checkpoints").mkdir()
    run.shards("user").drop_unfinished(finished)
    assert read_parquet(run.knowledge_folder("user"))["entity_id"].to_pylist() == [0, 2]
    assert len(list(run.root.rglob("*.*"))) == 4


@pytest.mark.parametrize("file", ["knowledge/user/00000.parquet", "shards/user/00000.parquet"])
def test_a_changed_file_unfinishes_its_shard(run, file, caplog):
    run.shards("user").write("00000", knowledge("u1"), [FAILED])
    path = run.root / file
    path.write_bytes(path.read_bytes()[:-1])
    assert run.shards("user").finished() == {}
    assert file in caplog.text


def test_a_damaged_record_unfinishes_its_shard(run, caplog):
    run.shards("user").write("00000", knowledge("u1"))
    (run.root / "shards" / "user" / "00000.json").write_text('{"name": "000')
    assert run.shards("user").finished() == {}
    (run.root / "shards" / "user" / "00000.json").write_text('{"shape": "of another version"}')
    assert run.shards("user").finished() == {}
    assert "00000.json" in caplog.text


KILLED_IN_THE_SECOND_SHARD = """
import os, signal, sys
from pathlib import Path
import pyarrow as pa
from laserbatch.pipeline.storage import run_folder, side_shards
from laserbatch.pipeline.storage.quarantine import QuarantineRow
run = run_folder.RunFolder(Path(sys.argv[1]))
run.shards("user").write("00000", pa.table({"entity_id": ["u1"]}), [QuarantineRow("u2", "user", "too-long")])
name = sys.argv[2]
setattr(side_shards, name, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
run.shards("user").write("00001", pa.table({"entity_id": ["u3"]}), [QuarantineRow("u4", "user", "too-long")])
"""


@pytest.mark.parametrize("killed_at", ["write_parquet", "write_json"])
def test_a_kill_loses_the_shard_in_flight_and_no_other(run, killed_at):
    command = [sys.executable, "-c", KILLED_IN_THE_SECOND_SHARD, str(run.root), killed_at]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    finished = run.shards("user").finished()
    assert list(finished) == ["00000"]
    run.shards("user").drop_unfinished(finished)
    run.shards("user").write("00001", pa.table({"entity_id": ["u3"]}))  # the shard is done again, and u4 does not fail
    assert read_parquet(run.knowledge_folder("user"))["entity_id"].to_pylist() == ["u1", "u3"]
    assert merged(run, "user")["entity_id"].to_pylist() == ["u2"]


def test_a_shard_written_again_replaces_itself(run):
    run.shards("user").write("00000", knowledge("u1"), [FAILED])
    run.shards("user").write("00000", knowledge("u1", "u9"))
    assert merged(run, "user").num_rows == 0
    assert read_parquet(run.knowledge_folder("user")).num_rows == 2


@pytest.mark.parametrize("ids", [[9, 10, 2, -1, 7, 3], ["b", "a", "10", "9", "", "c"]])
def test_the_merged_quarantine_keeps_ids_and_texts_and_does_not_depend_on_the_order_of_shards(tmp_path, ids):
    rows = [QuarantineRow(id_, "item", "unparsable", f"line {id_}", "ff", f"no aspects {id_}") for id_ in ids]
    tables = []
    for name, cuts in (("a", [rows[:3], rows[3:5]]), ("b", [rows[4:5], rows[:4][::-1]])):
        run = RunFolder(tmp_path / name)
        for number, part in enumerate(cuts):
            run.shards("item").write(f"{number:05d}", knowledge(*ids[:1]), part)
        tables.append(merged(run, "item", rows[5:], pa.array(ids).type))
    assert tables[0].equals(tables[1])
    assert tables[0].to_pylist() == sorted(map(asdict, rows), key=lambda row: row["entity_id"])
    assert count_reasons(tables[0]) == {"unparsable": 6}


def test_text_that_is_not_unicode_can_be_quarantined():
    table = quarantine_table([QuarantineRow("a", "user", "undecodable", "\ud800", text="b\ud800")], pa.string())
    assert (table["detail"].to_pylist(), table["text"].to_pylist()) == (["\\ud800"], ["b\\ud800"])


def test_a_reason_is_the_first_word_of_the_message():
    assert QuarantineRow.of(7, "item", "too-long: 900 tokens: 512 fit") == QuarantineRow(
        7, "item", "too-long", "900 tokens: 512 fit"
    )
    assert QuarantineRow.of(7, "item", "crash").reason == "crash"
    assert QuarantineRow.of(7, "item", "").reason == "unknown"
    sentence = "The prompt (length 900) is too long: 512 fit"  # the length differs between rows
    assert QuarantineRow.of(7, "item", sentence) == QuarantineRow(7, "item", "unknown", sentence)


DATE = datetime.date(2025, 3, 1)


def test_a_manifest_comes_back(run):
    manifest = manifest_of(run.manifest_path, DATE, {"b": 1, "a": [2]})
    counted = DecodingStats(1, 5, 2, num_accepted=3, wall_s=0.5, finish_reasons={"stop": 1})
    info = ShardInfo("ff", "g", counted, ModelFigures("m", "float32", "cpu", 9), 2)
    shard = run.shards("user").write("00000", knowledge(7), info=info)
    sample = SampleText(7, None, "prompt", "text", [SampleSpan("text", "pool")], 2.5)
    manifest.generation.sides = {
        "user": SideFigures(3, 1, 1, 1, 0, {"empty": 1}, {"none": 3}, [shard], counted, None, [sample])
    }
    manifest.generation.pools = PoolsUsed("v", item=PoolFigures("v", 2, 9, {"g": {"num_texts": 2, "num_tokens": 9}}))
    manifest.stages = {"generate": 1.5, "encode": 2.0}
    manifest.save()
    loaded = run.load_manifest()
    assert loaded == manifest
    assert (loaded.run_id, loaded.status) == (make_run_id(DATE, {"a": [2], "b": 1}), "running")
    assert loaded.judgement.ctr == CtrFigures()


@pytest.mark.parametrize("change", ["lost", "of another run"])
def test_a_finished_run_is_not_whole_where_its_quarantine_is_not_what_was_counted(run, change):
    manifest, path = manifest_of(run.manifest_path, DATE), run.quarantine_path("user")
    manifest.generation.sides = {"user": SideFigures(3, 2, 0, 1, 0, {}, {}, [], DecodingStats())}
    manifest.save()
    run.merge_quarantine("user", [], [FAILED], pa.string())
    run.require_whole()
    if change == "lost":
        path.unlink()
    else:
        run.merge_quarantine("user", [], [FAILED, FAILED], pa.string())
    there = "is missing" if change == "lost" else "has 2 rows"
    with pytest.raises(WorkspaceError, match=f"{path} {there}; expected 1 rows, as {run.manifest_path} counts"):
        run.require_whole()


def test_the_run_id_follows_the_settings_not_their_order():
    assert make_run_id(DATE, {"a": 1, "b": {"c": 2, "d": 3}}) == make_run_id(DATE, {"b": {"d": 3, "c": 2}, "a": 1})
    assert make_run_id(DATE, {"a": 1}) != make_run_id(DATE, {"a": 2})
    assert make_run_id(DATE, {"a": 1}).startswith("2025-03-01-")


def test_a_manifest_of_another_version_is_refused(run):
    manifest = manifest_of(run.manifest_path, DATE)
    manifest.format_version = 1
    manifest.save()
    message = (
        rf"format version 1; this laserbatch reads 2\. .*move {run.root} away and run .* again \(`laserbatch nightly`"
    )
    with pytest.raises(WorkspaceError, match=message):
        run.load_manifest()


def test_a_manifest_that_says_something_else_is_refused_by_the_key(run):
    manifest = manifest_of(run.manifest_path, DATE)
    write_json(manifest.as_json() | {"stages": {"encode": "long"}}, run.manifest_path)
    with pytest.raises(WorkspaceError, match=r"manifest\.json is not .*: stages\.encode: .* a valid number"):
        run.load_manifest()


def test_success_needs_a_manifest_and_comes_last(run):
    with pytest.raises(WorkspaceError, match=r"manifest\.json is missing"):
        run.finish()
    manifest_of(run.manifest_path, DATE).save()
    assert not run.is_finished
    run.finish()
    assert run.is_finished
