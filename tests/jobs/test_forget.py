"""Searches every byte of a workspace for a planted user, before and after: raw, decompressed, and as token ids."""

import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from night_world import run_here, write_here
from planted_night import Encoder
from small_world import TEMPLATES, World, first_world

from laserbatch.jobs.cli import main
from laserbatch.jobs.commands import forget as forgetting
from laserbatch.jobs.settings import PACKAGE_ROOT
from laserbatch.jobs.stages import shards, spans
from laserbatch.pipeline.decoding.model.folder import load_tokenizer
from laserbatch.pipeline.encoding import feature_parts
from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.knowledge.records import knowledge_schema
from laserbatch.pipeline.planning.plan import read_shard
from laserbatch.pipeline.storage import atomic
from laserbatch.pipeline.storage.figures import AuditedText, ModelFigures, ShardInfo
from laserbatch.pipeline.storage.forgetting import is_of, unfinished_receipts
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.retrieval_pools.index.store import PoolStore

WHO, MOOD = "Zoë-Ω", "quixotic"
SECRET = "Zebulon Quartz collects harbour lanterns."
TOKENIZER = load_tokenizer(PACKAGE_ROOT / "models" / "sample")


def token_ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def planted(pending, worker_pool, *_):
    """A stand-in for the model: each text names its user, and the planted user's text is the secret."""
    spec = worker_pool.spec
    folder = RunFolder(spec.run_dir)
    for shard in pending:
        records, failed, schema = [], [], knowledge_schema(pa.string())
        for row in read_shard(spec.run_dir / shard.path):
            text = SECRET if row.entity_id == WHO else f"About {row.entity_id}: the pier at night is calm and long."
            text += " And oars." * (row.entity_id == WHO and not spec.decoding.drafters)  # so that the audit shows both
            if "2025-03-02" in spec.run_id and row.entity_id == WHO:
                failed.append(QuarantineRow.of(WHO, "user", "unparsable", row.fingerprint, text))
                continue
            ids = token_ids(text)
            filled = {"entity_id": row.entity_id, "side": shard.side, "framework": "kar", "template": "t", "text": text,
                      "token_ids": ids, "token_sources": [0] * len(ids), "fields_json": "{}", "run_id": spec.run_id,
                      "fingerprint": row.fingerprint, "model_id": "m", "decoding_json": "{}", "finish_reason": "stop",
                      "pool_group": row.group, "is_stale": False}  # fmt: skip
            records.append({name: filled.get(name, None if name == "pool_version" else 1) for name in schema.names})
        stats = DecodingStats(num_texts=len(records), num_tokens=9 * len(records), num_steps=9, wall_s=1.0)
        info = ShardInfo(shard.sha256, shard.group, stats, ModelFigures("m", "float32", "cpu", 1), 1)
        yield shard, folder.shards(shard.side).write(shard.name, pa.Table.from_pylist(records, schema), failed, info)


def first_planted_world() -> World:
    """The first world without events after February, and a planted user, who also has events in March."""
    world = first_world()
    world.users[WHO] = {"mood": MOOD, "created_at": "2025-02-10"}
    world.events = [event for event in world.events if event[2] < "2025-03"]
    world.events += [(WHO, "i0", "2025-02-27", 5.0), (WHO, "i1", "2025-03-02", 4.0), (WHO, "i2", "2025-03-03", 4.0)]
    return world


@pytest.fixture(scope="module")
def lived(tmp_path_factory) -> Path:
    """Three nights with a planted user, the last of them unfinished, and the remains of killed writers."""
    folder = tmp_path_factory.mktemp("lived")
    (folder / "prompts").mkdir()
    for name, template in TEMPLATES.items():
        head = {"name": name, "version": 1, "framework": "kar", "parser": "free", "instruction": "Describe."}
        template = template | ({"attributes": {}} if name == "brief_user" else {})
        (folder / "prompts" / f"{name}.yaml").write_text(yaml.safe_dump(head | template))
    world = first_planted_world()
    world.write(folder / "tables")
    settings = {
        "workspace": "workspace", "tables": {"path": "tables"}, "encoding": {"num_clusters": 8},
        "knowledge": {"template_dir": "prompts", "user_template": "brief_user", "item_template": "brief_item"},
        "decoding": {"max_draft_tokens": 4, "min_acceptance": 0.1, "batch_size": 8},
        "night": {"shard_size": 2, "compare_with_plain": True, "train_ctr": False},
        "gates": {"max_failed_share": 0.9},
    }  # fmt: skip
    (folder / "laserbatch.yaml").write_text(yaml.safe_dump(settings))
    with pytest.MonkeyPatch.context() as patched:
        write_here(patched)
        patched.setattr(spans, "NUM_SAMPLES", 9)
        patched.setattr(shards, "run_shards", planted)
        patched.setattr(TextEncoder, "load", lambda settings: Encoder())
        patched.setattr(feature_parts, "PART_ROWS", 1)  # so that a side has several feature files
        from laserbatch.jobs.settings import load_settings
        from laserbatch.jobs.stages.night import parse_date
        from laserbatch.jobs.stages.run_night import run_night

        loaded = load_settings(folder / "laserbatch.yaml")
        for day in ("2025-03-01", "2025-03-02"):
            last = run_night(loaded, parse_date(day))
        with patched.context() as broken, pytest.raises(KeyboardInterrupt):
            broken.setattr(
                "laserbatch.jobs.stages.run_night.prepare_pools",
                lambda *_, **__: lambda: (_ for _ in ()).throw(KeyboardInterrupt),
            )
            run_night(loaded, parse_date("2025-03-03"))
    workspace = folder / "workspace"
    shutil.copytree(workspace / "pools" / last.run.run_id, workspace / "pools" / ".torn.1-ab.tmp")
    shutil.copy(last.run.knowledge_folder("user") / "stale.parquet", last.run.root / "knowledge" / ".torn.1-ab.tmp")
    return folder


@pytest.fixture
def folder(lived, tmp_path) -> Path:
    shutil.copytree(lived, tmp_path / "copy")
    return tmp_path / "copy"


def traces(workspace: Path, vectors: set[bytes]) -> set[str]:
    """Files that contain the planted user: id, attribute, text, token ids or vector."""
    ids = token_ids(SECRET)
    needles = [word.encode() for word in (WHO, MOOD, "Zebulon")] + [np.array(ids, np.int32).tobytes(), *vectors]
    traces_of_ids = set()
    for path in (path for path in workspace.rglob("*") if path.is_file()):
        held = path.read_bytes()
        if held[:4] == b"PAR1":
            table = pq.read_table(path)
            held += json.dumps(table.drop_columns([n for n in ("vector",) if n in table.column_names]).to_pylist(),
                               ensure_ascii=False, default=str).encode()  # fmt: skip
            for name in {"vector", "token_ids", "previous_ids"} & set(table.column_names):
                flat = table[name].combine_chunks().drop_null().flatten()
                held += flat.to_numpy(zero_copy_only=False).tobytes()
        if any(needle in held for needle in needles):
            traces_of_ids.add(path.relative_to(workspace).as_posix())
    return traces_of_ids


def vectors_of(workspace: Path) -> set[bytes]:
    vectors = set()
    for path in workspace.rglob("features/user/*.parquet"):
        for row in pq.read_table(path).to_pylist():
            if row["user_id"] == WHO:
                vectors.add(np.array(row["vector"], np.float32).tobytes())
    return vectors


def nearest_centroid(workspace: Path, vectors: set[bytes]) -> float:
    """The smallest distance of the planted user's vectors from all centroids; 0 if a cluster has only this user."""
    files = workspace.rglob("user-centroids.parquet")
    centroids = [np.stack(pq.read_table(path)["vector"].to_pylist()) for path in files]
    own_vectors = [np.frombuffer(vector, np.float32) for vector in vectors]
    return min(float(np.abs(part - vector).max(axis=1).min()) for part in centroids for vector in own_vectors)


def forget(folder: Path, capfd, *options: str, code: int = 0) -> dict:
    done = run_here(capfd, "forget", "--config", str(folder / "laserbatch.yaml"), *options, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) | {"said": done.stderr}


def test_a_person_is_in_no_byte_of_the_workspace_after_being_forgotten(folder, capfd):
    workspace = folder / "workspace"
    vectors = vectors_of(workspace)
    before = traces(workspace, vectors)
    kinds = ("knowledge/user", "plan/user", "quarantine/user", "features/user/00000.parquet", "plain/", "manifest.json",
             "report.html", "shards/user", ".torn.1-ab.tmp/", "knowledge/.torn")  # fmt: skip
    assert not [kind for kind in kinds if not any(kind in name for name in before)], sorted(before)
    assert len(list(workspace.glob("runs/2025-03-01*/features/user/*.parquet"))) > 1
    assert nearest_centroid(workspace, vectors) < 1e-5
    assert any(name.startswith("pools/2025-03-02") for name in before) and len(vectors) > 0
    assert [case.entity_id for run in workspace.glob("runs/2025-03-0[12]*") for case in _audited(run)] == [WHO]
    others = {side: _others(workspace, side) for side in ("user", "item")}
    published = json.loads((workspace / "published.json").read_text())

    dry = forget(folder, capfd, "--user", WHO, "--dry-run")
    assert dry["rows"] and traces(workspace, vectors) == before and not (workspace / "forgotten").exists()
    done = forget(folder, capfd, "--user", WHO)
    assert traces(workspace, vectors) == set() and nearest_centroid(workspace, vectors) > 1e-2
    assert "still in the input table users" in done["said"] and done["still_in_tables"]["users"] == [WHO]

    assert not [case for run in workspace.glob("runs/*") for case in _audited(run)]
    assert {side: _others(workspace, side) for side in ("user", "item")} == others
    assert json.loads((workspace / "published.json").read_text()) == published
    assert [run[:10] for run in done["removed_runs"]] == ["2025-03-03"] and done["num_samples"] > 0
    assert set(done["pools"].values()) == {"rebuilt", "dropped"} and done["num_leftovers"] == 2
    assert (workspace / "pools" / "CURRENT").read_text().strip() == published["run_id"]
    receipt = json.loads(Path(done["receipt"]).read_text())
    assert receipt["is_done"] and list(receipt["ids"]["user"].values()) == [True]
    _check_sums(workspace)

    again = forget(folder, capfd, "--user", WHO)
    assert again["unknown"] == {"user": [WHO], "item": []} and not again["rows"] and not again["pools"]


def _audited(run: Path) -> list[AuditedText]:
    audit = RunFolder(run).load_manifest().judgement.audit
    return [case for audit_of_side in audit.sides.values() for case in audit_of_side.cases] if audit is not None else []


def _others(workspace: Path, side: str) -> dict:
    """The rows of all other users in finished runs, by file."""
    rows = {}
    for path in sorted(workspace.glob(f"runs/2025-03-0[12]*/**/{side}*.parquet")) + sorted(
        workspace.glob(f"runs/2025-03-0[12]*/**/{side}/*.parquet")
    ):
        if "centroids" not in path.name:
            key = f"{side}_id" if "features" in path.parts else "entity_id"
            rows[path.relative_to(workspace)] = [row for row in pq.read_table(path).to_pylist() if row[key] != WHO]
    return rows


def _check_sums(workspace: Path) -> None:
    for run in workspace.glob("runs/*"):
        for folder in (RunFolder(run), RunFolder(run).plain):
            for side in ("user", "item"):
                names = {path.stem for path in folder.root.glob(f"shards/{side}/*.json")}
                assert set(folder.shards(side).finished()) == names != set()
                plan = json.loads((folder.root / "plan" / f"{side}.json").read_text())
                written = sum(shard["num_rows"] for shard in plan["shards"])
                assert plan["num_entities"] == written + plan["num_carried_over"] + plan["num_unpromptable"]
                for shard in plan["shards"]:
                    assert atomic.sha256_file(folder.root / shard["path"]) == shard["sha256"]
                record = json.loads((folder.root / "shards" / side / "00000.json").read_text()) if written else None
                assert record is None or record["info"]["planned_sha256"] == plan["shards"][0]["sha256"]
        manifest = RunFolder(run).load_manifest()
        for side, figures in manifest.generation.sides.items():
            assert figures.num_entities == {"user": 4, "item": 3}[side]
            assert figures.num_quarantined == sum(figures.quarantine_reasons.values())
            own = RunFolder(run)
            for folder, features in ((own, manifest.features), (own.plain, manifest.plain_features)):
                folder.require_features({side: features[side]}, compare_bytes=True)
                folder.require_centroids(side, features[side])


def killed(folder: Path, num_done: int) -> int:
    """Run `laserbatch forget` in a process that is killed (-9) at a write to the workspace; returns its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    num_seen = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal num_seen
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") and str(folder) in str(arguments[0]):
            num_seen += 1
            if num_seen > num_done:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    sys.argv = ["laserbatch", "forget", "--config", str(folder / "laserbatch.yaml"), "--user", WHO]
    with suppress(BaseException):
        main()
    os._exit(0)


def test_the_same_command_goes_on_where_it_was_killed(folder, capfd, monkeypatch):
    monkeypatch.setattr(forgetting, "_rebuilt", lambda *_: False)
    vectors = vectors_of(folder / "workspace")
    undisturbed = folder.with_name("undisturbed")
    shutil.copytree(folder, undisturbed)
    whole = forget(undisturbed, capfd, "--user", WHO)
    for num_done in (0, 2, 11, 29, 48):
        place = shutil.copytree(folder, folder.with_name(f"killed-{num_done}"))
        assert killed(place, num_done) == -signal.SIGKILL
        assert bool(unfinished_receipts(place / "workspace")) == (num_done > 0)
        done = forget(place, capfd, "--user", WHO)
        assert traces(place / "workspace", vectors) == set() and not unfinished_receipts(place / "workspace")
        assert done["rows"] == whole["rows"] and done["pools"] == whole["pools"] and done["unknown"]["user"] == []
        assert contents(place / "workspace") == contents(undisturbed / "workspace")


def test_a_command_for_other_ids_finishes_the_pools_of_one_that_was_killed(folder, capfd, monkeypatch):
    workspace = folder / "workspace"
    current = PoolStore(workspace / "pools").current_version()
    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(forgetting, "_rebuilt", mock.Mock(side_effect=KeyboardInterrupt))
        run_here(capfd, "forget", "--config", str(folder / "laserbatch.yaml"), "--user", WHO, "--item", "i0")
    assert unfinished_receipts(workspace)
    done = forget(folder, capfd, "--user", WHO)
    assert done["pools"][current] == "rebuilt"


@pytest.mark.parametrize(
    "command",
    [
        ("runs", "publish", "{first}"),
        ("runs", "rollback"),
        ("nightly", "--date", "2025-03-02"),
        ("backfill", "--from", "2025-03-02", "--to", "2025-03-02", "--publish"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_every_place_that_a_command_delivered_to_is_named(folder, capfd, monkeypatch, command):
    """Also in a dry run, and after the run and its events were deleted."""
    monkeypatch.setattr(forgetting, "_rebuilt", lambda *_: False)
    config, first = folder / "laserbatch.yaml", RunFolder(min((folder / "workspace" / "runs").glob("2025-03-01-*")))
    settings = yaml.safe_load(config.read_text())
    there, now = folder / "there", folder / "now"
    config.write_text(yaml.safe_dump(settings | {"deliver_to": there.as_uri() + "/"}))
    done = run_here(capfd, *(part.format(first=first.run_id) for part in command), "--config", str(config))
    assert done.returncode == 0, done.stderr
    assert WHO.encode() in b"".join(path.read_bytes() for path in there.rglob("user/*.parquet"))
    assert forget(folder, capfd, "--user", WHO, "--dry-run")["not_reached"] == []
    config.write_text(yaml.safe_dump(settings | {"deliver_to": now.as_uri()}))
    for events in (folder / "workspace").rglob("events.jsonl"):
        events.unlink()
    for options in (("--dry-run",), ()):
        done = forget(folder, capfd, "--user", WHO, *options)
        assert done["not_reached"] == [there.as_uri()]
        assert f"WARNING: runs were also delivered to {there.as_uri()};" in done["said"]
    config.write_text(yaml.safe_dump(settings | {"deliver_to": there.as_uri()}))
    done = forget(folder, capfd, "--user", WHO)
    assert done["not_reached"] == [now.as_uri()]  # the place to which the last command delivered the published run
    assert "sent again" in done["delivered"].values()
    assert WHO.encode() not in b"".join(path.read_bytes() for path in there.rglob("*") if path.is_file())


def contents(workspace: Path) -> dict[str, bytes]:
    files = (path for path in workspace.rglob("*") if path.is_file() and path.parent.name != "forgotten")
    return {path.relative_to(workspace).as_posix(): path.read_bytes() for path in files}


def test_ids_come_from_a_file_and_unknown_ones_are_told(folder, capfd, monkeypatch):
    monkeypatch.setattr(forgetting, "_rebuilt", lambda *_: False)
    (folder / "ids.txt").write_text(f"{WHO}\r\nnobody\n\n", "utf-8-sig")
    before = contents(folder / "workspace")
    (folder / "workspace" / "forgotten").mkdir()
    for number, damaged in enumerate(('{"is_done": false}', '{"is_done": true, "ids": []}', "{")):
        (folder / "workspace" / "forgotten" / f"damaged-{number}.json").write_text(damaged)
    done = forget(folder, capfd, "--user", "nobody", "--item", "7", code=4)
    assert done["unknown"] == done["nowhere"] == {"user": ["nobody"], "item": ["7"]}
    receipt = json.loads(Path(done["receipt"]).read_text())
    assert receipt["is_done"] and receipt["nowhere"] == {side: [*ids] for side, ids in receipt["ids"].items()}
    assert "2 ids" not in done["said"] and "1 user id found nowhere" in done["said"] and "'nobody'" in done["said"]
    assert {name: held for name, held in contents(folder / "workspace").items() if "torn" not in name} == {
        name: held for name, held in before.items() if "torn" not in name
    }
    done = forget(folder, capfd, "--ids", str(folder / "ids.txt"), "--dry-run", code=4)
    assert done["nowhere"]["user"] == ["nobody"] and done["rows"]
    done = forget(folder, capfd, "--ids", str(folder / "ids.txt"), code=4)
    assert done["unknown"]["user"] == ["nobody"] and done["rows"]
    shutil.rmtree(folder / "tables")
    done = forget(folder, capfd, "--user", WHO)  # an earlier receipt says that the user was removed
    assert done["unknown"]["user"] == [WHO] and not done["nowhere"]["user"]
    assert forget(folder, capfd, code=2)["kind"]
    assert "none is empty" in forget(folder, capfd, "--user", WHO, "--item", "", code=2)["error"]
    assert "is not UTF-8" in forget(folder, capfd, "--user", "Zo\udceb", code=2)["error"]
    done = forget(folder, capfd, "--item", "i0")
    assert done["rows"] and "titles of these items stay" in done["said"]
    assert not [row for rows in _others(folder / "workspace", "item").values() for row in rows
                if row.get("entity_id", row.get("item_id")) == "i0"]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ids", "expected"),
    [(pa.int64(), {"7", "007", "x"}, [True, False]), (pa.int32(), {"-5"}, [False, True]),
     (pa.string(), {"7"}, [True, False]),
     (pa.large_string(), {str(2**70)}, [False, False]), (pa.int64(), {str(2**70), "٧"}, [False, False])],
)  # fmt: skip
def test_ids_match_whatever_their_type(kind, ids, expected):
    column = pa.array([7, -5]).cast(kind)
    assert is_of(column, frozenset(ids)).to_pylist() == is_of(column.dictionary_encode(), frozenset(ids)).to_pylist()
    assert is_of(column, frozenset(ids)).to_pylist() == expected
    too_large = pa.array([2**64 - 5], pa.uint64())  # no night reads such a number, but `forget` may be asked for one
    assert [is_of(too_large, frozenset({key})).to_pylist() for key in ("-5", str(2**64 - 5))] == [[False], [True]]


def test_events_whose_error_or_escaped_line_names_an_id_go(tmp_path):
    who, log = 'Ann "x\\1"\u2028', tmp_path / "events.jsonl"
    facts = [{"line": f"of 2 users {who!r}"}, {"error": f"1 are missing ({who})"}, {"line": "begun"}]
    lines = [json.dumps({"event": "said"} | fact, ensure_ascii=False) + "\n" for fact in facts]
    log.write_text("".join(lines), "utf-8")
    forgetting._forget_in_events(log, forgetting._finder({"user": frozenset({who}), "item": frozenset()}))
    assert log.read_text("utf-8") == lines[-1]


def test_the_time_to_find_ids_in_events_does_not_grow_with_their_number_and_long_lists_are_cut():
    ids = [f"u{number}" for number in range(200_000)]
    names_one, start_s = forgetting._finder({"user": frozenset(ids), "item": frozenset({"é-1"})}), time.perf_counter()
    named = [names_one(text) for _ in range(200) for text in ("of u7, and", "of u200000, xu7", "(é-1)", "é-12 é-1é")]
    assert named == [True, False, True, False] * 200 and time.perf_counter() - start_s < 1
    assert forgetting._first(ids) == "'u0', 'u1', 'u2', 'u3', 'u4' and 199,995 more"
    assert forgetting._first(ids[:5]) == "'u0', 'u1', 'u2', 'u3', 'u4'"
