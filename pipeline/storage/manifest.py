"""The manifest of a run: a JSON file that stages write, and from which the report is drawn."""

import datetime
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage import figures
from laserbatch.pipeline.storage.atomic import canonical_json, read_json, write_json

MANIFEST_VERSION = 2
CUT = "cut_in_prompts"  # key of an input table: columns with values that prompts cut, and how many
LEFT_OUT = "left_out_of_prompts"  # key of an input table: columns that look like personal data, and why


def settings_hash(settings: Mapping) -> str:
    """Hex SHA-256 of resolved settings, independent of the order of their keys."""
    return hashlib.sha256(canonical_json(settings).encode()).hexdigest()


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """`section.key` -> (before, after) for each key by which two resolved settings differ; None for a missing key."""
    old, new = _flat(before), _flat(after)
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def make_run_id(date: datetime.date, settings: Mapping, edition: int = 1) -> str:
    """`<date>-<first 8 hex of the settings' hash>`: the same night with the same settings is the same run.

    A finished run never changes; repeating its night makes another edition: `...-2`, `...-3`.
    """
    return f"{date.isoformat()}-{settings_hash(settings)[:8]}" + (f"-{edition}" if edition > 1 else "")


@dataclass(kw_only=True)
class RunOrigin:
    """The inputs with which a run was begun; later attempts keep them."""

    settings: dict[str, Any]
    settings_hash: str  # hash of the settings by which the run is named
    laserbatch_version: str
    machine: dict[str, Any]
    force: bool = False
    previous_run_id: str | None = None
    ancestor_run_ids: list[str] = field(default_factory=list)  # the previous run, the one before that, and so on
    extension: str | None = None  # the extension that made the run; None: a night
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    prompts: dict[Side, figures.PromptRef] = field(default_factory=dict)


@dataclass(kw_only=True)
class Generation:
    """The pools, model and workers of a run's texts, and the counts."""

    pools: figures.PoolsUsed = field(default_factory=figures.PoolsUsed)
    budgets: dict[Side, figures.BudgetFigures] = field(default_factory=dict)
    model: figures.ModelFigures | None = None
    workers: figures.WorkerFigures | None = None
    endpoint: figures.EndpointFigures | None = None  # the server, if one wrote the texts
    external_corpus: figures.ExternalCorpusFigures | None = None  # texts that the server drafted from, if it takes any
    sides: dict[Side, figures.SideFigures] = field(default_factory=dict)
    plain: dict[Side, figures.SideFigures] = field(default_factory=dict)


@dataclass(kw_only=True)
class Judgement:
    """The figures by which the publication of a run is decided."""

    previous_night: figures.PreviousNight | None = None
    audit: figures.AuditFigures | None = None  # None: not done yet
    ctr: figures.CtrFigures = field(default_factory=figures.CtrFigures)
    gates: list[figures.GateFigures] = field(default_factory=list)
    extension_figures: dict[str, float] = field(default_factory=dict)


_GROUPS = {"origin": RunOrigin, "generation": Generation, "judgement": Judgement}


def _anew(path: Path) -> str:
    folder = path.parent
    return f"move {folder} away and run {folder.name[:10]} again (`laserbatch nightly`; for lists `recommend`)"


def manifest_values(path: Path | str) -> dict[str, Any]:
    """The JSON values of a manifest of any format. Raises WorkspaceError if it is missing or damaged."""
    return read_json(path, f", or {_anew(Path(path))}")


@dataclass(kw_only=True)
class RunManifest:
    """A run's manifest; each stage sets its own part, and `save` writes all of it. In the file the groups are flat."""

    path: Annotated[Path, Field(exclude=True)]
    format_version: int = MANIFEST_VERSION
    run_id: str
    date: datetime.date
    status: Literal["running", "failed", "held", "success"] = "running"
    failure: str | None = None
    origin: RunOrigin
    generation: Generation = field(default_factory=Generation)
    features: dict[Side, figures.FeatureFigures] = field(default_factory=dict)
    plain_features: dict[Side, figures.FeatureFigures] = field(default_factory=dict)  # paths are relative to `plain/`
    pools_built: dict[Side, figures.PoolBuilt] = field(default_factory=dict)
    judgement: Judgement = field(default_factory=Judgement)
    stages: dict[str, float] = field(default_factory=dict)  # wall time in seconds, over all attempts

    @classmethod
    def load(cls, path: Path | str) -> "RunManifest":
        """Read a manifest. Raises WorkspaceError if it is missing, damaged, or of another format."""
        data, anew = manifest_values(path), _anew(Path(path))
        if data.get("format_version") != MANIFEST_VERSION:
            raise WorkspaceError(
                f"{path} has format version {data.get('format_version')!r}; this laserbatch reads {MANIFEST_VERSION}. "
                f"Use the laserbatch that wrote it, or {anew}."
            )
        try:
            return cls.from_json(data, Path(path))
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in fault["loc"] if part not in _GROUPS)
            raise WorkspaceError(
                f"{path} is not a manifest as this laserbatch writes it: {where}: {fault['msg']}. Use the laserbatch "
                f"that wrote it, or {anew}."
            ) from None

    @classmethod
    def from_json(cls, data: Mapping[str, Any], path: Path) -> "RunManifest":
        """The manifest from plain JSON values, to be saved at `path`. Raises pydantic's ValidationError."""
        groups = {
            name: {field.name: data[field.name] for field in fields(group) if field.name in data}
            for name, group in _GROUPS.items()
        }
        return _MANIFEST.validate_python({**data, **groups, "path": path})

    def as_json(self) -> dict[str, Any]:
        """The manifest as plain JSON values, without groups."""
        values = _MANIFEST.dump_python(self, mode="json")
        for name in _GROUPS:
            values |= values.pop(name)
        return values

    def save(self) -> None:
        """Write the file atomically: a reader sees the old one or the new one."""
        write_json(self.as_json(), self.path)


_MANIFEST = TypeAdapter(RunManifest)
