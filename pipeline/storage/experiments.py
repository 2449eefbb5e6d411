"""Experiments of a workspace: variants of its settings, tried on a sample of its people."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.lock import hold_lock
from laserbatch.pipeline.storage.run_folder import FOLDER_NAME
from laserbatch.pipeline.storage.workspace import Workspace

EXPERIMENTS = "experiments"  # folder of a workspace


@dataclass(frozen=True)
class ExperimentFolder:
    """Tables of a sample of people, and a workspace for each variant that was tried on them."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def tables_folder(self) -> Path:
        return self.root / "tables"

    def variants(self) -> list[Workspace]:
        """The workspaces of the variants that have begun."""
        return [Workspace.open(path.parent, create=False) for path in sorted(self.root.glob("*/workspace.json"))]

    def lock(self) -> AbstractContextManager[None]:
        """Hold it for writing, as a workspace is held."""
        return hold_lock(self.root)


def experiment_folders(workspace: Workspace) -> list[ExperimentFolder]:
    """Every experiment of a workspace, in the order of their names."""
    paths = sorted((workspace.root / EXPERIMENTS).glob("*"))
    return [ExperimentFolder(path) for path in paths if path.is_dir() and FOLDER_NAME.fullmatch(path.name)]


def experiment_folder(workspace: Workspace, name: str) -> ExperimentFolder:
    """An experiment, which need not be there yet. Raises WorkspaceError when the name cannot name a folder."""
    if not FOLDER_NAME.fullmatch(name):
        raise WorkspaceError(f"{name!r} cannot name an experiment; expected letters, digits, dots and dashes.")
    return ExperimentFolder(workspace.root / EXPERIMENTS / name)
