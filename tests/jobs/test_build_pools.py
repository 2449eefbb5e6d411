"""Pools built from a run's texts, in the configured groups, and the routes of the next night into these groups."""

import datetime
import json
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from night_world import local_ray, run_here
from ray.exceptions import WorkerCrashedError

from laserbatch.jobs.failures import Terminated
from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages import build_pools as stage
from laserbatch.jobs.stages import pool_texts, run_night
from laserbatch.jobs.stages.build_pools import build_pools, describe_fit, prepare_pools, reused_routers
from laserbatch.jobs.stages.night import current_pools, open_night
from laserbatch.jobs.stages.pool_texts import read_run_texts
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.errors import ClusterFailed
from laserbatch.pipeline.planning.planner import shared_fingerprint
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index import build
from laserbatch.retrieval_pools.index import texts as texts_of_pools
from laserbatch.retrieval_pools.index.manifest import FORMAT_VERSION
from laserbatch.retrieval_pools.routing.router import Routes

FIRST_DATE, SECOND_DATE = datetime.date(2025, 2, 28), datetime.date(2025, 3, 1)


@pytest.fixture
def world(tmp_path):
    write_sample_world(tmp_path / "tables", num_users=30, num_items=60)
    return tmp_path


def opened(world, date, routing):
    path = world / "laserbatch.yaml"
    path.write_text(f"workspace: workspace\ntables: {{path: tables}}\nrouting: {routing}\n")
    return open_night(load_settings(path), date)


def write_texts(night):
    """Texts of all items, with words that depend on the mood; no texts of users."""
    moods = {mood: number for number, mood in enumerate(sorted(set(night.tables.items["mood"].to_pylist())))}
    rng = np.random.default_rng(0)
    rows = [
        {
            "entity_id": row["item_id"],
            "model_id": "m",
            "run_id": "2025-02-28-ab",
            "fingerprint": "t-p-m-d-a-h",
            "is_stale": False,
            "token_ids": 50 * moods[row["mood"]] + rng.integers(0, 50, 20),
        }
        for row in night.tables.items.to_pylist()
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "token_ids"}
    token_ids = pa.array([row["token_ids"] for row in rows], pa.list_(pa.int32()))
    texts = pa.table(columns | {"token_ids": token_ids})
    night.run.shards("item").write("00000", texts)
    night.run.shards("user").write("00000", texts.slice(0, 0))


def test_routers_are_kept_until_a_twentieth_of_what_they_were_fitted_on_has_changed(world):
    night = opened(world, FIRST_DATE, "{}")
    write_texts(night)
    build_pools(night)
    next_night = opened(world, SECOND_DATE, "{}")
    version = night.run.run_id
    fitted_on = night.pools.folder(version) / "router" / "fit.json"
    next_night.tables = replace(night.tables, interactions=night.tables.interactions.slice(9))
    now = describe_fit(next_night)
    assert 0 < 1 - now["num_rows"]["interactions"] / describe_fit(night)["num_rows"]["interactions"] <= 0.05
    routers, fit = reused_routers(next_night, version, now)
    assert fit == json.loads(fitted_on.read_text()) and set(routers) == {"user", "item"}
    next_night.run.shards("item").write("00000", read_parquet(night.run.knowledge_folder("item")))
    next_night.run.shards("user").write("00000", read_parquet(night.run.knowledge_folder("user")))
    build_pools(next_night)
    fit_file = next_night.pools.folder(next_night.run.run_id) / "router" / "fit.json"
    assert fit_file.read_bytes() == fitted_on.read_bytes()
    assert reused_routers(opened(world, SECOND_DATE, "{scheme: attribute}"), version, now | {"seed": 1}) is None
    more = {"num_rows": now["num_rows"] | {"interactions": int(now["num_rows"]["interactions"] * 1.2)}}
    assert reused_routers(next_night, version, now | more) is None
    next_night.tables = replace(next_night.tables, users=next_night.tables.users.slice(2))
    assert reused_routers(next_night, version, now) is None


def changed(night, every):
    """Change the last token of every `every`-th text of the run."""
    before = read_parquet(night.run.knowledge_folder("item"))
    ids = [ids[:-1] if row % every == 0 else ids for row, ids in enumerate(before["token_ids"].to_pylist())]
    column = before.schema.get_field_index("token_ids")
    night.run.shards("item").write("00000", before.set_column(column, "token_ids", pa.array(ids, pa.list_(pa.int32()))))


@pytest.mark.usefixtures("removes_as_nfs")
def test_nights_pools_are_merged_from_the_current_version_and_equal_a_full_build(world):
    night = opened(world, FIRST_DATE, "{}")
    write_texts(night)
    first = build_pools(night)["item"]
    assert (first.incremental, first.num_texts_changed) == (False, first.num_texts)
    again = build_pools(night)["item"]
    assert (again.incremental, again.num_texts_changed) == (True, 0)
    changed(night, 10)
    merged = build_pools(night)["item"]
    assert (merged.incremental, merged.num_texts_changed) == (True, -(-merged.num_texts // 10))
    files = contents(night)
    (night.pools.root / "CURRENT").unlink()
    full = build_pools(night)["item"]
    assert (full.incremental, full.num_texts_changed) == (False, full.num_texts)
    assert contents(night) == files
    assert not any("texts.npy" in name or "scratch" in name for name in files)


def contents(night):
    folder = night.pools.folder(night.run.run_id)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["flip", "format", "cut", "router", "pointer"])
def test_pools_that_cannot_be_used_are_not_drafted_from_and_cost_a_full_build_and_no_more(world, damage, capsys):
    night = opened(world, FIRST_DATE, "{}")
    write_texts(night)
    build_pools(night)
    expected = contents(night)
    assert opened(world, SECOND_DATE, "{}").manifest.generation.pools.version == night.run.run_id
    pool = night.pools.folder(night.run.run_id) / "item"
    order, manifest = pool / "order.npy", pool / "manifest.json"
    match damage:
        case "flip":
            order.write_bytes(order.read_bytes()[:-1] + b"\x7f")
        case "cut":
            order.write_bytes(order.read_bytes()[:-1])
        case "format":
            manifest.write_text(
                manifest.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 1')
            )
        case "router":
            (pool.parent / "router" / "item" / "collaborative.parquet").write_bytes(b"x")
        case "pointer":
            (night.pools.root / "CURRENT").write_text("2025-01-01-gone")
    assert current_pools(night.pools, 1, night.date) is None
    resumed = opened(world, SECOND_DATE, "{}").manifest.generation.pools.version
    assert resumed == (night.run.run_id if damage == "pointer" else None)
    assert not build_pools(night)["item"].incremental
    output = " ".join(capsys.readouterr().err.split())
    assert ("not drafting from the pools" in output) is (damage != "pointer")
    assert "the item pool is rebuilt from all texts" in output
    assert contents(night) == expected


def test_texts_come_in_the_order_of_the_table(world, tmp_path):
    night = opened(world, SECOND_DATE, "{}")
    write_texts(night)
    rows = read_parquet(night.run.knowledge_folder("item"))
    shuffled = rows.take(pa.array(np.random.default_rng(1).permutation(rows.num_rows)))
    night.run.shards("item").write("00000", shuffled.slice(0, 10))
    night.run.shards("item").write("00001", shuffled.slice(10, 30))
    read = read_run_texts(night, "item", tmp_path)
    ids, routes = night.tables.items["item_id"].to_pylist(), Routes.nowhere(night.tables.items.num_rows)
    (texts,) = read.pool_texts(night.tables, "item", routes)
    by_id = dict(zip(rows["entity_id"].to_pylist(), rows["token_ids"].to_pylist(), strict=True))
    written = shuffled["entity_id"].to_pylist()[:40]
    entity_ids = [ids[row] for row in texts.entity_codes]
    assert entity_ids == [entity for entity in ids if entity in written]
    parts = zip(texts.begins.tolist(), texts.lengths.tolist(), strict=True)
    texts = [read.tokens[begin : begin + length].tolist() for begin, length in parts]
    assert texts == [by_id[key] for key in entity_ids]
    assert read_run_texts(night, "user", tmp_path) is None


def test_texts_of_another_tokenizer_go_into_no_pool_and_its_pools_are_not_drafted_from(world, monkeypatch, capsys):
    night = opened(world, FIRST_DATE, "{}")
    write_texts(night)
    rows = read_parquet(night.run.knowledge_folder("item"))
    waiting = rows.slice(0, 20).drop_columns(["fingerprint", "is_stale"])
    waiting = waiting.append_column("fingerprint", pa.array(["t-other-other-d-a-h"] * 20))
    waiting = waiting.append_column("is_stale", pa.array([True] * 20)).select(rows.column_names)
    night.run.shards("item").write("00000", pa.concat_tables([waiting, rows.slice(20)]))
    assert build_pools(night)["item"].num_texts == rows.num_rows - 20
    assert opened(world, SECOND_DATE, "{}").manifest.generation.pools.version == night.run.run_id
    monkeypatch.setattr("laserbatch.jobs.stages.night.tokenizer_hash", lambda folder: "another")
    assert opened(world, SECOND_DATE, "{}").manifest.generation.pools.version is None  # an unfinished run is continued
    assert opened(world, SECOND_DATE, "{scheme: global}").manifest.generation.pools.version is None  # a new run begins
    assert capsys.readouterr().err.count("its token ids mean other texts") == 2


def test_pools_of_a_night_in_which_every_new_text_failed_hold_the_stale_texts(world, capsys):
    night = opened(world, FIRST_DATE, "{}")
    write_texts(night)
    rows, settings = read_parquet(night.run.knowledge_folder("item")), night.settings
    model = shared_fingerprint(night.template("item"), 16, settings.decoding, settings.model_dir).split("-")[2]
    fingerprints = [f"t-p-{model}-d-a-h"] * 20 + ["t-p-other-d-a-h"] * (rows.num_rows - 20)
    columns = {"fingerprint": pa.array(fingerprints), "is_stale": pa.array([True] * rows.num_rows)}
    stale = pa.table({name: columns.get(name, rows[name]) for name in rows.column_names})
    night.run.shards("item").write("00000", stale)
    assert build_pools(night)["item"].num_texts == 20
    night.run.shards("item").write("00000", stale.slice(20))
    assert "item" not in build_pools(night)
    assert "the run has no item texts of its model's tokenizer" in " ".join(capsys.readouterr().err.split())


def test_of_more_texts_than_a_pool_holds_some_are_left_out_and_counted(world, monkeypatch, capsys):
    """The same texts are left out every night, although other texts come and go, and the night succeeds."""
    for module in (pool_texts, texts_of_pools, build):
        monkeypatch.setattr(module, "MAX_POSITIONS", 630)
    night = opened(world, SECOND_DATE, "{}")
    write_texts(night)  # 20 tokens and a separator each
    assert build_pools(night)["item"].num_texts == 29
    assert "the item pool holds 29 of 60 texts: its limit is 630 tokens" in " ".join(capsys.readouterr().err.split())
    ids = np.array(night.tables.items["item_id"].to_pylist())

    def ids_in_pool(tables) -> set:
        with TemporaryDirectory() as folder:
            is_in_pool = read_run_texts(night, "item", Path(folder)).in_pool(tables, "item") >= 0
        return set(np.array(tables.items["item_id"].to_pylist())[is_in_pool].tolist())

    before = ids_in_pool(night.tables)
    assert len(before) == 29 and before != set(ids[:29])
    fewer = replace(night.tables, items=night.tables.items.slice(5))
    assert before & set(ids[5:]) <= ids_in_pool(fewer)


def test_a_builder_is_refused_while_another_command_works_and_leaves_nothing_else(world, capfd):
    night = opened(world, FIRST_DATE, "{}")
    write_texts(night)
    command = ("pools", "rebuild", "--run", night.run.run_id, "--config", str(world / "laserbatch.yaml"))
    with night.workspace.lock():
        refused = run_here(capfd, *command)
        assert refused.returncode == 5 and "in use" in refused.stderr
        assert night.pools.list() == []
    built = run_here(capfd, *command)
    assert built.returncode == 0
    [version] = night.pools.list()
    assert version.problem is None
    assert not version.is_current and f"run {version.version} is not finished" in built.stderr
    assert night.pools.open(version.version, "item", verify=True) is not None
    assert [path.name for path in night.pools.root.iterdir() if path.name.endswith(".tmp")] == []


def test_collection_spares_what_an_unfinished_run_drafts_from(world, capfd):
    night = opened(world, FIRST_DATE, "{}")
    write_texts(night)
    build_pools(night)
    unfinished = opened(world, SECOND_DATE, "{}")
    assert unfinished.manifest.generation.pools.version == night.run.run_id
    for version in ("2025-03-02-x", "2025-03-03-x"):
        with night.pools.publish(version) as folder:
            (folder / "item").mkdir()
    used = night.run.run_id
    arguments = ("pools", "gc", "--keep", "1", "--json", "--config", str(world / "laserbatch.yaml"))
    planned = json.loads(run_here(capfd, *arguments, "--dry-run").stdout)
    assert (planned["versions"], planned["dry_run"]) == (["2025-03-02-x"], True)
    assert json.loads(run_here(capfd, *arguments).stdout)["versions"] == ["2025-03-02-x"]
    assert used in {version.version for version in night.pools.list()}
    unfinished.run.finish()
    assert "removed pools " + used in " ".join(run_here(capfd, *arguments).stderr.split())
    assert [version.version for version in night.pools.list()] == ["2025-03-03-x"]


@pytest.fixture
def first_night(world):
    night = opened(world, FIRST_DATE, "{}")
    write_texts(night)
    return night


def test_pools_are_built_while_texts_are_encoded_and_are_the_same(first_night, monkeypatch):
    alone = build_pools(first_night)["item"]
    files = files_of(first_night)
    together = threading.Barrier(2, timeout=60)

    def prepared(*arguments, **options):
        build = prepare_pools(*arguments, **options)
        return lambda: together.wait() >= 0 and build()

    monkeypatch.setattr(run_night, "prepare_pools", prepared)
    monkeypatch.setattr(run_night, "encode_run", lambda *_, **__: {} if together.wait() >= 0 else None)
    run_night.encode_and_build_pools(first_night, NightWorkers(first_night.settings.cluster))
    assert first_night.manifest.pools_built["item"].num_texts == alone.num_texts
    assert files_of(first_night) == files and {"encode", "pools"} == first_night.manifest.stages.keys()


@pytest.mark.ray
def test_a_task_builds_the_pools_that_this_process_builds(first_night, monkeypatch, capsys):
    version, pools = first_night.run.run_id, first_night.pools
    expected = build_pools(first_night, make_current=False)["item"]
    alone = {path.name: path.read_bytes() for path in pools.folder(version).rglob("*") if path.is_file()}
    capsys.readouterr()
    monkeypatch.setattr(stage, "MIN_TEXTS_OF_TASK", 0)
    with local_ray(num_workers=1) as layout:

        def built():
            return prepare_pools(first_night, start_cluster=lambda: layout)()

        pool = built()["item"]
        assert replace(pool, build_s=expected.build_s) == expected and pools.current_version() == version
        by_task = {path.name: path.read_bytes() for path in pools.folder(version).rglob("*") if path.is_file()}
        assert by_task == alone
        lacking = "no user pool is built, because the run has no user texts of its model's tokenizer\n"
        assert capsys.readouterr().err == lacking
        with monkeypatch.context() as patched:
            patched.setattr(ray, "get", Mock(side_effect=WorkerCrashedError))
            with pytest.raises(
                ClusterFailed, match=r"^building pools: the processes of a task died .* the same command"
            ):
                built()
        # If a task cannot build the pools as the night would have, this process does, with the tables that it has read.
        users = Path(first_night.settings.tables.path) / "users.parquet"
        pq.write_table(pq.read_table(users).slice(1), users)
        assert built()["item"].num_texts == expected.num_texts
        assert "because a task could not: the table users has changed since the night began" in capsys.readouterr().err
        users.unlink()
        assert built() and "because a task could not: users: the table is missing" in capsys.readouterr().err


def test_a_night_whose_pools_fail_while_it_encodes_ends_with_their_error(first_night, monkeypatch):
    def failing():
        raise PoolError("the disk is full")

    monkeypatch.setattr(run_night, "prepare_pools", lambda *_, **__: failing)
    monkeypatch.setattr(run_night, "encode_run", lambda *_, **__: {})
    with pytest.raises(PoolError, match="the disk is full"):
        run_night.encode_and_build_pools(first_night, NightWorkers(first_night.settings.cluster))


@pytest.mark.parametrize("error", [Terminated, RuntimeError])
def test_who_ends_the_process_does_not_wait_for_pools_and_errors_do(first_night, monkeypatch, error):
    goes_on, is_built = threading.Event(), threading.Event()

    def encode(*_, **__):
        threading.Timer(0.2, goes_on.set).start()
        raise error

    monkeypatch.setattr(run_night, "prepare_pools", lambda *_, **__: lambda: goes_on.wait(60) and is_built.set())
    monkeypatch.setattr(run_night, "encode_run", encode)
    with pytest.raises(error):
        run_night.encode_and_build_pools(first_night, NightWorkers(first_night.settings.cluster))
    assert is_built.is_set() == (error is RuntimeError)
    assert is_built.wait(60)


def files_of(night):
    folder = night.pools.folder(night.run.run_id)
    return {path.name: path.read_bytes() for path in folder.rglob("*.npy")}
