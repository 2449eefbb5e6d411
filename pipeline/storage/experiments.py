"""Experiments of a workspace: variants of its settings, tried on a sample of its people.

An experiment is a folder with the tables of the sample, in `tables`, and a workspace for each variant. Who writes in it
holds its lock, as that of a workspace.
"""

from pathlib import Path

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.run_folder import FOLDER_NAME
from laserbatch.pipeline.storage.workspace import Workspace

EXPERIMENTS = "experiments"  # folder of a workspace


def experiment_folders(workspace: Workspace) -> list[Path]:
    """Every experiment of a workspace, in the order of their names."""
    paths = sorted((workspace.root / EXPERIMENTS).glob("*"))
    return [path for path in paths if path.is_dir() and FOLDER_NAME.fullmatch(path.name)]


def experiment_folder(workspace: Workspace, name: str) -> Path:
    """An experiment, which need not be there yet. Raises WorkspaceError when the name cannot name a folder."""
    if not FOLDER_NAME.fullmatch(name):
        raise WorkspaceError(f"{name!r} cannot name an experiment; expected letters, digits, dots and dashes.")
    return workspace.root / EXPERIMENTS / name
