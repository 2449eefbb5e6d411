"""Workers under Ray: the shard of a dead worker is done by another one; an error common to all shards ends the run."""

import json
import os
import signal
import socket
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from night_world import local_ray
from planned_side import plan_side
from ray import cloudpickle

from laserbatch.jobs.settings import load_settings
from laserbatch.pipeline.budget.cost_cache import StepCostCache
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.distributed import actors, tasks
from laserbatch.pipeline.distributed import settings as distributed_settings
from laserbatch.pipeline.distributed.actors import ShardAbandoned, run_shards
from laserbatch.pipeline.distributed.cluster import Node
from laserbatch.pipeline.distributed.settings import workers_of_node
from laserbatch.pipeline.distributed.spec import TextSpec
from laserbatch.pipeline.distributed.worker import ShardWorker
from laserbatch.pipeline.errors import ClusterFailed, ConfigError, ModelError
from laserbatch.pipeline.planning.plan import load_plan, read_shard, save_plan
from laserbatch.pipeline.planning.planner import shared_fingerprint
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world
from laserbatch.pipeline.storage.figures import ShardInfo
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.pipeline.tables.read import read_tables
from laserbatch.retrieval_pools.step_cost import StepCost, StepPoint

COST, MEASURED = (
    StepCost(steps=tuple(StepPoint(batch_size=4, num_tokens=number, seconds=seconds) for number in (4, 8)))
    for seconds in (1.0, 2.0)
)


@pytest.fixture(scope="module")
def cluster():
    with local_ray(num_workers=2) as layout:
        yield layout


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_sample_world(folder, num_users=4, num_items=12)
    return folder


def planned(world: Path, run_dir: Path):
    settings = load_settings(None, {"decoding.max_new_tokens": 48, "decoding.batch_size": 4})
    tables = read_tables(world, LAST_DATE)
    plan = plan_side(
        tables,
        "item",
        settings.effective_knowledge.template("item"),
        shared_fingerprint(settings.effective_knowledge.template("item"), 1024, settings.decoding, settings.model_dir),
        run_dir,
    )
    spec = TextSpec(
        run_id="2025-03-01-00000000",
        run_dir=run_dir,
        model_dir=settings.model_dir,
        decoding=settings.decoding,
        device="cpu",
        templates={"item": settings.effective_knowledge.template("item")},
        step_cost_dir=run_dir / "step-costs",
    )
    save_plan(plan, run_dir)
    return plan.shards, spec


def texts(run_dir: Path) -> dict[str, str]:
    table = read_parquet(RunFolder(run_dir).knowledge_folder("item"))
    return dict(zip(table["entity_id"].to_pylist(), table["text"].to_pylist(), strict=True))


@contextmanager
def started_pool(spec, layout, max_attempts=2):
    """A WorkerPool that is shut down after the test."""
    worker_pool = actors.WorkerPool(spec, layout, max_attempts)
    yield worker_pool
    worker_pool.shutdown()


def pids_of(worker_pool) -> dict:
    """The process id of each actor."""
    return {actor: ray.get(actor.__ray_call__.remote(lambda self: os.getpid())) for actor in worker_pool.actors}


class Unlucky(actors._Worker):
    """Its first process loses its GPU in a shard, before loading a model."""

    def load(self):
        if is_first(self._spec.run_dir / "lost"):
            self._worker = WithoutGpu()
        else:
            super().load()


class WithoutGpu:
    """A stand-in for a `ShardWorker` that has lost its GPU."""

    engine = property(lambda self: self)

    def reconfigure(self, spec):
        pass

    def progress(self):
        return 0, 0.0, 0

    def cached_step_cost(self):
        return COST

    def run(self, shard, budget):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def is_first(path: Path) -> bool:
    """Whether this is the first call for `path`, over all processes; it writes the id of that process to the file."""
    with suppress(FileExistsError), path.open("x") as file:
        file.write(str(os.getpid()))
        return True
    return False


@pytest.mark.ray
@pytest.mark.slow
def test_a_dead_workers_shard_is_done_again_by_another_under_the_budget_that_was_chosen(
    cluster, world, tmp_path, monkeypatch
):
    """The worker ends its process because its GPU is lost; tests below kill workers without a model.

    `test_text_writer.py` tests that a lost GPU is an error of the engine.
    """
    calm_shards, calm = planned(world, tmp_path / "calm")
    alone = ShardWorker(calm)
    for shard in calm_shards:
        alone.run(shard, Budget(2, 0.1))
    saved = StepCostCache(calm.step_cost_dir, alone.engine.engine, 0, 1).write(COST)
    assert alone.engine.cached_step_cost() == saved

    shards, spec = planned(world, tmp_path / "lost")
    known = []

    def choose(measure):
        known.append(measure())
        return {"item": Budget(2, 0.1)}

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(actors, "_Worker", Unlucky)
    try:
        with started_pool(spec, replace(cluster, num_workers=1), 3) as worker_pool:
            done = list(run_shards(shards, worker_pool, choose))
            assert worker_pool.num_lost == 1
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    with pytest.raises(ProcessLookupError):
        os.kill(int((spec.run_dir / "lost").read_text()), 0)
    assert known == [COST], "it was measured again"
    assert sorted(shard.name for shard, _ in done) == [shard.name for shard in shards]
    for _, record in done:
        stats = record.info.stats
        assert 0 < stats.num_drafted <= 2 * stats.num_steps and record.num_quarantined == 0
    assert texts(tmp_path / "lost") == texts(tmp_path / "calm")


def test_a_worker_that_does_not_see_the_runs_folder_says_so_with_its_host(world, tmp_path, monkeypatch):
    """For example on another machine, which has no such folder or an old copy."""
    monkeypatch.setattr(tasks, "VISIBILITY_TIMEOUT_S", 0.3)
    _, spec = planned(world, tmp_path / "run")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / actors.TOKEN_FILE).write_text("of another attempt")
    for run_dir in (tmp_path / "absent", tmp_path / "copy"):
        with pytest.raises(ConfigError, match=rf"{socket.gethostname()} does not see {run_dir}"):
            actors._Worker(replace(spec, run_dir=run_dir, token="of this one")).load()


def test_a_machine_with_other_software_than_the_driver_writes_nothing(world, tmp_path):
    _, spec = planned(world, tmp_path)
    (tmp_path / actors.TOKEN_FILE).touch()
    for name, there in {"laserbatch": "0.1.0, code 0123", "torch": "1.0"}.items():
        with pytest.raises(ConfigError, match=f"{socket.gethostname()} has {name} .* not {there} as"):
            actors._Worker(replace(spec, software=tasks.software() | {name: there})).load()
        with pytest.raises(ConfigError, match="Install the same versions"):
            tasks.run_task({name: there}, pytest.fail)


def test_a_task_whose_nodes_are_all_lost_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(tasks.ray, "wait", lambda references, timeout: ([], references))
    monkeypatch.setattr(tasks, "cluster_nodes", lambda: [Node(0)])
    monkeypatch.setattr(tasks, "NO_NODES_S", 0)
    with pytest.raises(ClusterFailed, match="no node with CPUs for 0 seconds"):
        tasks.result_of("task")


def test_a_model_that_cannot_be_loaded_is_refused_when_the_worker_loads_it(world, tmp_path):
    _, spec = planned(world, tmp_path)
    (tmp_path / actors.TOKEN_FILE).touch()
    with pytest.raises(ModelError, match="no model folder"):
        actors._Worker(replace(spec, model_dir=tmp_path / "absent")).load()


def test_workers_of_a_machine_are_no_more_than_its_cores_have_room_for(monkeypatch):
    monkeypatch.setattr(distributed_settings, "usable_cores", lambda: 16)
    assert [workers_of_node(*counts) for counts in ((1, 16), (4, 4), (40, 4), (2, 32))] == [1, 4, 4, 1]


@pytest.fixture
def worker_pool(cluster, world, tmp_path, monkeypatch):
    """A function that runs a plan's shards by actors that write ids for texts; a test may pass another class of actors.

    Their class is defined here, so that Ray sends it by value and its processes load neither torch nor a model.
    """

    @dataclass(frozen=True)
    class Spec:
        run_dir: Path
        device: str = "cpu"
        num_threads: int = 1
        num_workers: int = 1
        workers_a_gpu: int = 1
        token: str = ""
        software: dict = field(default_factory=dict)

    class Worker:
        def __init__(self, spec) -> None:
            self._spec = spec

        def load(self) -> None:
            pass

        def run(self, spec, shard, budget):
            ids = [row.entity_id for row in read_shard(spec.run_dir / shard.path)]
            table = pa.table({"entity_id": ids, "text": ids})
            info = ShardInfo(shard.sha256, str(budget), DecodingStats(), None, num_workers=1)
            return RunFolder(spec.run_dir).shards(shard.side).write(shard.name, table, info=info)

        def cached_step_cost(self) -> StepCost | None:
            return COST

        @ray.method(concurrency_group="heartbeat")
        def heartbeat(self) -> tuple[int, float, int]:
            return 1, 0.02, 0

    def run(worker=Worker, max_attempts=2, layout=cluster, start_timeout_s=600.0, **options):
        monkeypatch.setattr(actors, "_Worker", worker)
        monkeypatch.setattr(actors, "POLL_S", 0.1)
        shards, _ = planned(world, tmp_path)
        run.worker_pool = actors.WorkerPool(Spec(tmp_path), layout, max_attempts, start_timeout_s)
        return shards, run_shards(shards, run.worker_pool, **options)

    run.Worker = Worker
    yield run
    run.worker_pool.shutdown()


@pytest.mark.ray
def test_a_row_that_kills_or_stops_workers_is_given_up_alone(worker_pool, world, tmp_path, monkeypatch):
    hung = tmp_path / "hung"
    planned(world, tmp_path)
    rows = [row.entity_id for shard in load_plan(tmp_path, "item").shards for row in read_shard(tmp_path / shard.path)]
    deadly, slow = rows[2], rows[6]

    class Poisoned(worker_pool.Worker):
        def run(self, spec, shard, budget):
            of_shard = [row.entity_id for row in read_shard(tmp_path / shard.path)]
            if deadly in of_shard:
                (tmp_path / "knowledge" / "item").mkdir(parents=True, exist_ok=True)
                (tmp_path / "knowledge" / "item" / f"{shard.name}.parquet").write_text("begun")
                os.kill(os.getpid(), signal.SIGKILL)
            if slow in of_shard and not hung.exists():
                hung.touch()
                time.sleep(3600)
            return super().run(spec, shard, budget)

    monkeypatch.setattr(actors, "MIN_HANG_TIMEOUT_S", 1.0)  # 50 steps of this worker take that long
    shards, outcomes = worker_pool(Poisoned)
    outcomes = list(outcomes)
    (abandoned,) = [outcome for outcome in outcomes if isinstance(outcome, ShardAbandoned)]
    assert [row.entity_id for row in read_shard(tmp_path / abandoned.shard.path)] == [deadly]
    assert abandoned.reason.startswith("worker-died: ")
    assert hung.exists()
    # For a later attempt, the plan has two halves in place of the shard, and begun files of shards are removed.
    plan = load_plan(tmp_path, "item")
    done = {shard.name for shard, _ in (outcome for outcome in outcomes if outcome != abandoned)}
    assert done | {abandoned.shard.name} == {shard.name for shard in plan.shards}
    assert len(plan.shards) == len(shards) + 2
    done = [key for part in RunFolder(tmp_path).iter_knowledge("item", ["entity_id"]) for key in part[0].to_pylist()]
    assert done == [row for row in rows if row != deadly]
    assert [row.entity_id for shard in plan.shards for row in read_shard(tmp_path / shard.path)] == rows


@pytest.mark.ray
def test_workers_that_find_no_place_in_time_end_the_run_with_what_was_asked_for(worker_pool, cluster):
    words = r"within 1 seconds: each needs 99 CPUs, and the cluster has a node of \d+ CPUs.* cluster.start_timeout_s"
    with pytest.raises(ClusterFailed, match=words):
        list(worker_pool(layout=replace(cluster, num_threads=99), start_timeout_s=1.0)[1])


@pytest.mark.ray
def test_an_error_that_a_worker_reports_ends_the_run_as_itself(worker_pool, cluster):
    class Refusing(worker_pool.Worker):
        def load(self):
            raise ModelError("no model folder")

    with pytest.raises(ModelError, match="no model folder"):
        list(worker_pool(Refusing, layout=replace(cluster, num_workers=1))[1])


@pytest.mark.ray
def test_workers_that_are_all_lost_before_they_are_ready_end_the_run(worker_pool):
    class Dying(worker_pool.Worker):
        def load(self):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ClusterFailed, match=r"all workers were lost while they loaded the model.*worker-died"):
        list(worker_pool(Dying, max_attempts=1)[1])


@pytest.mark.ray
def test_on_cpus_all_workers_measure_at_once_and_nothing_is_measured_where_one_is_kept(worker_pool, tmp_path):
    class Measuring(worker_pool.Worker):
        def cached_step_cost(self):
            return COST if (tmp_path / "kept").exists() else None

        def measured_step_cost(self, save):
            begin_s = time.time()
            time.sleep(0.5)
            (tmp_path / f"{os.getpid()}-{begin_s}.json").write_text(json.dumps([save, begin_s, time.time()]))
            return MEASURED

    known = []

    def choose(measure):
        known.append(measure())
        while len(list(tmp_path.glob("*-*.json"))) < 2:  # measure() does not wait for the answers of the other workers
            time.sleep(0.05)
        (tmp_path / "kept").touch()
        known.append(measure())
        return {"item": known[0]}

    shards, outcomes = worker_pool(Measuring, choose_budgets=choose)
    assert [record.info.group for _, record in outcomes] == [str(MEASURED)] * len(shards)
    assert known == [MEASURED, COST]
    spans = [json.loads(path.read_text()) for path in tmp_path.glob("*-*.json")]
    assert sorted(save for save, _, _ in spans) == [False, True]  # one of the two saved its result
    begun_s, ended_s = max(begin for _, begin, _ in spans), min(end for _, _, end in spans)
    assert ended_s - begun_s > 0.2


@pytest.mark.ray
def test_on_a_gpu_one_worker_measures_while_the_others_are_idle(worker_pool, cluster, tmp_path):
    class Measuring(worker_pool.Worker):
        def cached_step_cost(self):
            return None

        def measured_step_cost(self, save):
            (tmp_path / f"{os.getpid()}.measured").write_text(str(save))
            return MEASURED

    def choose(measure):
        return {"item": measure()}

    layout = replace(cluster, device="cuda")  # although Ray has no GPU here
    shards, outcomes = worker_pool(Measuring, choose_budgets=choose, layout=layout)
    assert [record.info.group for _, record in outcomes] == [str(MEASURED)] * len(shards)
    assert layout.num_workers > 1 and [path.read_text() for path in tmp_path.glob("*.measured")] == ["True"]


@pytest.mark.ray
@pytest.mark.parametrize(("num_workers", "max_attempts"), [(1, 1), (2, 3)])
def test_a_worker_that_dies_before_it_measured_is_replaced_and_the_last_one_ends_the_run(
    worker_pool, cluster, num_workers, max_attempts
):
    measured = []

    def choose(measure):
        for pid in pids_of(worker_pool.worker_pool).values():
            os.kill(pid, signal.SIGKILL)
        measured.append(measure())
        return {}

    layout = replace(cluster, num_workers=num_workers)
    shards, outcomes = worker_pool(max_attempts=max_attempts, layout=layout, choose_budgets=choose)
    if max_attempts == 1:
        with pytest.raises(ClusterFailed, match="max_draft_tokens"):
            list(outcomes)
    else:
        assert len(list(outcomes)) == len(shards) and measured == [COST]
