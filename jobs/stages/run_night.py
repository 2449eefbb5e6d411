"""A night's stages in order, and what is published when. A night that was killed goes on where it stopped."""

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
from laserbatch.jobs.stages.attempt import recorded, stage
from laserbatch.jobs.stages.audit import audit_texts, generate_audited, needs_audited_texts, remove_audited_texts
from laserbatch.jobs.stages.build_pools import collect_pools, prepare_pools
from laserbatch.jobs.stages.compare_ctr import compare_night
from laserbatch.jobs.stages.encode import encode_run, load_encoder, same_dtype
from laserbatch.jobs.stages.generate import generate_knowledge
from laserbatch.jobs.stages.metrics import night_metrics
from laserbatch.jobs.stages.night import Night, open_night, pools_in_use
from laserbatch.jobs.stages.plain_baseline import generate_plain
from laserbatch.jobs.stages.publishing import (
    PublishPolicy,
    deliver,
    draw_report,
    ends_no_night,
    finalize_run,
    publish_run,
    repair_pointer,
)
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.distributed.cluster import end_leftovers
from laserbatch.pipeline.engines.spending import Spending
from laserbatch.pipeline.errors import RunFailed
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.figures import PreviousNight
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.settings import KEEP_VERSIONS


@dataclass(frozen=True)
class Stage:
    name: str  # in the report, the events and `status`
    run: Callable[..., Any]  # called with the night and what `run_stages` was given; does what is not done yet
    result: str | None = None  # `group.field` of the manifest that gets what `run` returns; None: nothing is returned
    is_due: Callable[[Night], bool] = lambda night: True  # False where the stage is done, or not wanted


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
    """All stages of a night, under the workspace's lock. A finished night is left as it is, but published.

    `force`, `redo` and `base_run` are those of `open_night`. Raises RunFailed where most of the first texts cannot be
    kept, RunHeld where the night is done and a gate keeps it from being published: by the same command its gates are
    then judged again, and nothing else is done.
    """
    with night_metrics(settings) as metrics, (workspace := Workspace.open(settings.workspace)).lock():
        repair_pointer(workspace)
        if num_ended := end_leftovers(workspace.root):
            say(f"ended {num_ended} processes of Ray that an earlier night of this workspace had left")
        night = open_night(settings, date, force, redo, base_run)
        metrics.manifest = night.manifest
        if night.run.is_finished:
            say(f"run {night.run.run_id} is finished already; --force generates everything again")
            if night.changed_inputs:
                names = " and ".join(night.changed_inputs)
                say(f"{names} of that date changed since: --redo writes what this changes, in a run of its own")
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
    with NightWorkers(settings.cluster, night.workspace.root) as workers:
        try:
            with _recorded_endpoint(night):
                run_stages(night, WRITING, workers)
        except RunFailed as error:
            # Nothing is published, and the next attempt resumes at the finished shards.
            night.manifest.status, night.manifest.failure = "failed", str(error)
            night.manifest.save()
            draw_report(night.run, night.manifest)
            say(f"report of the failed night: {night.run.report_path}")
            raise
        encode_and_build_pools(night, workers)
        workers.end_own_cluster()
        run_stages(night, JUDGING, workers)
    finish_night(night)
    publish_night(night, policy)


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
    """Add to the manifest which server wrote the texts of the block and what they cost, also if it ends early."""
    prices = night.settings.decoding.endpoint and night.settings.decoding.endpoint.price_per_million_tokens
    if prices is not None:
        emit("endpoint", prices=prices.model_dump())  # by which the cost is shown while the night runs
    try:
        yield
    finally:
        if (server := night.settings.decoding.endpoint) is not None:
            figures = Spending.of(night.run.root).figures(server)
            night.manifest.generation.endpoint = figures
            if figures.changes:
                say(f"WARNING: {figures.changes}")


def encode_and_build_pools(night: Night, workers: NightWorkers) -> None:
    """Encode a night's texts while a thread, or a task, builds its pools from them; neither needs the other.

    The stage "pools" is what these take longer, beside the fit of their routers, which comes first.
    """
    workers.dismiss()
    encoding = same_dtype(night.settings.encoding, night.previous)
    with stage(night.manifest, "pools"):
        build = prepare_pools(night, make_current=False, start_cluster=workers.cluster)
    if any(figures.num_generated for figures in night.manifest.generation.sides.values()):
        _import_first(night)
    with run_in_background(build) as built:
        with stage(night.manifest, "encode"):
            fields: dict[Side, tuple[str, ...]] = {side: night.template(side).encode for side in SIDES}
            night.manifest.features = encode_run(
                night.run.root, encoding, night.previous, fields=fields, start_cluster=workers.cluster
            )
            if night.settings.night.compare_with_plain:
                encode_run(
                    night.run.plain.root, encoding, codes_of=night.run, fields=fields, start_cluster=workers.cluster
                )
        with stage(night.manifest, "pools"):
            night.manifest.pools_built = built.result()


@contextmanager
def run_in_background(function: Callable[[], Any]) -> Iterator[Future]:
    """Call a function in a thread. An error of the block waits for it; the end of the process does not."""
    result = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # of a thread: whoever asks for the result meets it
            result.set_exception(error)

    Thread(target=call, daemon=True).start()
    try:
        yield result
    except KeyboardInterrupt:
        raise  # what is half built is nobody's, and swept up by the next night
    except BaseException:
        wait([result])
        raise


def _import_first(night: Night) -> None:
    """Import what encoding and replays share, since two threads that import one package may see half of it."""
    import sklearn.cluster
    import sklearn.linear_model
    import sklearn.metrics  # noqa: F401

    _ = night.tokenizer


def finish_night(night: Night) -> None:
    """Finish the run with its report, or hold it back, so that nothing builds on it. Raises RunHeld."""
    remove_audited_texts(night)
    manifest = night.manifest
    if night.previous is not None and (earlier := unless_damaged(night.previous.load_manifest)) is not None:
        manifest.judgement.previous_night = PreviousNight(
            earlier.run_id, {side: figures.stats for side, figures in earlier.generation.sides.items()}
        )
    finalize_run(night.run, manifest, manifest.judgement.gates, night.settings.gates)


def publish_night(night: Night, policy: PublishPolicy = "if-newer") -> None:
    """Publish a finished run and its pools by a policy, and deliver it.

    May be called again: it completes what a killed night left.
    """
    run, workspace = night.run, night.workspace
    publish_run(workspace, run, policy)
    with ends_no_night("old pools were not removed, the next night tries again"):
        in_use = pools_in_use(workspace) | {run.run_id}  # the next night of a backfill drafts from this one's
        collect_pools(night.pools, KEEP_VERSIONS, in_use)
    if policy != "never":
        deliver(workspace, night.settings.deliver_to, force=policy == "always")
