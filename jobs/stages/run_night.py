"""Runs a night's stages in order and publishes its run. A night that was killed goes on where it stopped."""

import datetime
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

from laserbatch.jobs.console import say
from laserbatch.jobs.events import emit
from laserbatch.jobs.gates import measure
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages import publishing
from laserbatch.jobs.stages.attempt import recorded, stage
from laserbatch.jobs.stages.audit import audit_texts, generate_audited, needs_audited_texts, remove_audited_texts
from laserbatch.jobs.stages.build_pools import collect_pools, prepare_pools
from laserbatch.jobs.stages.compare_ctr import compare_night
from laserbatch.jobs.stages.encode import encode_run, load_encoder, same_dtype
from laserbatch.jobs.stages.generate import generate_knowledge, generate_plain
from laserbatch.jobs.stages.metrics import night_metrics
from laserbatch.jobs.stages.night import Night, open_night, pools_in_use
from laserbatch.jobs.stages.publishing import PublishPolicy
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.distributed.cluster import end_leftovers
from laserbatch.pipeline.engines.spending import Spending
from laserbatch.pipeline.errors import LaserbatchError, RunFailed
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import PreviousNight
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.settings import KEEP_VERSIONS


@dataclass(frozen=True)
class Stage:
    name: str  # as the report, the events and `status` show it
    run: Callable[..., Any]  # called with the night and the values of `run_stages`; does what is not done yet
    result: str | None = None  # `group.field` of the manifest in which the result of `run` is stored; None: no result
    is_due: Callable[[Night], bool] = lambda night: True  # False if the stage is done, or not wanted


WRITING = (
    Stage("generate", generate_knowledge, "generation.sides"),
    Stage("generate plain", generate_plain, "generation.plain", lambda night: night.settings.night.compare_with_plain),
    Stage("generate audited", generate_audited, is_due=needs_audited_texts),
)
JUDGING = (
    Stage(
        "audit",
        lambda night, workers: audit_texts(night, partial(load_encoder, night.settings.encoding)),
        "judgement.audit",
        lambda night: night.manifest.judgement.audit is None,
    ),
    Stage("ctr", lambda night, workers: compare_night(night, workers.joined()), "judgement.ctr"),
    Stage("gates", lambda night, workers: measure(night.manifest, night.run, night.previous), "judgement.gates"),
)


def run_night(
    settings: Settings,
    date: datetime.date,
    force: bool = False,
    redo: bool = False,
    policy: PublishPolicy = "if-newer",
    base_run: RunFolder | None = None,
) -> Night:
    """Run all stages of a night, under the workspace's lock. A finished night is only published.

    `open_night` describes `force`, `redo` and `base_run`. Raises RunFailed if most of the first texts cannot be
    kept or the cost reaches its limit, and RunHeld if the night is done but a gate blocks its publication: the same
    command then only judges the gates again.
    """
    with night_metrics(settings) as metrics, (workspace := Workspace.open(settings.workspace)).lock():
        publishing.repair_pointer(workspace)
        if num_ended := end_leftovers(workspace.root):
            say(f"ended {num_ended} Ray processes that an earlier night of this workspace had left behind")
        night = open_night(settings, date, force, redo, base_run)
        metrics.manifest = night.manifest
        if night.run.is_finished:
            say(f"run {night.run.run_id} is finished already; --force generates everything again")
            if night.changed_inputs:
                names = " and ".join(night.changed_inputs)
                say(f"{names} of that date changed since then: --redo writes the changed texts, in a new run")
            publish_night(night, policy)
        else:
            with recorded(night.manifest):
                _do_stages(night, policy)
        return night


def _do_stages(night: Night, policy: PublishPolicy) -> None:
    settings = night.settings
    if night.run.is_held:
        say(f"run {night.run.run_id} is done already; its gates are judged again")
        finish_night(night)
        publish_night(night, policy)
        return
    if settings.deliver_to is not None and policy != "never":
        _require_place(night.workspace, settings.deliver_to)
    with NightWorkers(settings.cluster, night.workspace.root) as workers:
        try:
            with _recorded_endpoint(night):
                run_stages(night, WRITING, workers)
        except RunFailed as error:
            # Nothing is published, and the next attempt resumes at the finished shards.
            night.manifest.status, night.manifest.failure = "failed", str(error)
            night.manifest.save()
            publishing.draw_report(night.run, night.manifest)
            say(f"report of the failed night: {night.run.report_path}")
            raise
        encode_and_build_pools(night, workers)
        workers.end_own_cluster()
        run_stages(night, JUDGING, workers)
    finish_night(night)
    publish_night(night, policy)


def _require_place(workspace: Workspace, uri: str) -> None:
    """Before texts are written, raise the errors of `require_place`; only warn of a service that does not answer."""
    try:
        publishing.require_place(workspace, uri)
    except LaserbatchError as error:
        if not getattr(error, "may_pass", False):
            raise type(error)(f"no text was written, because the run could not be delivered. {error}") from None
        say(f"WARNING: the night goes on, but delivers its run only if this passes. {error}")


def run_stages(night: Night, stages: Iterable[Stage], *values: Any) -> None:
    """Run the stages that are due, one after another; the manifest is saved after each."""
    for each in stages:
        if each.is_due(night):
            with stage(night.manifest, each.name):
                value = each.run(night, *values)
                if each.result is not None:
                    group, field = each.result.split(".")
                    setattr(getattr(night.manifest, group), field, value)


@contextmanager
def _recorded_endpoint(night: Night) -> Iterator[None]:
    """Record in the manifest which server writes texts in this block and their cost, also if the block fails."""
    server = night.settings.decoding.endpoint
    if server is not None and (prices := server.price_per_million_tokens) is not None:
        emit("endpoint", prices=prices.model_dump())  # the running cost is computed from these prices
    try:
        yield
    finally:
        if server is not None:
            figures = Spending.of(night.run.root).figures(server)
            night.manifest.generation.endpoint = figures
            if figures.changes:
                say(f"WARNING: {figures.changes}")


def encode_and_build_pools(night: Night, workers: NightWorkers) -> None:
    """Encode a night's texts while a thread, or a task, builds its pools from them; neither needs the other.

    The time of the stage "pools" is that of fitting the routers, which comes first, and of waiting after encoding.
    """
    workers.dismiss()
    encoding = same_dtype(night.settings.encoding, night.previous)
    with stage(night.manifest, "pools"):
        build = prepare_pools(night, make_current=False, start_cluster=workers.cluster)
    if any(figures.num_generated for figures in night.manifest.generation.sides.values()):
        # Encoding and replays share these: of two threads that import one, one may see half of it.
        import sklearn.cluster
        import sklearn.linear_model
        import sklearn.metrics  # noqa: F401

        _ = night.tokenizer
    with run_in_background(build) as built:
        with stage(night.manifest, "encode"):
            fields: dict[Side, tuple[str, ...]] = {side: night.template(side).encode for side in SIDES}
            encode = partial(encode_run, settings=encoding, fields=fields, start_cluster=workers.cluster)
            night.manifest.features = encode(night.run.root, previous=night.previous)
            if night.settings.night.compare_with_plain:
                night.manifest.plain_features = encode(night.run.plain.root, codes_of=night.run)
        with stage(night.manifest, "pools"):
            night.manifest.pools_built = built.result()


@contextmanager
def run_in_background(function: Callable[[], Any]) -> Iterator[Future]:
    """Call a function in a thread. If the block fails, wait for the thread; an interrupt does not wait."""
    result = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised again in the thread that asks for the result
            result.set_exception(error)

    Thread(target=call, daemon=True).start()
    try:
        yield result
    except KeyboardInterrupt:
        raise  # nothing refers to half-built pools; the next night removes them
    except BaseException:
        wait([result])
        raise


def finish_night(night: Night) -> None:
    """Finish the run and draw its report. Raises RunHeld if a gate holds it back; nothing then builds on the run."""
    remove_audited_texts(night)
    manifest = night.manifest
    if night.previous is not None and (earlier := unless_damaged(night.previous.load_manifest)) is not None:
        manifest.judgement.previous_night = PreviousNight(
            earlier.run_id, {side: figures.stats for side, figures in earlier.generation.sides.items()}
        )
    publishing.finalize_run(night.run, manifest, manifest.judgement.gates, night.settings.gates)


def publish_night(night: Night, policy: PublishPolicy = "if-newer") -> None:
    """Publish a finished run and its pools by a policy, and deliver it.

    A repeated call completes what a killed night left undone.
    """
    run, workspace = night.run, night.workspace
    publishing.publish_run(workspace, run, policy)
    with publishing.ends_no_night("old pools were not removed; the next night tries again"):
        in_use = pools_in_use(workspace) | {run.run_id}  # the next night of a backfill drafts from this run's pools
        collect_pools(night.pools, KEEP_VERSIONS, in_use)
    if policy != "never":
        publishing.deliver(workspace, night.settings.deliver_to, force=policy == "always")
