"""Nightly lists: written, carried over, resumed, held back; without removed items; wrong input is named."""

import datetime
import json
import re
import shutil
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from night_world import FIRST_DATE, SECOND_DATE, Done, command_here, make_world, run_here, write_config
from safetensors.torch import load_file, save_file

from laserbatch.jobs.stages import shards as shards_stage
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.distributed.cluster import WorkerLayout
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.read import read_tables
from laserbatch.research.recommending import nightly as stage
from laserbatch.research.recommending import planned, train_on_tables
from laserbatch.research.recommending.list_worker import ListWorker
from laserbatch.research.recommending.training import RecommenderOptions


@pytest.fixture(autouse=True)
def lists_are_made_here(request, monkeypatch):
    """Make lists by one worker in this process, except in tests marked `ray`: Ray takes seconds to start."""
    if not request.node.get_closest_marker("ray"):
        make_lists_here(monkeypatch)


def make_lists_here(patched: pytest.MonkeyPatch) -> None:
    def worker_pool(_, spec):
        spec = replace(spec, device="cpu", num_threads=1, num_workers=1)
        worker = ListWorker(spec)
        call_one = lambda method, *arguments: getattr(worker, method)(*arguments)  # noqa: E731
        return SimpleNamespace(spec=spec, layout=WorkerLayout(1, 1, 0, "cpu"), run=worker.run, call_one=call_one)

    def here(pending, worker_pool, choose, on_first_text):
        for shard in pending:
            yield shard, worker_pool.run(shard, choose(None)["user"])

    patched.setattr(NightWorkers, "worker_pool", worker_pool)
    patched.setattr(shards_stage, "run_shards", here)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A world with codes of its items, a recommender trained for two epochs, and a small one that drafts for it."""
    folder = make_world(tmp_path_factory.mktemp("world"))
    items = read_tables(folder / "tables", as_of=datetime.date.fromisoformat(FIRST_DATE)).items
    ids = items["item_id"].combine_chunks()  # later items have no codes, like items after a training
    codes = [[number // 6, number // 2 % 3, number % 2] for number in range(len(ids))]
    codes[-1][-1] = 2  # so that the last level has a free code
    pq.write_table(pa.table({"item_id": ids, "codes": codes}), folder / "codes.parquet")
    train = ("recommender", "train", "--config", str(write_config(folder)))
    target = ("--codes", str(folder / "codes.parquet"), "--out", str(folder / "recommender"), "--epochs", "2")
    small = ("--draft-for", str(folder / "recommender"), "--out", str(folder / "small"), "--epochs", "1")
    with pytest.MonkeyPatch.context() as patched:
        sizes = {"hidden_size": 64, "num_layers": 1}
        patched.setattr(train_on_tables, "RecommenderOptions", lambda **options: RecommenderOptions(**sizes | options))
        assert [command_here(*train, *words) for words in (target, small)] == [0, 0]
    return folder


@pytest.fixture
def world(trained, tmp_path):
    """A copy of that world that tests may change."""
    for name in ("tables", "codes.parquet"):
        (tmp_path / name).symlink_to(trained / name)
    return tmp_path, trained


def recommend(capfd, world, date=FIRST_DATE, *more, **options) -> Done:
    folder, trained = world
    of_all = {name: options.pop(name) for name in ("cluster", "deliver_to", "gates", "metrics") if name in options}
    options = {"model": str(trained / "recommender"), "num_items": 5, "batch_size": 4} | options
    config = write_config(folder, extensions={"recommending": options}, **of_all)
    return run_here(capfd, "recommend", "--config", str(config), "--date", date, *more, "--json")


def lists_of(done: Done) -> dict:
    table = pq.read_table(json.loads(done.stdout)["lists"])
    assert table.column_names == ["user_id", "rank", "item_id", "score"]
    lists = {}
    for row in table.to_pylist():
        lists.setdefault(row["user_id"], []).append(row["item_id"])
        assert row["rank"] == len(lists[row["user_id"]])
    return lists


def test_everybody_gets_a_list_and_the_unchanged_keep_theirs(world, capfd):
    first = recommend(capfd, world)
    assert first.returncode == 0, first.stderr
    printed, lists = json.loads(first.stdout), lists_of(first)
    assert len(lists) == printed["users"]["entities"] and {len(entry) for entry in lists.values()} == {5}
    assert Workspace.open(world[0] / "workspace" / "recommendations").publication.run().run_id == printed["run_id"]
    again = recommend(capfd, world)
    assert json.loads(again.stdout)["run_id"] == printed["run_id"] and "finished already" in again.stderr
    second = recommend(capfd, world, SECOND_DATE)
    users = json.loads(second.stdout)["users"]
    assert users["carried_over"] > 0 and users["generated"] + users["carried_over"] == users["entities"]
    fresh = recommend(capfd, world, SECOND_DATE, "--force", num_drafted=20)
    assert lists_of(fresh) == lists_of(second) and json.loads(fresh.stdout)["run_id"].endswith("-2")
    assert (
        json.loads(fresh.stdout)["forwards_saved"] > json.loads(first.stdout)["forwards_saved"]
    )  # last night's lists were drafted
    older = recommend(capfd, world, "2025-02-27", keep_runs=1)
    assert older.returncode == 0 and "stays published" in older.stderr
    runs = Workspace.open(world[0] / "workspace" / "recommendations").runs()
    assert [run.run_id for run in runs] == [json.loads(entry.stdout)["run_id"] for entry in (second, fresh)]


def publish_vectors(folder) -> pa.ChunkedArray:
    """Publish a run with random vectors of all items of the second date; returns the items."""
    items = read_tables(folder / "tables", as_of=datetime.date.fromisoformat(SECOND_DATE)).items["item_id"]
    vectors = np.random.default_rng(0).normal(size=(len(items), 8)).astype(np.float32)
    workspace = Workspace.open(folder / "workspace")
    texts = workspace.run("2025-02-28-00000000")
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 8)
    texts.features_folder("item").mkdir(parents=True)
    table = pa.table({"item_id": items.combine_chunks(), "vector": column})
    pq.write_table(table, texts.features_folder("item") / "00000.parquet")
    texts.manifest_path.write_text("{}")
    texts.finish()
    workspace.publication.publish(texts.run_id)
    return items


def test_who_did_nothing_new_gets_a_list_with_new_items_in_time(world, capfd, monkeypatch):
    recommend(capfd, world)
    publish_vectors(world[0])
    monkeypatch.setattr(planned, "DAYS", 1)
    second, third = (json.loads(recommend(capfd, world, date).stdout) for date in (SECOND_DATE, "2025-03-02"))
    assert second["users"]["carried_over"] == 0 < third["users"]["carried_over"]


def test_new_items_are_listed_by_the_codes_of_the_most_alike(world, capfd):
    """The vectors are those of the published run."""
    folder, _ = world
    alone = recommend(capfd, world, SECOND_DATE)
    assert "0 get the codes of the most similar item" in alone.stderr
    items = publish_vectors(folder)
    done = recommend(capfd, world, SECOND_DATE, "--force", num_items=len(items))
    assert done.returncode == 0, done.stderr
    counts = re.search(r"no codes for (\d+) items: (\d+) get", done.stderr)
    assert counts[1] == counts[2] != "0"
    known = pq.read_table(folder / "codes.parquet")["item_id"].to_pylist()
    assert {item for listed in lists_of(done).values() for item in listed} - set(known)


def test_a_small_model_drafts_the_same_lists(world, capfd):
    alone = lists_of(recommend(capfd, world))
    drafted = recommend(capfd, world, FIRST_DATE, "--force", draft_model=str(world[1] / "small"), num_drafted=20)
    assert lists_of(drafted) == alone


def had_by_users(path) -> dict:
    had = {}
    for row in pq.read_table(path).to_pylist():
        if str(row["timestamp"])[:10] <= FIRST_DATE:
            had.setdefault(row["user_id"], set()).add(row["item_id"])
    return had


def test_what_somebody_has_had_is_listed_again_only_where_it_may_be(world, capfd):
    """Of three users, one has had all items, one all but two, and one all but five."""
    folder, trained = world
    (folder / "tables").unlink()
    shutil.copytree(trained / "tables", folder / "tables")
    path, items = folder / "tables" / "interactions.parquet", pq.read_table(folder / "codes.parquet")["item_id"]
    log = pq.read_table(path)
    row = log.filter(pc.less_equal(pc.strftime(log["timestamp"], "%Y-%m-%d"), FIRST_DATE)).slice(0, 1).to_pylist()[0]
    users = pq.read_table(folder / "tables" / "users.parquet")["user_id"].slice(0, 3).to_pylist()
    num_left = dict(zip(users, (0, 2, 5), strict=True))
    log = log.filter(pc.invert(pc.is_in(log["user_id"], pa.array(users))))
    more = [row | {"user_id": user, "item_id": item} for user in users for item in items.to_pylist()[num_left[user] :]]
    pq.write_table(pa.concat_tables([log, pa.Table.from_pylist(more, log.schema)]), path)
    done, had = recommend(capfd, world), had_by_users(path)
    lists = lists_of(done)
    assert had and not any(had.get(user, set()) & set(items) for user, items in lists.items())
    assert [len(lists.get(user, [])) for user in users] == [0, 2, 5] and set(map(len, lists.values())) == {2, 5}
    assert json.loads(done.stdout)["shorter_lists"] == 2 and "2 users have lists of fewer than 5 items" in done.stderr
    assert json.loads(done.stdout)["users"]["quarantined"] == 0
    again = recommend(capfd, world, list_again=True)
    assert any(had.get(user, set()) & set(items) for user, items in lists_of(again).items())
    assert json.loads(again.stdout)["shorter_lists"] == 0


def test_what_left_the_catalogue_is_listed_no_more(world, capfd):
    folder, trained = world
    before = lists_of(recommend(capfd, world))
    (removed, *_) = next(iter(before.values()))
    (folder / "tables").unlink()
    (folder / "tables").mkdir()
    for name in ("users", "items", "interactions"):
        table = pq.read_table(trained / "tables" / f"{name}.parquet")
        if name != "users":
            table = table.filter(pc.not_equal(table["item_id"], removed))
        pq.write_table(table, folder / "tables" / f"{name}.parquet")
    after = lists_of(recommend(capfd, world, SECOND_DATE))
    assert before.keys() <= after.keys() and removed not in {item for items in after.values() for item in items}


@pytest.mark.ray
def test_rays_workers_go_on_with_what_a_killed_run_finished(world, capfd, monkeypatch):
    monkeypatch.setattr(stage, "SHARD_BATCHES", 1)
    with monkeypatch.context() as patched:
        make_lists_here(patched)
        whole, here = lists_of(recommend(capfd, world)), shards_stage.run_shards

        def killed(shards, *arguments):
            yield from islice(here(shards, *arguments), 2)
            raise KeyboardInterrupt

        patched.setattr(shards_stage, "run_shards", killed)
        assert recommend(capfd, world, FIRST_DATE, "--force").returncode == 130
    of_all = json.loads(run_here(capfd, "status", "--config", str(world[0] / "laserbatch.yaml"), "--json").stdout)
    state = of_all["within"]["recommendations"]
    assert state["state"] == "idle" and "interrupted" in state["run"]["failure"]
    shards = world[0] / "workspace" / "recommendations" / "runs" / state["run"]["run_id"] / "shards" / "user"
    records = {path: path.stat().st_mtime_ns for path in shards.glob("*.json")}
    done = recommend(capfd, world, cluster={"num_workers": 1})  # each loads torch, which takes seconds
    assert done.returncode == 0 and lists_of(done) == whole and json.loads(done.stdout)["run_id"].endswith("-2")
    assert len(records) > 1 and all(path.stat().st_mtime_ns == when for path, when in records.items())


def test_lists_of_somebody_who_is_forgotten_go(world, capfd):
    """They are also removed from the place of delivery."""
    folder, _ = world
    there = folder / "bucket"
    there.mkdir()
    deliver_to = {"deliver_to": there.as_uri()}
    done = recommend(capfd, world, **deliver_to)
    run_id = json.loads((there / "recommendations" / "published.json").read_text())["run_id"]
    delivered = there / "recommendations" / "runs" / run_id / "lists.parquet"
    assert pq.read_table(delivered) == pq.read_table(json.loads(done.stdout)["lists"])
    user = next(iter(lists_of(done)))
    forgotten = run_here(capfd, "forget", "--config", str(folder / "laserbatch.yaml"), "--user", str(user), "--json")
    assert forgotten.returncode == 0, forgotten.stderr
    assert user not in lists_of(done) and json.loads(forgotten.stdout)["ids"]["user"]
    assert user not in pq.read_table(delivered)["user_id"].to_pylist()
    assert recommend(capfd, world, **deliver_to).returncode == 0  # the night is still finished
    write_config(folder)
    dry = run_here(capfd, "forget", "--config", str(folder / "laserbatch.yaml"), "--user", "u0", "--dry-run", "--json")
    assert json.loads(dry.stdout)["not_reached"] == [f"{there.as_uri()}/recommendations"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model is not set"),
        ({"model": "nowhere"}, "nowhere holds no recommender"),
        ({"num_items": 100}, "recommending.num_items is 100, but only"),
    ],
)
def test_what_cannot_be_recommended_from_is_said(options, message, world, capfd):
    done = recommend(capfd, world, **options)
    assert done.returncode == 3 and message in done.stderr and not (world[0] / "workspace").exists()


@pytest.mark.parametrize("option", ["--draft-for", "--base"])
def test_a_training_never_replaces_the_model_that_it_reads(option, tmp_path, capfd):
    config, folder = write_config(tmp_path), str(tmp_path / "recommender")
    done = run_here(capfd, "recommender", "train", "--config", str(config), option, folder, "--out", folder)
    assert done.returncode == 3 and f"--out and {option} are both" in done.stderr


def test_users_whose_numbers_are_broken_keep_the_last_list_as_stale(world, capfd):
    folder, trained = world
    before = lists_of(recommend(capfd, world))
    broken = folder / "broken" / "recommender"
    shutil.copytree(trained / "recommender", broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][1 + 3] = torch.nan  # the embedding of the fourth code of the first level
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    done = recommend(capfd, world, SECOND_DATE, model=str(broken))
    assert done.returncode == 4 and "quarantine" in done.stderr and "not published" in done.stderr
    run = Workspace.open(folder / "workspace" / "recommendations").runs()[-1]
    failed, lists = run.read_quarantine("user"), pq.read_table(run.root / "lists.parquet")
    assert failed.num_rows > 0 and set(failed["reason"].to_pylist()) == {"not-finite"}
    for user in failed["entity_id"].to_pylist():
        rows = lists.filter(pc.equal(lists["user_id"], user))
        assert rows["item_id"].to_pylist() == before.get(user, [])
    options = {
        "gates": {"max_failed_share": 1.0},
        "metrics": {"textfile": str(folder / "laserbatch.prom")},
    }
    again = recommend(capfd, world, SECOND_DATE, model=str(broken), **options)
    assert again.returncode == 4 and "judged again" in again.stderr and "the number of texts is" in again.stderr
    assert "in quarantine (gates" not in again.stderr and run.is_held
    assert re.search(r"^laserbatch_lists_last_exit_code{.*} 4$", (folder / "laserbatch_lists.prom").read_text(), re.M)
    workspace = ["--workspace", str(run.root.parent.parent)]
    assert run_here(capfd, "runs", "publish", run.run_id, *workspace, "--json").returncode == 0 and run.is_finished
