"""Workers under Ray: a dead one's shard is done by another, an error that meets every shard ends the run."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from jobs.generate import NO_ROUTE, renderer
from jobs.settings import load_settings
from pipeline.decoding.budget import Budget
from pipeline.decoding.planning.step_cost_cache import known_step_cost
from pipeline.distributed import actors, worker
from pipeline.distributed.actors import (
    ShardAbandoned,
    WorkerLayout,
    ray_cluster,
    require_own_gpu,
    run_shards,
    worker_layout,
)
from pipeline.distributed.settings import ClusterSettings
from pipeline.distributed.shards import PreviousKnowledge, plan_side, read_shard
from pipeline.distributed.worker import ShardWorker, WorkerSpec, workers_of_node
from pipeline.errors import ConfigError, ModelError, RunFailed
from pipeline.knowledge.entities import iter_entities
from pipeline.storage.run_folder import RunFolder
from pipeline.tables.read import read_tables
from pipeline.tables.sample_world import LAST_DATE, write_sample_world
from retrieval_pools.step_cost import read_step_cost


def test_one_worker_a_gpu_and_never_two():
    assert worker_layout(ClusterSettings(), num_cpus=16, num_gpus=4) == WorkerLayout(4, 4, 1, "cuda")
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        worker_layout(ClusterSettings(num_workers=3), num_cpus=16, num_gpus=2)


@pytest.mark.parametrize(
    ("settings", "num_cpus", "expected"),
    [
        (ClusterSettings(), 2, WorkerLayout(2, 1, 0, "cpu")),
        (ClusterSettings(), 64, WorkerLayout(8, 8, 0, "cpu")),
        (ClusterSettings(num_workers=1), 2, WorkerLayout(1, 2, 0, "cpu")),
        (ClusterSettings(threads_per_worker=4), 8, WorkerLayout(2, 4, 0, "cpu")),
    ],
)
def test_without_gpus_a_worker_has_a_group_of_cores(settings, num_cpus, expected):
    assert worker_layout(settings, num_cpus, 0) == expected


@pytest.mark.parametrize(
    ("granted", "visible"), [([0], None), ([1], "0,1"), (["2"], "2,3"), ([1], "0"), ([], "0"), (["GPU-a"], "GPU-b")]
)
def test_worker_that_sees_other_gpus_than_its_own_is_refused(granted, visible):
    with pytest.raises(ConfigError, match="RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        require_own_gpu(granted, visible)


@pytest.mark.parametrize(("granted", "visible"), [([0], "0"), (["3"], "3"), (["GPU-a"], "GPU-a")])
def test_worker_that_sees_its_own_gpu_alone_goes_on(granted, visible):
    require_own_gpu(granted, visible)


# Ray asks no driver about GPUs that it is told of, so what it grants two workers can be seen without any.
TWO_GPUS = """
import json, os, ray

class Worker:
    def gpu(self):
        return ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")

ray.init(num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
actors = [ray.remote(Worker).options(num_cpus=0.5, num_gpus=1).remote() for _ in range(2)]
print(json.dumps(ray.get([actor.gpu.remote() for actor in actors])))
"""


def seen_by_two_workers(environment: dict[str, str]) -> list[tuple[list, str | None]]:
    kept = {name: value for name, value in os.environ.items() if "CUDA_VISIBLE_DEVICES" not in name}
    ran = subprocess.run(
        [sys.executable, "-c", TWO_GPUS], env=kept | environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.ray
@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": "2,5"}], ids=["every GPU", "some of them"])
def test_two_workers_are_never_on_one_gpu(environment):
    seen = seen_by_two_workers(environment)
    assert sorted(visible for _, visible in seen) == environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    for granted, visible in seen:
        require_own_gpu(granted, visible)


@pytest.mark.ray
def test_workers_that_ray_is_told_not_to_separate_are_refused():
    for granted, visible in seen_by_two_workers({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}):
        with pytest.raises(ConfigError, match="shows it all"):
            require_own_gpu(granted, visible)


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(ClusterSettings(num_workers=2)) as layout:
        yield layout


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_sample_world(folder, num_users=4, num_items=24)
    return folder


def planned(world: Path, run_dir: Path):
    settings = load_settings(None, {"decoding.max_new_tokens": 48, "decoding.num_threads": 1})
    tables = read_tables(world, LAST_DATE)
    plan = plan_side(
        "item",
        iter_entities(tables, "item"),
        tables.items.schema.field("item_id").type,
        render=renderer(settings, "item", settings.decoding),
        route=lambda entity: NO_ROUTE,
        previous=PreviousKnowledge(None),
        force=False,
        shard_size=4,
        batch_size=16,
        run_dir=run_dir,
    )
    spec = WorkerSpec(
        run_id="2025-03-01-00000000",
        run_dir=run_dir,
        model_dir=settings.model_dir,
        decoding=settings.decoding,
        device="cpu",
        num_threads=1,
        num_workers=1,
        templates={"item": "kar_item"},
        template_dir=None,
        step_cost_dir=run_dir / "step-costs",
    )
    return plan.shards, spec


def texts(run_dir: Path) -> dict[str, str]:
    table = RunFolder(run_dir).read_knowledge("item")
    return dict(zip(table["entity_id"].to_pylist(), table["text"].to_pylist(), strict=True))


def pids_of(actors) -> list[int]:
    return ray.get([actor.pid.remote() for actor in actors])


def kill_all(actors) -> None:
    for pid in pids_of(actors):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_workers_shard_is_done_again_by_another(cluster, world, tmp_path):
    shards, spec = planned(world, tmp_path / "killed")
    pids: list[int] = []
    outcomes = run_shards(shards, spec, cluster, 3, lambda actors: pids.extend(pids_of(actors)))
    done = [next(outcomes)]
    for pid in pids:  # both: whichever of them was at work, its shard is in flight
        os.kill(pid, signal.SIGKILL)
    done += list(outcomes)
    assert sorted(shard.name for shard, _ in done) == [shard.name for shard in shards]
    shards, spec = planned(world, tmp_path / "calm")
    worker = ShardWorker(spec)
    for shard in shards:
        worker.run(shard)
    assert texts(tmp_path / "killed") == texts(tmp_path / "calm")


@pytest.mark.ray
@pytest.mark.slow
def test_a_shard_that_kills_every_worker_is_given_up_and_the_others_go_on(cluster, world, tmp_path):
    shards, spec = planned(world, tmp_path)
    outcomes = list(run_shards(shards, spec, cluster, 1, kill_all))
    abandoned = [outcome for outcome in outcomes if isinstance(outcome, ShardAbandoned)]
    assert len(abandoned) == 2
    assert all(outcome.reason.startswith("worker-died") for outcome in abandoned)
    assert len(outcomes) == len(shards)


@pytest.mark.ray
def test_a_model_that_cannot_be_loaded_ends_the_run_with_its_reason(cluster, world, tmp_path):
    shards, spec = planned(world, tmp_path)
    with pytest.raises(ModelError, match="no model folder"):
        list(run_shards(shards, replace(spec, model_dir=tmp_path / "absent"), cluster, 3))


@pytest.mark.ray
def test_a_worker_measures_once_and_every_shard_is_drafted_by_the_budget_of_its_side(cluster, world, tmp_path):
    shards, spec = planned(world, tmp_path)
    measured, piloted = [], []

    def choose(scout):
        measured.append(scout.step_cost())
        piloted.append(scout.pilot("item", read_shard(tmp_path / shards[0].path)[:3], Budget(2, 0.1)))
        return {"item": Budget(2, 0.1)}

    outcomes = list(run_shards(shards, spec, cluster, 3, choose_budgets=choose))
    assert [known.batch_sizes[-1] for known in measured] == [spec.decoding.batch_size]
    (path,) = spec.step_cost_dir.glob("*.json")
    assert read_step_cost(path) == measured[0]
    found = piloted[0].cell(Budget(2, 0.1))
    assert len(piloted[0].names) == 3 and 0 < found.mean_drafted <= 2 and found.tokens_per_step > 1
    assert known_step_cost(spec.step_cost_dir, ShardWorker(replace(spec, num_workers=1)).engine, False) is None
    for _, record in outcomes:
        stats = record.info["stats"]
        assert 0 < stats["num_drafted"] <= 2 * stats["num_steps"]


@pytest.mark.ray
def test_all_workers_measure_at_once_and_one_of_them_keeps_what_it_found(cluster, world, tmp_path, monkeypatch):
    class Recorded(actors._Worker):
        def step_cost(self, keeps: bool):
            begin_s = time.time()
            found = super().step_cost(keeps)
            (tmp_path / f"{os.getpid()}.json").write_text(json.dumps([keeps, begin_s, time.time()]))
            return found

    monkeypatch.setattr(actors, "_Worker", Recorded)
    shards, spec = planned(world, tmp_path / "run")

    def choose(scout):
        scout.step_cost()
        return {"item": Budget(2, 0.1)}

    list(run_shards(shards, spec, cluster, 3, choose_budgets=choose))
    spans = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(keeps for keeps, _, _ in spans) == [False, True]
    shortest = min(end - begin for _, begin, end in spans)
    together = min(end for _, _, end in spans) - max(begin for _, begin, _ in spans)
    assert together > shortest / 2


def test_workers_of_a_machine_are_no_more_than_its_cores_have_room_for(monkeypatch):
    monkeypatch.setattr(worker, "usable_cores", lambda: 16)
    assert [workers_of_node(*counts) for counts in ((1, 16), (4, 4), (40, 4), (2, 32))] == [1, 4, 4, 1]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("max_attempts", [1, 2])
def test_a_worker_that_dies_before_it_measured_is_replaced_and_the_last_one_ends_the_run(
    cluster, world, tmp_path, max_attempts
):
    shards, spec = planned(world, tmp_path)
    workers, measured = [], []

    def choose(scout):
        kill_all(workers)
        measured.append(scout.step_cost())
        return {"item": Budget(2, 0.1)}

    outcomes = run_shards(shards, spec, cluster, max_attempts, workers.extend, choose)
    if max_attempts == 1:
        with pytest.raises(RunFailed, match="max_draft_tokens"):
            list(outcomes)
    else:
        assert len(list(outcomes)) == len(shards) and measured
