"""Attempts at a run: which run a command starts or resumes, and the record of what happens in it."""

import ctypes
import datetime
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from laserbatch.jobs.console import say
from laserbatch.jobs.events import emit, event_log
from laserbatch.jobs.failures import exit_code_of, line_of
from laserbatch.jobs.log_age import recorded_age
from laserbatch.jobs.stages.inputs import changed_inputs
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.gpus import gpu_name
from laserbatch.pipeline.storage.manifest import RunManifest, RunOrigin, make_run_id, settings_hash
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import MAX_REMEMBERED, Workspace


@dataclass(frozen=True)
class Attempt:
    """The run that a command works on: the newest one of a date and settings, or its next edition."""

    run: RunFolder
    edition: int
    manifest: RunManifest | None  # None: the run has not begun
    changed: tuple[str, ...] = ()  # names of the inputs that changed since the run was started

    @property
    def is_done(self) -> bool:
        """Whether the run is completely written; a gate may hold it."""
        return self.run.is_finished or self.run.is_held


def newest_attempt(
    workspace: Workspace,
    date: datetime.date,
    identity: Mapping[str, Any],
    inputs: Mapping[str, Mapping[str, Any]],
    force: bool = False,
    redo: bool = False,
) -> Attempt:
    """Find the newest run of a date and of settings with `identity`, finished or not, or begin its next edition.

    Files of a finished run never change: `force` begins another edition, and so does `redo` if inputs have changed. A
    run that was built on a run that was since rolled back gets another edition too.
    Raises WorkspaceError if an unfinished run was started from other inputs.
    """
    edition = newest_edition(workspace, date, identity)
    run = workspace.run(make_run_id(date, identity, edition))
    next_edition = Attempt(workspace.run(make_run_id(date, identity, edition + 1)), edition + 1, None)
    is_rolled_back = run.run_id in workspace.publication.rolled_back()
    if not run.is_finished and not run.manifest_path.exists():  # new, or its folder is away
        return next_edition if is_rolled_back else Attempt(run, edition, None)
    manifest = RunManifest.load(run.manifest_path)
    changed = tuple(changed_inputs(manifest.origin.inputs, inputs))
    attempt = Attempt(run, edition, manifest, changed)
    begins_anew = force or (redo and changed) if attempt.is_done else force and not manifest.origin.force
    if run.run_id in workspace.publication.not_built_on() and not is_rolled_back:
        say(f"run {run.run_id} was built on a run that was rolled back since; the night of its date is run again")
        begins_anew = True
    if begins_anew:
        return next_edition
    if changed and not attempt.is_done:
        raise WorkspaceError(
            f"run {run.run_id} was started from other inputs ({', '.join(changed)} changed since); "
            f"restore them to finish it, or delete {run.root} to start it anew"
        )
    return attempt


def newest_edition(workspace: Workspace, date: datetime.date, identity: Mapping[str, Any]) -> int:
    """The highest edition among the runs of a date and of settings with `identity`; 1 if there is no run.

    A run that was rolled back counts also if its folder is away, so that its id names no other run.
    """
    first = make_run_id(date, identity)
    run_ids = [*(run.run_id for run in workspace.runs()), *workspace.publication.rolled_back()]
    tails = [run_id.removeprefix(f"{first}-") for run_id in run_ids if run_id.startswith(f"{first}-")]
    return max((int(tail) for tail in tails if tail.isdecimal()), default=1)


def new_manifest(
    workspace: Workspace, date: datetime.date, settings: Mapping[str, Any], identity: Mapping[str, Any], edition: int
) -> RunManifest:
    """The manifest of a new run, which records `settings`; not saved yet."""
    run = workspace.run(make_run_id(date, identity, edition))
    machine = {
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "gpu": gpu_name(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    named, made_by = settings_hash(identity), version("laserbatch")
    origin = RunOrigin(settings=dict(settings), settings_hash=named, laserbatch_version=made_by, machine=machine)
    return RunManifest(path=run.manifest_path, run_id=run.run_id, date=date, origin=origin)


def build_on(manifest: RunManifest, previous: RunFolder | None) -> None:
    """Record the run that a new run is built on, and the runs that `previous` was built on."""
    if previous is not None:
        manifest.origin.previous_run_id = previous.run_id
        manifest.origin.ancestor_run_ids = [previous.run_id, *previous.ancestor_run_ids][:MAX_REMEMBERED]


@contextmanager
def recorded(manifest: RunManifest) -> Iterator[None]:
    """Record the events of the block in the run; an error gets the paths of the record as `recorded_in`."""
    run = RunFolder(manifest.path.parent)
    with event_log(run.events_path):
        facts = {
            "run_id": run.run_id,
            "date": str(manifest.date),
            "version": manifest.origin.laserbatch_version,
            "process": f"pid {os.getpid()} on {socket.gethostname()}",
            "previous_run_id": manifest.origin.previous_run_id,
            "pools": manifest.generation.pools.version,
        }
        emit("run_begin", **facts)
        if (age := recorded_age(manifest.origin.inputs)) is not None:
            emit("interactions", newest=age.newest, age_days=age.age_days, is_stale=age.is_stale)
        try:
            yield
        except BaseException as error:
            exit_code = int(exit_code_of(error))
            emit("failure", error=line_of(error, names_values=False), kind=type(error).__name__, exit_code=exit_code)
            report = {"report": str(run.report_path)} if run.report_path.exists() else {}
            vars(error)["recorded_in"] = {"run_id": run.run_id, "events": str(run.events_path)} | report
            raise


@contextmanager
def stage(manifest: RunManifest, name: str) -> Iterator[None]:
    """Add a stage's time to the manifest and save it, if the stage succeeds; return freed memory to the kernel."""
    start_s = time.perf_counter()
    emit("stage_begin", stage=name)
    yield
    # Arrow's free memory, and the C library's if it has malloc_trim.
    pa.default_memory_pool().release_unused()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    took_s = time.perf_counter() - start_s
    emit("stage_end", stage=name, seconds=took_s)
    manifest.stages[name] = manifest.stages.get(name, 0.0) + took_s
    manifest.save()
