"""A run's attempts and stages, kept in its events and its manifest while they happen."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from laserbatch.jobs.events import emit, event_log
from laserbatch.jobs.failures import exit_code_of, line_of
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.pipeline.storage.run_folder import RunFolder


@contextmanager
def recorded(manifest: RunManifest) -> Iterator[None]:
    """Keep what happens in the block in the run's events; who meets its error is told where to look."""
    run = RunFolder(manifest.path.parent)
    with event_log(run.events_path):
        emit(
            "run_begin",
            run_id=run.run_id,
            date=str(manifest.date),
            version=manifest.laserbatch_version,
            process=f"pid {os.getpid()} on {socket.gethostname()}",
            previous_run_id=manifest.previous_run_id,
            pools=manifest.pools.version,
        )
        try:
            yield
        except BaseException as error:
            exit_code = int(exit_code_of(error))
            emit("failure", error=line_of(error, names_values=False), kind=type(error).__name__, exit_code=exit_code)
            error.see = {"run_id": run.run_id, "events": str(run.events_path)}
            if run.report_path.exists():
                error.see["report"] = str(run.report_path)
            raise


@contextmanager
def stage(manifest: RunManifest, name: str) -> Iterator[None]:
    """Time a stage into the manifest, which is saved when it ends well."""
    start_s = time.perf_counter()
    emit("stage_begin", stage=name)
    yield
    took_s = time.perf_counter() - start_s
    emit("stage_end", stage=name, seconds=took_s)
    manifest.add_stage(name, took_s)
    manifest.save()
