"""Workers under Ray, which get shards as they become free; the shard of a lost worker is repeated, halved if needed."""

import logging
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.distributed.cluster import WorkerLayout, cluster_nodes, format_nodes, require_own_gpu
from laserbatch.pipeline.distributed.settings import ClusterSettings
from laserbatch.pipeline.distributed.spec import WorkerSpec
from laserbatch.pipeline.distributed.tasks import (
    TOKEN_FILE,
    ends_process_if_device_is_lost,
    message_of,
    require_same_folder,
    require_same_software,
    software,
)
from laserbatch.pipeline.errors import ClusterFailed
from laserbatch.pipeline.planning.plan import Shard, split_shard
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import ShardRecord
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.step_cost import StepCost

logger = logging.getLogger(__name__)

POLL_S, FIRST_POLL_S = 5.0, 0.2  # seconds between polls of heartbeats; the second until the first text is finished
FETCH_TIMEOUT_S = 600.0  # to fetch an answer that a worker has ready
LOAD_TIMEOUT_S = 1800.0  # between two steps of a worker that loads its model or measures step costs
MIN_HANG_TIMEOUT_S, HANG_STEPS = 60.0, 50.0  # between two steps of a shard: the longer of 60 s and 50 costliest steps
MAX_LOST_WORKERS = 100  # after this many lost workers a run no longer halves the shards on which workers die


@dataclass(frozen=True)
class ShardAbandoned:
    """A shard, or part of one, whose worker was lost on every attempt."""

    shard: Shard
    reason: str

    def rows(self, run_dir: Path) -> Iterator[QuarantineRow]:
        for row in read_parquet(run_dir / self.shard.path, ["entity_id", "fingerprint"]).to_pylist():
            yield QuarantineRow.of(row["entity_id"], self.shard.side, self.reason, row["fingerprint"])


def run_shards(
    shards: Sequence[Shard],
    worker_pool: "WorkerPool",
    choose_budgets: Callable[[Callable[[], StepCost]], Mapping[Side, Budget | int]] = lambda measure: {},
    on_first_text: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Shard, ShardRecord] | ShardAbandoned]:
    """Hand out shards to workers as they become free; yield the outcome of each shard as it comes.

    A worker that dies, or that computes nothing for long, is replaced and its shard goes to the front of the queue; a
    worker whose GPU is lost ends itself. After `worker_pool.max_attempts` losses the shard is halved in the plan, and
    so are its halves, until the row on which workers die is alone and given up. An error that a worker reports (for
    example a model that cannot be loaded) ends the run: it would occur for every shard.

    `choose_budgets` is called once, with a function that returns the step cost of a worker, and returns the draft
    budget of each side. A side without one drafts by the settings. `on_first_text` is called when any text is finished.

    Raises ClusterFailed if no worker finds a place, or all of them are lost before they are ready.
    """
    worker_pool.resize(min(worker_pool.layout.num_workers, len(shards)))
    budgets = choose_budgets(worker_pool.step_cost)
    queue, attempts, worker_pool.on_first_text = deque(shards), Counter(), on_first_text
    while queue or worker_pool.is_at_work:
        while queue and worker_pool.idle:
            shard = queue.popleft()
            worker_pool.submit(shard, budgets.get(shard.side))
        answer = worker_pool.next_answer()
        if answer is None:
            continue
        shard, outcome = answer
        if isinstance(outcome, ShardRecord):
            worker_pool.notify_first_text()
            yield shard, outcome
            continue
        attempts[shard] += 1
        facts = {"side": shard.side, "shard": shard.name, "attempt": attempts[shard], "reason": str(outcome)}
        log_fields = {"event": "worker_lost", "facts": facts}
        logger.warning(
            "%(side)s %(shard)s: its worker was lost (attempt %(attempt)d): %(reason)s", facts, extra=log_fields
        )
        if attempts[shard] < worker_pool.max_attempts:
            queue.appendleft(shard)
            continue
        # The lost worker may have begun to write the shard's files.
        RunFolder(worker_pool.spec.run_dir).shards(shard.side).drop(shard.name)
        if shard.num_rows > 1 and worker_pool.num_lost < MAX_LOST_WORKERS:
            halves = split_shard(worker_pool.spec.run_dir, shard)
            logger.warning("%s %s: split in halves, to find the row on which workers die", shard.side, shard.name)
            # One of them surely holds such a row, so each is tried once; a single row as often as any shard.
            attempts.update({half: worker_pool.max_attempts - 1 for half in halves if half.num_rows > 1})
            queue.extendleft(reversed(halves))
        else:
            yield ShardAbandoned(shard, str(outcome))


class _WorkerLost(Exception):
    """A worker died or hangs. The first word of the message is stable: it is the reason of quarantined rows."""


class _WorkerHandle:
    """The driver's view of a worker: its actor, and when it last made progress."""

    def __init__(self, actor) -> None:
        self.actor = actor
        self.is_scheduled = False
        self.costliest_step_s = 0.0
        self.num_texts = self._num_forwards = 0
        self._is_writing = False
        self._heartbeat = actor.heartbeat.remote()
        self._last_progress_s = time.monotonic()

    def call(self, method: str, *arguments) -> ray.ObjectRef:
        self._last_progress_s, self._is_writing = time.monotonic(), method == "run"
        return getattr(self.actor, method).remote(*arguments)

    @property
    def idle_s(self) -> float:
        """Seconds since the worker last made progress or was last called."""
        return time.monotonic() - self._last_progress_s

    def is_hung(self, costliest_step_s: float) -> bool:
        """Whether the worker is scheduled but has run no step for longer than the costliest step of the run allows."""
        if ray.wait([self._heartbeat], timeout=0)[0]:
            try:
                num_forwards, self.costliest_step_s, self.num_texts = ray.get(self._heartbeat, timeout=POLL_S)
            except RayError:
                return False  # waiting for the worker's answer reports the error
            if not self.is_scheduled or num_forwards != self._num_forwards:
                self.is_scheduled, self._num_forwards, self._last_progress_s = True, num_forwards, time.monotonic()
            self._heartbeat = self.actor.heartbeat.remote()
        is_known = self._is_writing and costliest_step_s > 0
        max_s = max(MIN_HANG_TIMEOUT_S, HANG_STEPS * costliest_step_s) if is_known else LOAD_TIMEOUT_S
        return self.is_scheduled and self.idle_s > max_s


class WorkerPool:
    """The workers of a run: idle ones, and those with an open call; the first call loads the model."""

    def __init__(
        self, spec: WorkerSpec, layout: WorkerLayout, max_attempts: int,
        start_timeout_s: float = ClusterSettings().start_timeout_s,
    ) -> None:  # fmt: skip
        self.idle: list[_WorkerHandle] = []
        self.num_lost = 0
        self.on_first_text: Callable[[], None] | None = None  # None once called
        self._calls: dict[ray.ObjectRef, tuple[_WorkerHandle, Shard | None]] = {}
        self._costliest_step_s = 0.0  # of all workers, lost ones included
        self.layout, self.max_attempts, self.start_timeout_s = layout, max_attempts, start_timeout_s
        self._token, self._token_paths = secrets.token_hex(8), []
        self.reconfigure(spec)
        # Heartbeats have a thread of their own, so that they are answered while the worker computes.
        options = {"num_cpus": layout.num_threads, "num_gpus": layout.gpu_share, "concurrency_groups": {"heartbeat": 1}}
        self._actor_class = ray.remote(**options)(_Worker)
        self._num_spare = layout.num_workers * max_attempts  # to replace workers that are lost before they are ready
        for _ in range(layout.num_workers):
            self._spawn()

    def reconfigure(self, spec: WorkerSpec) -> None:
        """Use another specification of the same model and pools."""
        layout = self.layout
        self._token_paths.append(spec.run_dir / TOKEN_FILE)
        self._token_paths[-1].write_text(self._token)  # not by renaming a file: planning deletes temporary files
        self.spec = replace(
            spec, device=layout.device, num_threads=layout.num_threads, num_workers=layout.num_workers,
            workers_a_gpu=layout.workers_a_gpu, token=self._token, software=software(),
        )  # fmt: skip

    @property
    def actors(self) -> list:
        return [worker.actor for worker in (*self.idle, *(worker for worker, _ in self._calls.values()))]

    @property
    def is_at_work(self) -> bool:
        """Whether a shard is being written."""
        return any(shard is not None for _, shard in self._calls.values())

    def submit(self, shard: Shard, budget: Budget | int | None) -> None:
        worker = self.idle.pop()
        self._calls[worker.call("run", self.spec, shard, budget)] = worker, shard

    def next_answer(self) -> tuple[Shard, ShardRecord | _WorkerLost] | None:
        """Wait for the next result of a shard; None if instead a worker has become ready, or was lost before that."""
        reference = self._wait({reference: worker for reference, (worker, _) in self._calls.items()})
        worker, shard = self._calls.pop(reference)
        try:
            answer = self._answer(reference, worker)
        except _WorkerLost as lost:
            self._replace_lost(lost, was_ready=shard is not None)
            return None if shard is None else (shard, lost)
        self.idle.append(worker)
        return None if shard is None else (shard, answer)

    def notify_first_text(self) -> None:
        notify, self.on_first_text = self.on_first_text, None
        if notify is not None:
            notify()

    def step_cost(self) -> StepCost:
        """The step cost that the first ready worker finds cached, otherwise a measured one."""
        cached = self.call_one("cached_step_cost")
        return self._measured_step_cost() if cached is None else cached

    def _measured_step_cost(self) -> StepCost:
        """The step cost that one worker measures and saves, once all have loaded the model.

        On CPUs the others measure at the same time, since workers also slow each other down later. On a GPU they are
        idle: steps are timed by the clock, and next to another worker the fastest plain step would be one that ran
        alone, but no large step would, so drafts would seem more expensive than they are.
        """
        if self._calls:  # all start together, except a worker that finds no place on a busy cluster
            ray.wait(list(self._calls), num_returns=len(self._calls), timeout=self.start_timeout_s)
        while not self.idle or (self._calls and ray.wait(list(self._calls), timeout=0)[0]):
            self.next_answer()
        for other in self.idle[1:] if self.layout.device == "cpu" else ():
            other.call("measured_step_cost", False)  # if one of them is lost, its next shard shows it
        return self.call_one("measured_step_cost", True)

    def call_one(self, method: str, *arguments) -> Any:
        """The answer of an idle worker, or of the first to become idle; if it is lost, that of another worker."""
        for _ in range(self.max_attempts):
            while not self.idle:
                self.next_answer()
            worker = self.idle[0]
            try:
                return self._answer(self._wait({worker.call(method, *arguments): worker}), worker)
            except _WorkerLost as lost:
                logger.warning("a worker was lost while it measured the cost of drafts: %s", lost)
                self.idle.remove(worker)
                self._replace_lost(lost, was_ready=True)
        raise ClusterFailed(
            f"{self.max_attempts} workers died while they measured the cost of drafts. If memory ran out, lower "
            "decoding.batch_size; or set decoding.max_draft_tokens and decoding.min_acceptance (for lists "
            "extensions.recommending.num_drafted), so that nothing has to be measured"
        )

    def resize(self, num_workers: int) -> None:
        """Kill surplus workers that are not idle, or start more; no worker may be writing a shard."""
        while len(self.actors) > num_workers and self._calls:
            _, (worker, _) = self._calls.popitem()
            ray.kill(worker.actor)
        while len(self.actors) < num_workers:
            self._spawn()

    def shutdown(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        for path in self._token_paths:
            path.unlink(missing_ok=True)

    def _spawn(self) -> None:
        worker = _WorkerHandle(self._actor_class.remote(self.spec))
        self._calls[worker.call("load")] = worker, None

    def _replace_lost(self, lost: _WorkerLost, was_ready: bool) -> None:
        self.num_lost += 1
        if not was_ready:
            logger.warning("a worker was lost before it was ready: %s", lost)
            self._num_spare -= 1
        if was_ready or self._num_spare > 0:
            self._spawn()
        elif not self._calls and not self.idle:
            raise ClusterFailed(f"all workers were lost while they loaded the model and wrote a first text: {lost}")

    def _wait(self, open_calls: Mapping[ray.ObjectRef, _WorkerHandle]) -> ray.ObjectRef:
        """Wait until one of the open calls is answered, or its worker hangs; returns that call."""
        while True:
            poll_s = FIRST_POLL_S if self.on_first_text else POLL_S
            done, _ = ray.wait(list(open_calls), num_returns=1, timeout=poll_s)
            done += [reference for reference, worker in open_calls.items() if worker.is_hung(self._costliest_step_s)]
            self._costliest_step_s = max(
                [self._costliest_step_s, *(worker.costliest_step_s for worker in open_calls.values())]
            )
            if any(worker.num_texts for worker in open_calls.values()):
                self.notify_first_text()
            if done:
                return done[0]
            if all(not worker.is_scheduled and worker.idle_s > self.start_timeout_s for worker in open_calls.values()):
                free = ray.available_resources()
                raise ClusterFailed(
                    f"no worker could be placed within {self.start_timeout_s:g} seconds: each needs "
                    f"{self.layout.need}, and the cluster has {format_nodes(cluster_nodes())}, of which "
                    f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free. Wait until other jobs "
                    "end, or raise cluster.start_timeout_s if nodes have yet to start"
                )

    def _answer(self, reference: ray.ObjectRef, worker: _WorkerHandle) -> Any:
        """The result of a call; an error that the worker reports is raised unchanged."""
        try:
            if ray.wait([reference], timeout=0)[0]:
                return ray.get(reference, timeout=FETCH_TIMEOUT_S)
            reason = f"worker-hung: a worker ran no step of its model for {worker.idle_s:.0f} seconds"
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            reason = f"worker-died: {message_of(error)}"
        ray.kill(worker.actor)
        raise _WorkerLost(reason)


class _Worker:
    """The Ray actor around the worker of a specification."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._worker: Any = None  # the worker of the specification, once it is loaded

    def load(self) -> None:  # not in __init__, so that Ray reports the error of a refused model, not a dead actor
        require_same_folder(self._spec)
        require_same_software(self._spec.software)
        if self._spec.device == "cuda":
            require_own_gpu(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        with ends_process_if_device_is_lost():
            self._worker = self._spec.load()
            self._worker.warm_up()

    def run(self, spec: WorkerSpec, shard: Shard, budget: Budget | int | None) -> ShardRecord:
        self._worker.reconfigure(spec)
        with ends_process_if_device_is_lost():
            return self._worker.run(shard, budget=budget)

    def cached_step_cost(self) -> StepCost | None:
        return self._worker.engine.cached_step_cost()

    def measured_step_cost(self, save: bool) -> StepCost:
        with ends_process_if_device_is_lost():
            return self._worker.engine.measured_step_cost(save)

    def measured(self, method: str, *arguments) -> Any:
        """The result of a method of the worker, for example one that an extension measures with."""
        with ends_process_if_device_is_lost():
            return getattr(self._worker, method)(*arguments)

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self) -> tuple[int, float, int]:
        return (0, 0.0, 0) if self._worker is None else self._worker.progress()
