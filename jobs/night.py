"""One night as the stages share it: an opened, resumable run with its settings, tables and manifest.

Owns how a run is opened and closed, and which earlier run and pools it builds on. The stages themselves are files of
their own.
"""

import datetime
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from pydantic import ValidationError

from jobs.console import say
from jobs.inputs import checked_inputs
from jobs.settings import Settings
from pipeline.errors import ConfigError, WorkspaceError
from pipeline.storage.manifest import RunManifest, make_run_id
from pipeline.storage.run_folder import RunFolder
from pipeline.storage.workspace import Workspace
from pipeline.tables.read import Tables, read_tables
from retrieval_pools.errors import PoolError
from retrieval_pools.store import PoolStore, PoolVersion


@dataclass
class Night:
    """An open run.

    Attributes
    ----------
    date : the night; it sees what was known at the end of this day.
    previous : the run that was published when this one was first opened; its texts are carried over and drafted from.
    """

    settings: Settings
    workspace: Workspace
    date: datetime.date
    run: RunFolder
    manifest: RunManifest
    previous: RunFolder | None

    @cached_property
    def tables(self) -> Tables:
        """The input tables as they were known at the end of the night's date."""
        return read_tables(self.settings.tables.path, as_of=self.date)

    @cached_property
    def pools(self) -> PoolStore:
        """The workspace's pool versions."""
        return PoolStore(self.workspace.pools_folder)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage into the manifest, which is saved when it ends well."""
        start_s = time.perf_counter()
        yield
        self.manifest.add_stage(name, time.perf_counter() - start_s)
        self.manifest.save()


def parse_date(text: str) -> datetime.date:
    """A date from the command line."""
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a date; expected YYYY-MM-DD, for example 2025-03-01") from None


def open_night(settings: Settings, date: datetime.date, force: bool = False) -> Night:
    """Open the run of a date and these settings: a new one, or the unfinished one of an earlier attempt.

    The workspace's lock must be held. The inputs are checked before anything is written.

    Parameters
    ----------
    force : generate unchanged entities too, in a run of its own: files of a finished run never change.

    Raises
    ------
    TableError
        The input tables are not what they should be; every finding is named.
    PoolError
        The configured rule of routing cannot be imported, or embeddings are not what they should be.
    WorkspaceError
        The unfinished run was started from other inputs.
    """
    inputs = checked_inputs(settings, date)
    workspace = Workspace.open(settings.workspace)
    if force:
        settings = _next_regeneration(settings, workspace, date)
    run_id = make_run_id(date, settings.of_output())
    run = workspace.run(run_id)
    if workspace.find_resumable(run_id) is not None and run.manifest_path.exists():
        manifest = RunManifest.load(run.manifest_path)
        if manifest["inputs"] != inputs:
            changed = [name for name in inputs if manifest["inputs"].get(name) != inputs[name]]
            raise WorkspaceError(
                f"run {run_id} was started from other inputs ({', '.join(changed)} changed since); "
                f"restore them to finish it, or delete {run.root} to start it anew"
            )
        say(f"going on with run {run_id}")
        manifest["status"] = "running"
        previous_id = manifest["previous_run_id"]
    elif run.is_finished:
        manifest = RunManifest.load(run.manifest_path)
        previous_id = manifest["previous_run_id"]
    else:
        manifest = RunManifest.create(
            run.manifest_path, date, settings.of_output(), version("laserbatch"), describe_machine()
        )
        published = workspace.published()
        previous_id = manifest["previous_run_id"] = published.run_id if published else None
        manifest["inputs"] = inputs
        pools = current_pools(PoolStore(workspace.pools_folder), settings.pools.min_support)
        manifest["pools"] = describe_pools(pools)
        manifest.save()
    previous = workspace.run(previous_id) if previous_id else None
    return Night(settings, workspace, date, run, manifest, previous)


def _next_regeneration(settings: Settings, workspace: Workspace, date: datetime.date) -> Settings:
    while True:
        night = settings.night.model_copy(update={"regeneration": settings.night.regeneration + 1})
        settings = settings.model_copy(update={"night": night})
        if not workspace.run(make_run_id(date, settings.of_output())).is_finished:
            return settings


def open_run(settings: Settings, run_id: str | None) -> Night:
    """An existing run, for a stage that is called alone; the published one when no id is given."""
    workspace = Workspace.open(settings.workspace, create=False)
    run = workspace.run(run_id) if run_id else workspace.published()
    if run is None:
        raise WorkspaceError(f"{settings.workspace} has no published run yet; run `laserbatch nightly` first")
    if not run.manifest_path.exists():
        known = ", ".join(other.run_id for other in workspace.runs()) or "none"
        raise WorkspaceError(f"no run {run.run_id} in {settings.workspace}; runs there: {known}")
    manifest = RunManifest.load(run.manifest_path)
    previous_id = manifest["previous_run_id"]
    return Night(
        settings=_settings_of(manifest, settings),
        workspace=workspace,
        date=datetime.date.fromisoformat(manifest["date"]),
        run=run,
        manifest=manifest,
        previous=workspace.run(previous_id) if previous_id else None,
    )


def _settings_of(manifest: RunManifest, here: Settings) -> Settings:
    """A run's own settings, on this machine's workspace and cluster."""
    building = here.pool_building.model_dump() | manifest["settings"].get("pool_building", {})
    ours = {"workspace": here.workspace, "cluster": here.cluster, "pool_building": building}
    try:
        return Settings.model_validate(manifest["settings"] | ours)
    except ValidationError as error:
        keys = ", ".join(".".join(str(part) for part in item["loc"]) for item in error.errors())
        raise ConfigError(
            f"run {manifest['run_id']} was made by laserbatch {manifest['laserbatch_version']} with settings that "
            f"this version does not have ({keys}); use that version for it, or run the night again"
        ) from None


def current_pools(store: PoolStore, min_support: int) -> PoolVersion | None:
    """The pools that a run which opens now may draft from: the current ones.

    None when they were built to give more away, or are of another format: a night after an update is slower, not late.

    Parameters
    ----------
    min_support : what the run's settings ask for; pools keep what they were built with.

    Raises
    ------
    PoolError
        The current version is not there, or damaged.
    """
    version = store.current_version()
    if version is None:
        return None
    current = next(known for known in store.list() if known.version == version)
    if current.is_outdated:
        say(f"not drafting from the pools {version}: {current.problem} Those that are built from this run can be read")
        return None
    if current.problem is not None:
        raise PoolError(current.problem)
    if any(pool.settings.min_support < min_support for pool in current.pools.values()):
        say(
            f"not drafting from the pools {version}, built with a lower pools.min_support than {min_support}; "
            "those that are built from this run will have it"
        )
        return None
    return current


def describe_pools(pools: PoolVersion | None) -> dict[str, Any]:
    """The pools that a run drafts from, for its manifest; frozen there for every later attempt."""
    if pools is None:
        return {"version": None}
    return {"version": pools.version} | {
        side: {
            "version": pools.version,
            "num_texts": pool.num_texts,
            "num_tokens": pool.num_tokens,
            "groups": pool.groups,
        }
        for side, pool in pools.pools.items()
    }


def describe_machine() -> dict[str, Any]:
    """What a run ran on, for its manifest."""
    return {
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def pools_in_use(workspace: Workspace) -> set[str]:
    """Pool versions that unfinished runs draft from, which going on with them needs."""
    used = set()
    for run in workspace.runs():
        if run.is_finished or not run.manifest_path.exists():
            continue
        try:
            used.add(RunManifest.load(run.manifest_path).data.get("pools", {}).get("version"))
        except WorkspaceError as error:
            say(f"{error} Nobody can go on with run {run.run_id}, so its pools are not kept for it")
    return used - {None}
