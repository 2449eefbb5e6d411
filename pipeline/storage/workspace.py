"""A workspace: the folder that keeps every night, one writer at a time, and one published run."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.atomic import read_json, write_json
from laserbatch.pipeline.storage.lock import hold_lock
from laserbatch.pipeline.storage.publication import Publication
from laserbatch.pipeline.storage.run_folder import FOLDER_NAME, RunFolder, run_folder, run_folders

EXPERIMENTS = "experiments"  # folder of a workspace
WORKSPACE_VERSION = 1
_VERSION_TEXT = f'{{"format_version": {WORKSPACE_VERSION}}}'


@dataclass(frozen=True)
class Workspace:
    """An opened workspace; make one with `Workspace.open`."""

    root: Path

    @classmethod
    def open(cls, root: Path | str, create: bool = True) -> "Workspace":
        """Open a workspace, or with `create` make one where the folder is not there or empty.

        Raises WorkspaceError for one of another version, a folder with other things in it, or none.
        """
        root = Path(root)
        version_file = root / "workspace.json"
        if version_file.exists():
            version = read_json(version_file, f", or write {_VERSION_TEXT} to it").get("format_version")
            if version != WORKSPACE_VERSION:
                raise WorkspaceError(
                    f"{root} is a workspace of version {version!r}; this laserbatch reads version {WORKSPACE_VERSION}. "
                    "Use the laserbatch that made it, or give a new folder."
                )
            return cls(root)
        if root.is_file():
            raise WorkspaceError(f"{root} is a file; expected a workspace folder. Give another path.")
        if root.is_dir() and any(not name.name.startswith(".") for name in root.iterdir()):
            raise WorkspaceError(
                f"{root} has files in it but no workspace.json, so it is not a workspace. Give a new or empty folder, "
                f"or write {_VERSION_TEXT} to workspace.json if that was lost."
            )
        if not create:
            raise WorkspaceError(f"{root} is not a workspace: nothing is there. Check it or run `laserbatch nightly`.")
        root.mkdir(parents=True, exist_ok=True)
        write_json({"format_version": WORKSPACE_VERSION}, version_file)
        return cls(root)

    @property
    def pools_folder(self) -> Path:
        return self.root / "pools"

    @property
    def step_costs_folder(self) -> Path:
        return self.root / "step-costs"

    @property
    def publication(self) -> Publication:
        return Publication(self.root)

    def run(self, run_id: str) -> RunFolder:
        """The folder of a run, which need not be there yet. Raises WorkspaceError when the id cannot name a folder."""
        return run_folder(self.root, run_id)

    def existing_run(self, run_id: str) -> RunFolder:
        """A run whose folder is there. Raises WorkspaceError, which names the newest ones, where no run has that id."""
        run = self.run(run_id)
        if not run.root.is_dir():
            newest = ", ".join(run.run_id for run in self.runs()[-5:]) or "none"
            raise WorkspaceError(f"{self.root} has no run {run_id}; its newest runs are: {newest}.")
        return run

    def chosen_run(self, run_id: str | None) -> RunFolder:
        """The run of an id, without one the published run. Raises WorkspaceError where there is none."""
        run = self.existing_run(run_id) if run_id else self.publication.run()
        if run is None:
            raise WorkspaceError(f"{self.root} has no published run yet; name a run, or run `laserbatch nightly` first")
        return run

    def within(self) -> "list[Workspace]":
        """The workspaces of extensions, folders of this one, in the order of their names."""
        return [Workspace.open(path.parent, create=False) for path in sorted(self.root.glob("*/workspace.json"))]

    @property
    def is_within(self) -> bool:
        """Whether it is the workspace of an extension, which has no pools."""
        return (self.root.parent / "workspace.json").exists()

    def experiments(self) -> list[Path]:
        """The folders of experiments: settings of this workspace, tried on a sample of its people; in name order.

        Each has the tables of the sample, in `tables`, and a workspace for each variant. Who writes in it holds its
        lock, as that of a workspace.
        """
        paths = sorted((self.root / EXPERIMENTS).glob("*"))
        return [path for path in paths if path.is_dir() and FOLDER_NAME.fullmatch(path.name)]

    def experiment(self, name: str) -> Path:
        """An experiment, which need not be there yet. Raises WorkspaceError when the name cannot name a folder."""
        if not FOLDER_NAME.fullmatch(name):
            raise WorkspaceError(f"{name!r} cannot name an experiment; expected letters, digits, dots and dashes.")
        return self.root / EXPERIMENTS / name

    def runs(self) -> list[RunFolder]:
        """Every run, finished or not, in the order of their ids, which begin with their date."""
        return run_folders(self.root)

    def finished_runs(self, prefer_settings: str | None = None, include_held: bool = False) -> list[RunFolder]:
        """Finished runs that may be built on, the newest last: by date, and of a date by when they were finished.

        Of a date those with the settings hash `prefer_settings` come last. `include_held`: also held runs.
        """
        not_built_on = self.publication.not_built_on()
        runs = [run for run in self.runs() if run.is_finished or (include_held and run.is_held)]

        def rank(run: RunFolder) -> tuple[str, bool, int]:
            return run.date, run.settings_hash == prefer_settings, run.finished_ns

        return sorted((run for run in runs if run.run_id not in not_built_on), key=rank)

    def runs_up_to(self, run: RunFolder) -> list[RunFolder]:
        """Finished runs of earlier dates than a run's, and the run itself."""
        return [*(other for other in self.finished_runs() if other.date < run.date), run]

    def lock(self) -> AbstractContextManager[None]:
        """Hold the workspace for writing. Raises WorkspaceBusy, with pid and host, if another process holds it."""
        return hold_lock(self.root)
