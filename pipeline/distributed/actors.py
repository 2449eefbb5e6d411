"""Workers under Ray: kept busy with shards; what a lost one was given is done again, by halves if need be."""

import logging
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from laserbatch.pipeline.budget.step_cost import StepCost
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.distributed.cluster import WorkerLayout, cluster_nodes, format_nodes, require_own_gpu
from laserbatch.pipeline.distributed.device_loss import ends_process_if_device_is_lost
from laserbatch.pipeline.distributed.loading import TOKEN_FILE, quick_imports, require_same_folder
from laserbatch.pipeline.distributed.settings import ClusterSettings
from laserbatch.pipeline.distributed.spec import ListSpec, WorkerSpec
from laserbatch.pipeline.errors import RunFailed
from laserbatch.pipeline.planning.plan import Shard, read_ids, split_shard
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder, ShardRecord

if TYPE_CHECKING:
    from laserbatch.pipeline.distributed.list_worker import ListWorker
    from laserbatch.pipeline.distributed.worker import ShardWorker

logger = logging.getLogger(__name__)

LOOK_S, FIRST_LOOK_S = 5.0, 0.2  # between looks at how far the workers are; before there is any text
FETCH_TIMEOUT_S = 600.0  # for an answer that a worker has ready
LOAD_TIMEOUT_S = 1800.0  # for a worker that loads its model or measures step costs, between two steps
MIN_HANG_TIMEOUT_S, HANG_STEPS = 60.0, 50.0  # between two steps of a shard: seconds, or so often the costliest one's
MAX_LOST_WORKERS = 100  # after this many lost workers a run no longer halves the shards on which workers die


@dataclass(frozen=True)
class ShardAbandoned:
    """A shard, or the part of one, whose worker was lost every time."""

    shard: Shard
    reason: str

    def rows(self, run_dir: Path) -> Iterator[QuarantineRow]:
        """Its rows, for the quarantine."""
        for entity_id, fingerprint in read_ids(run_dir / self.shard.path):
            yield QuarantineRow.of(entity_id, self.shard.side, self.reason, fingerprint)


def run_shards(
    shards: Sequence[Shard],
    crew: "Crew",
    choose_budgets: Callable[[Callable[[], StepCost]], dict[Side, Budget]] = lambda measure: {},
    on_first_text: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Shard, ShardRecord] | ShardAbandoned]:
    """Hand out shards to workers as they become free; yield each one's outcome as it comes.

    A worker that dies, or that computes nothing for long, is replaced and its shard goes to the front of the queue; a
    worker whose GPU is lost ends itself. After the crew's `max_attempts` of these the shard is halved in the plan, and
    its halves likewise, until the row that workers die on is alone and given up. An error that a worker reports (a
    model that cannot be loaded, say) ends the run: it would meet every shard.

    `choose_budgets`, called once with what has workers say what steps cost, says how much each side drafts. A side that
    is missing drafts what the settings say. `on_first_text` is called when any of the shards' texts is finished.

    Raises RunFailed: no worker finds a place, or all of them are lost before they are ready.
    """
    crew.have(min(crew.layout.num_workers, len(shards)))
    budgets = choose_budgets(crew.step_cost)
    queue, attempts, crew.on_first_text = deque(shards), Counter(), on_first_text
    while queue or crew.is_at_work:
        while queue and crew.idle:
            shard = queue.popleft()
            crew.hand_out(shard, budgets.get(shard.side))
        answer = crew.next_answer()
        if answer is None:
            continue
        shard, outcome = answer
        if isinstance(outcome, ShardRecord):
            crew.tell_first_text()
            yield shard, outcome
            continue
        attempts[shard] += 1
        facts = {"side": shard.side, "shard": shard.name, "attempt": attempts[shard], "reason": str(outcome)}
        log_fields = {"event": "worker_lost", "facts": facts}
        logger.warning(
            "%(side)s %(shard)s: its worker was lost (attempt %(attempt)d): %(reason)s", facts, extra=log_fields
        )
        if attempts[shard] < crew.max_attempts:
            queue.appendleft(shard)
            continue
        RunFolder(crew.spec.run_dir).drop_shard(shard.side, shard.name)  # what the last one may have begun to write
        if shard.num_rows > 1 and crew.num_lost < MAX_LOST_WORKERS:
            halves = split_shard(crew.spec.run_dir, shard)
            logger.warning("%s %s: halved, to find the row that workers are lost to", shard.side, shard.name)
            # One of them surely holds such a row, so each is tried once; a row alone as often as any shard.
            attempts.update({half: crew.max_attempts - 1 for half in halves if half.num_rows > 1})
            queue.extendleft(reversed(halves))
        else:
            yield ShardAbandoned(shard, str(outcome))


class _WorkerLost(Exception):
    """A worker died or hangs. Its first word is stable, as the reason of a quarantined row has it."""


class _Member:
    """A worker as it is seen from here: its actor, and whether it goes on."""

    def __init__(self, actor) -> None:
        self.actor = actor
        self.has_place = False
        self.costliest_step_s = 0.0
        self.num_texts = self._num_forwards = 0
        self._is_writing = False
        self._look = actor.look.remote()
        self._went_on_s = time.monotonic()

    def ask(self, method: str, *arguments) -> ray.ObjectRef:
        self._went_on_s, self._is_writing = time.monotonic(), method == "run"
        return getattr(self.actor, method).remote(*arguments)

    @property
    def silent_s(self) -> float:
        """Seconds since it was last seen to go on, or was asked for."""
        return time.monotonic() - self._went_on_s

    def hangs(self, costliest_step_s: float) -> bool:
        """Whether it has a place and runs no step any more, the costliest of the run having taken so long."""
        if ray.wait([self._look], timeout=0)[0]:
            try:
                num_forwards, self.costliest_step_s, self.num_texts = ray.get(self._look, timeout=LOOK_S)
            except ray.exceptions.RayError:
                return False  # whoever waits for its answer hears of it
            if not self.has_place or num_forwards != self._num_forwards:
                self.has_place, self._num_forwards, self._went_on_s = True, num_forwards, time.monotonic()
            self._look = self.actor.look.remote()
        is_known = self._is_writing and costliest_step_s > 0
        most_s = max(MIN_HANG_TIMEOUT_S, HANG_STEPS * costliest_step_s) if is_known else LOAD_TIMEOUT_S
        return self.has_place and self.silent_s > most_s


class Crew:
    """The workers of a run: those that were asked something, at first to load their model, and idle ones."""

    def __init__(
        self,
        spec: WorkerSpec,
        layout: WorkerLayout,
        max_attempts: int,
        start_timeout_s: float = ClusterSettings().start_timeout_s,
    ) -> None:
        self.idle: list[_Member] = []
        self.num_lost = 0
        self.on_first_text: Callable[[], None] | None = None  # until it was called
        self._asked: dict[ray.ObjectRef, tuple[_Member, Shard | None]] = {}
        self._costliest_step_s = 0.0  # of all that is known of any worker, lost ones too
        self.layout, self.max_attempts, self.start_timeout_s = layout, max_attempts, start_timeout_s
        self._token, self._seen = secrets.token_hex(8), []
        self.turn_to(spec)
        # In a thread of its own a worker says how far it is while it works.
        options = {"num_cpus": layout.num_threads, "num_gpus": layout.num_gpus, "concurrency_groups": {"look": 1}}
        self._actor_class = ray.remote(**options)(_Worker)
        self._num_spare = layout.num_workers * max_attempts  # to replace workers that are lost before they are ready
        for _ in range(layout.num_workers):
            self._hire()

    def turn_to(self, spec: WorkerSpec) -> None:
        """Go on by another specification, of the same model and pools."""
        layout = self.layout
        self._seen.append(spec.run_dir / TOKEN_FILE)
        self._seen[-1].write_text(self._token)  # not a name and a rename: plans sweep up meanwhile
        self.spec = replace(
            spec,
            device=layout.device,
            num_threads=layout.num_threads,
            num_workers=layout.num_workers,
            token=self._token,
        )

    @property
    def actors(self) -> list:
        return [member.actor for member in (*self.idle, *(member for member, _ in self._asked.values()))]

    @property
    def is_at_work(self) -> bool:
        """Whether a shard is being written."""
        return any(shard is not None for _, shard in self._asked.values())

    def hand_out(self, shard: Shard, budget: Budget | int | None) -> None:
        member = self.idle.pop()
        self._asked[member.ask("run", self.spec, shard, budget)] = member, shard

    def next_answer(self) -> tuple[Shard, ShardRecord | _WorkerLost] | None:
        """Wait for what came of a shard; None where only a worker has become ready, or was lost before."""
        reference = self._wait({reference: member for reference, (member, _) in self._asked.items()})
        member, shard = self._asked.pop(reference)
        try:
            answer = self._answer(reference, member)
        except _WorkerLost as lost:
            self._replace_lost(lost, was_ready=shard is not None)
            return None if shard is None else (shard, lost)
        self.idle.append(member)
        return None if shard is None else (shard, answer)

    def tell_first_text(self) -> None:
        """Say, once, that a text is finished."""
        tell, self.on_first_text = self.on_first_text, None
        if tell is not None:
            tell()

    def step_cost(self) -> StepCost:
        """What steps cost here: as the first worker that is ready finds it kept, else measured."""
        kept = self.ask_one("kept_step_cost")
        return self._measured_step_cost() if kept is None else kept

    def _measured_step_cost(self) -> StepCost:
        """Measured by all workers at once, so that they get in each other's way as they will later; one keeps it."""
        if self._asked:  # all begin together, but for one that finds no place on a busy cluster
            ray.wait(list(self._asked), num_returns=len(self._asked), timeout=self.start_timeout_s)
        while not self.idle or (self._asked and ray.wait(list(self._asked), timeout=0)[0]):
            self.next_answer()
        for other in self.idle[1:]:
            other.ask("measured_step_cost", False)  # whether one of them is lost shows when it is given a shard
        return self.ask_one("measured_step_cost", True)

    def ask_one(self, method: str, *arguments) -> Any:
        """What an idle worker answers: the first that becomes ready, where none is; another where it is lost."""
        for _ in range(self.max_attempts):
            while not self.idle:
                self.next_answer()
            member = self.idle[0]
            try:
                return self._answer(self._wait({member.ask(method, *arguments): member}), member)
            except _WorkerLost as lost:
                logger.warning("a worker was lost while it measured for the draft budget: %s", lost)
                self.idle.remove(member)
                self._replace_lost(lost, was_ready=True)
        raise RunFailed(
            f"{self.max_attempts} workers died while they measured what drafts cost; lower decoding.batch_size (of "
            "lists recommending.batch_size) if memory ran out, or give decoding.max_draft_tokens and "
            "decoding.min_acceptance (recommending.num_drafted): then nothing is measured"
        )

    def have(self, num_workers: int) -> None:
        """Dismiss workers that are too many and not idle, or hire others; none may be writing a shard."""
        while len(self.actors) > num_workers and self._asked:
            _, (member, _) = self._asked.popitem()
            ray.kill(member.actor)
        while len(self.actors) < num_workers:
            self._hire()

    def dismiss(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        for path in self._seen:
            path.unlink(missing_ok=True)

    def _hire(self) -> None:
        member = _Member(self._actor_class.remote(self.spec))
        self._asked[member.ask("load")] = member, None

    def _replace_lost(self, lost: _WorkerLost, was_ready: bool) -> None:
        self.num_lost += 1
        if not was_ready:
            logger.warning("a worker was lost before it was ready: %s", lost)
            self._num_spare -= 1
        if was_ready or self._num_spare > 0:
            self._hire()
        elif not self._asked and not self.idle:
            raise RunFailed(f"all workers were lost while they loaded the model and wrote a text; the last: {lost}")

    def _wait(self, asked: Mapping[ray.ObjectRef, _Member]) -> ray.ObjectRef:
        """Which of the answers is the next to be there, or will not come since its worker hangs."""
        while True:
            look_s = FIRST_LOOK_S if self.on_first_text else LOOK_S
            done, _ = ray.wait(list(asked), num_returns=1, timeout=look_s)
            done += [reference for reference, member in asked.items() if member.hangs(self._costliest_step_s)]
            self._costliest_step_s = max([self._costliest_step_s, *(one.costliest_step_s for one in asked.values())])
            if any(member.num_texts for member in asked.values()):
                self.tell_first_text()
            if done:
                return done[0]
            if all(not member.has_place and member.silent_s > self.start_timeout_s for member in asked.values()):
                free = ray.available_resources()
                raise RunFailed(
                    f"no worker found a place within {self.start_timeout_s:g} seconds: each needs "
                    f"{self.layout.need}, and the cluster has {format_nodes(cluster_nodes())}, of which "
                    f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free. Wait for what uses "
                    "them, or raise cluster.start_timeout_s if nodes start first"
                )

    def _answer(self, reference: ray.ObjectRef, member: _Member) -> object:
        """What an actor returned; an error that it reports is raised as itself."""
        try:
            if ray.wait([reference], timeout=0)[0]:
                return ray.get(reference, timeout=FETCH_TIMEOUT_S)
            reason = f"worker-hung: for {member.silent_s:.0f} seconds a worker ran no step of its model"
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            message = str(error).partition("Some common causes")[0]
            reason = f"worker-died: {' '.join(message.split())}"
        ray.kill(member.actor)
        raise _WorkerLost(reason)


class _Worker:
    """The actor: a specification's worker that Ray can place."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._worker = None

    def load(self) -> None:  # not in __init__, so that a refused model is reported, not a dead actor
        require_same_folder(self._spec)
        if self._spec.device == "cuda":
            require_own_gpu(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        with ends_process_if_device_is_lost():
            with quick_imports() if self._spec.loads_quickly else nullcontext():
                self._worker = _loaded(self._spec)
            self._worker.warm_up()

    def run(self, spec: WorkerSpec, shard: Shard, budget: Budget | int | None) -> ShardRecord:
        self._worker.turn_to(spec)
        with ends_process_if_device_is_lost():
            return self._worker.run(shard, budget=budget)

    def kept_step_cost(self) -> StepCost | None:
        return self._worker.engine.kept_step_cost()

    def measured_step_cost(self, keeps: bool) -> StepCost:
        with ends_process_if_device_is_lost():
            return self._worker.engine.measured_step_cost(keeps)

    def tried_drafts(self, shards: Sequence[Shard]) -> dict[int, float]:
        with ends_process_if_device_is_lost():
            return self._worker.tried_drafts(shards)

    @ray.method(concurrency_group="look")
    def look(self) -> tuple[int, float, int]:
        """Forwards so far, seconds of the costliest step, and finished texts."""
        return (0, 0.0, 0) if self._worker is None else self._worker.progress()


def _loaded(spec: WorkerSpec) -> "ShardWorker | ListWorker":
    """What a specification asks for; torch and transformers, which take seconds, are loaded now."""
    if isinstance(spec, ListSpec):
        from laserbatch.pipeline.distributed.list_worker import ListWorker

        return ListWorker(spec)
    from laserbatch.pipeline.distributed.worker import ShardWorker

    return ShardWorker(spec)
