"""What a run was and did, as one JSON file: everything a report shows comes from it.

Owns the run's id, the hash of its settings, and the atomic saving. What the stages put in is their own matter: values
are plain JSON.
"""

import datetime
import hashlib
from collections.abc import Mapping
from pathlib import Path

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.atomic import canonical_json, read_json, write_json

MANIFEST_VERSION = 1


def settings_hash(settings: Mapping) -> str:
    """Hex SHA-256 of resolved settings, whatever the order of their keys."""
    return hashlib.sha256(canonical_json(settings).encode()).hexdigest()


def make_run_id(date: datetime.date, settings: Mapping, edition: int = 1) -> str:
    """`<date>-<first 8 hex of the settings' hash>`: the same night with the same settings is the same run.

    A finished run never changes; what does its night again is another edition: `...-2`, `...-3`.
    """
    return f"{date.isoformat()}-{settings_hash(settings)[:8]}" + (f"-{edition}" if edition > 1 else "")


class RunManifest:
    """A run's manifest: a plain dict, and the file it is saved to.

    Attributes
    ----------
    path : the `manifest.json` it is saved to.
    data : plain JSON values; `manifest["sides"]` is `manifest.data["sides"]`.
    """

    def __init__(self, path: Path | str, data: dict) -> None:
        self.path, self.data = Path(path), data

    @classmethod
    def create(
        cls,
        path: Path | str,
        date: datetime.date,
        settings: Mapping,
        laserbatch_version: str,
        machine: Mapping,
        edition: int = 1,
    ) -> "RunManifest":
        """A manifest with its head filled in and `status` "running"; not saved yet.

        Parameters
        ----------
        path : the `manifest.json` to save to.
        date : the night; knowledge is made from what was known at its end.
        settings : resolved settings as plain JSON.
        laserbatch_version, machine : what ran, and on what.
        edition : of the night; see `make_run_id`.
        """
        head = {
            "format_version": MANIFEST_VERSION,
            "run_id": make_run_id(date, settings, edition),
            "date": date.isoformat(),
            "status": "running",
            "settings": dict(settings),
            "settings_hash": settings_hash(settings),
            "laserbatch_version": laserbatch_version,
            "machine": dict(machine),
            "inputs": {},
            "sides": {},
            "stages": [],
        }
        return cls(path, head)

    @classmethod
    def load(cls, path: Path | str) -> "RunManifest":
        """Read a manifest.

        Raises
        ------
        WorkspaceError
            It is missing, damaged, or of another format version.
        """
        anew = f"take the folder {Path(path).parent} away: the night of its date is then done anew"
        data = read_json(path, f", or {anew}")
        if data.get("format_version") != MANIFEST_VERSION:
            raise WorkspaceError(
                f"{path} has format version {data.get('format_version')!r}; this laserbatch reads {MANIFEST_VERSION}. "
                f"Use the laserbatch that wrote it, or {anew}."
            )
        return cls(path, data)

    def save(self) -> None:
        """Write the file atomically: a reader sees the old one or the new one."""
        write_json(self.data, self.path)

    def add_stage(self, name: str, wall_s: float) -> None:
        """Record a stage's wall time in seconds; a stage that ran before (a resumed run) adds up."""
        for stage in self.data.setdefault("stages", []):
            if stage["name"] == name:
                stage["wall_s"] += wall_s
                return
        self.data["stages"].append({"name": name, "wall_s": wall_s})

    def __getitem__(self, key: str):
        return self.data[key]

    def __setitem__(self, key: str, value: object) -> None:
        self.data[key] = value

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def get(self, key: str, default=None):
        """`data.get(key, default)`."""
        return self.data.get(key, default)
