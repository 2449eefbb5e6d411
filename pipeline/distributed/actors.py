"""Ray: start or join a cluster, keep its workers busy with shards, do a dead worker's shard again.

Everything that imports ray is here. What a worker does with a shard is `worker.py`'s business.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import ray
import torch

from pipeline.decoding.budget import Budget
from pipeline.decoding.planning.pilot_texts import PilotTexts
from pipeline.distributed.settings import ClusterSettings
from pipeline.distributed.shards import PlannedRow, Shard
from pipeline.distributed.worker import Scout, ShardWorker, WorkerSpec, usable_cores
from pipeline.errors import ConfigError, RunFailed
from pipeline.sides import Side
from pipeline.storage.run_folder import ShardRecord
from retrieval_pools.step_cost import StepCost

logger = logging.getLogger(__name__)

MOST_LOADING_S = 600.0  # that workers are waited for before the first one measures


@dataclass(frozen=True)
class WorkerLayout:
    """How many workers there are and what each one holds."""

    num_workers: int
    num_threads: int
    num_gpus: int  # 0 or 1 a worker
    device: str


@dataclass(frozen=True)
class ShardAbandoned:
    """A shard whose worker died every time."""

    shard: Shard
    reason: str


def worker_layout(settings: ClusterSettings, num_cpus: int, num_gpus: int) -> WorkerLayout:
    """One worker per GPU; without GPUs one per group of cores, with its threads set explicitly.

    Parameters
    ----------
    num_cpus, num_gpus : of the whole cluster.
    """
    if num_gpus > 0:
        num_workers = settings.num_workers or num_gpus
        if num_workers > num_gpus:
            raise ConfigError(f"cluster.num_workers is {num_workers} but there are {num_gpus} GPUs; one worker a GPU")
        return WorkerLayout(num_workers, settings.threads_per_worker or max(1, num_cpus // num_workers), 1, "cuda")
    num_threads = settings.threads_per_worker or max(1, num_cpus // (settings.num_workers or 8))
    return WorkerLayout(settings.num_workers or max(1, num_cpus // num_threads), num_threads, 0, "cpu")


def require_own_gpu(granted: list, visible: str | None) -> None:
    """Refuse to share a GPU by accident: what Ray granted a worker must be all that CUDA shows it.

    Ray sees to that by CUDA_VISIBLE_DEVICES in each worker's environment, unless it is told to leave that alone; then
    every worker would load its model onto the first GPU.

    Parameters
    ----------
    granted : the GPUs' ids, from Ray.
    visible : the worker's CUDA_VISIBLE_DEVICES, None where it is not set.

    Raises
    ------
    ConfigError
        The worker sees other GPUs than its own.
    """
    shown = [] if visible is None else visible.split(",")
    if shown != [str(gpu) for gpu in granted]:
        raise ConfigError(
            f"Ray granted a worker GPU {', '.join(map(str, granted)) or 'none'}, but CUDA_VISIBLE_DEVICES shows it "
            f"{visible or 'all'}, so that workers would share one; unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
        )


@contextmanager
def ray_cluster(settings: ClusterSettings) -> Iterator[WorkerLayout]:
    """Join the cluster at `ray_address`, or start a local one and stop it afterwards."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    started = not ray.is_initialized()
    if started:
        try:
            if settings.ray_address is not None:
                ray.init(address=settings.ray_address, log_to_driver=False, logging_level=logging.ERROR)
            else:
                ray.init(
                    num_cpus=usable_cores(),
                    num_gpus=torch.cuda.device_count(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=100 * 2**20,  # shards travel as files; only names and counts pass through Ray
                )
        except ConnectionError as error:
            raise ConfigError(f"no Ray cluster answers at {settings.ray_address!r}: {error}") from error
    try:
        resources = ray.cluster_resources()
        yield worker_layout(settings, int(resources.get("CPU", 1)), int(resources.get("GPU", 0)))
    finally:
        if started:
            ray.shutdown()


def run_shards(
    shards: Sequence[Shard],
    spec: WorkerSpec,
    layout: WorkerLayout,
    max_shard_attempts: int,
    on_workers: Callable[[list], None] = lambda actors: None,
    choose_budgets: Callable[[Scout], dict[Side, Budget]] = lambda scout: {},
) -> Iterator[tuple[Shard, ShardRecord] | ShardAbandoned]:
    """Hand out shards to workers as they become free; yield each one's outcome as it comes.

    A worker that dies is replaced and its shard goes back to the front of the queue. An error that a worker reports
    (a model that cannot be loaded, say) ends the run: it would meet every shard.

    Parameters
    ----------
    on_workers : called once with the actor handles (for tests that kill them).
    choose_budgets : called once, with one of the workers; how much each side drafts. A side that is missing drafts what
        the settings say.
    """
    num_workers = min(layout.num_workers, len(shards))
    spec = replace(spec, device=layout.device, num_threads=layout.num_threads, num_workers=num_workers)
    actor_class = ray.remote(_Worker).options(num_cpus=layout.num_threads, num_gpus=layout.num_gpus)
    idle = [actor_class.remote(spec) for _ in range(num_workers)]
    on_workers(list(idle))

    budgets = choose_budgets(_FirstWorker(idle, lambda: actor_class.remote(spec), max_shard_attempts))
    queue, attempts, running = deque(shards), dict.fromkeys(shards, 0), {}
    while queue or running:
        while queue and idle:
            shard, actor = queue.popleft(), idle.pop()
            attempts[shard] += 1
            running[actor.run.remote(shard, budgets.get(shard.side))] = (shard, actor)
        (done,), _ = ray.wait(list(running), num_returns=1)
        shard, actor = running.pop(done)
        try:
            record: ShardRecord = _result(done)
        except ray.exceptions.RayActorError as error:
            logger.warning("%s %s: its worker died (attempt %d): %s", shard.side, shard.name, attempts[shard], error)
            idle.append(actor_class.remote(spec))
            if attempts[shard] < max_shard_attempts:
                queue.appendleft(shard)
            else:
                yield ShardAbandoned(shard, f"worker-died: {attempts[shard]} workers died on this shard")
            continue
        idle.append(actor)
        yield shard, record
    for actor in idle:
        ray.kill(actor)


class _FirstWorker:
    """The first of the idle workers as a `Scout`; another one takes its place if it dies.

    While it measures what steps cost the others measure too: so they get in each other's way as they will later.
    """

    def __init__(self, idle: list, start_worker: Callable, max_attempts: int) -> None:
        self._idle, self._start_worker, self._max_attempts = idle, start_worker, max_attempts

    def step_cost(self) -> StepCost:
        others = self._idle[1:]
        loading = [worker.load.remote() for worker in others]
        self._ask(lambda worker: worker.load.remote())
        if loading:  # all begin together, but for one that finds no place on a busy cluster
            ray.wait(loading, num_returns=len(loading), timeout=MOST_LOADING_S)
        for worker in others:
            worker.step_cost.remote(keeps=False)  # whether one of them dies shows when it is given a shard
        return self._ask(lambda worker: worker.step_cost.remote(keeps=True))

    def pilot(self, side: Side, rows: list[PlannedRow], budget: Budget) -> PilotTexts:
        return self._ask(lambda worker: worker.pilot.remote(side, rows, budget))

    def _ask(self, question: Callable):
        for _ in range(self._max_attempts):
            try:
                return _result(question(self._idle[0]))
            except ray.exceptions.RayActorError as error:
                logger.warning("a worker died while it measured for the draft budget: %s", error)
                self._idle[0] = self._start_worker()
        raise RunFailed(
            f"{self._max_attempts} workers died while they measured for the draft budget; lower decoding.batch_size if "
            "memory ran out, or give decoding.max_draft_tokens and decoding.min_acceptance: then nothing is measured"
        )


def _result(reference):
    """What an actor returned; an error that it reports is raised as itself."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


class _Worker:
    """The actor: a `ShardWorker` that Ray can place."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._worker: ShardWorker | None = None

    def run(self, shard: Shard, budget: Budget | None) -> ShardRecord:
        return self._loaded().run(shard, budget=budget)

    def load(self) -> None:
        self._loaded()

    def step_cost(self, keeps: bool) -> StepCost:
        return self._loaded().step_cost(keeps)

    def pilot(self, side: Side, rows: list[PlannedRow], budget: Budget) -> PilotTexts:
        return self._loaded().pilot(side, rows, budget)

    def _loaded(self) -> ShardWorker:
        if self._worker is None:  # here and not in __init__, so that a refused model is reported, not a dead actor
            if self._spec.device == "cuda":
                require_own_gpu(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
            self._worker = ShardWorker(self._spec)
            self._worker.warm_up()
        return self._worker

    def pid(self) -> int:
        return os.getpid()
