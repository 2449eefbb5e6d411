"""Manifests of runs that begin."""

import datetime
from collections.abc import Mapping
from pathlib import Path

from laserbatch.pipeline.storage.manifest import RunManifest, RunOrigin, make_run_id, settings_hash


def manifest_of(path: Path, date: datetime.date, settings: Mapping | None = None) -> RunManifest:
    settings = settings or {}
    return RunManifest(
        path=path,
        run_id=make_run_id(date, settings),
        date=date,
        origin=RunOrigin(
            settings=settings,
            settings_hash=settings_hash(settings),
            laserbatch_version="0",
            machine={},
        ),
    )
