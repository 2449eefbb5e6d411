"""A workspace: the folder that holds all nights, with one writer at a time and one published run."""

from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.atomic import read_json, write_json
from laserbatch.pipeline.storage.lock import hold_lock
from laserbatch.pipeline.storage.run_folder import FOLDER_NAME, RunFolder

EXPERIMENTS = "experiments"  # folder of a workspace
WORKSPACE_VERSION = 1
MAX_REMEMBERED = 100  # earlier published runs that the pointer remembers, and ancestors that a manifest remembers
_VERSION_TEXT = f'{{"format_version": {WORKSPACE_VERSION}}}'


@dataclass(frozen=True)
class Workspace:
    """An opened workspace; make one with `Workspace.open`."""

    root: Path

    @classmethod
    def open(cls, root: Path | str, create: bool = True) -> "Workspace":
        """Open a workspace, or with `create` make one if the folder is missing or empty.

        Raises WorkspaceError if it has another version, if the folder has other files, or if there is no workspace.
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
            raise WorkspaceError(f"{root} is not a workspace: it is missing or empty. Check the path, or run a night.")
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
    def publication(self) -> "Publication":
        return Publication(self)

    def run(self, run_id: str) -> RunFolder:
        """The folder of a run, which need not exist yet. Raises WorkspaceError if the id cannot name a folder."""
        if not FOLDER_NAME.fullmatch(run_id):
            raise WorkspaceError(f"{run_id!r} is not a run id; expected one like 2025-03-01-1a2b3c4d.")
        return RunFolder(self.root / "runs" / run_id)

    def existing_run(self, run_id: str) -> RunFolder:
        """The run of an id. Raises WorkspaceError, which names the newest runs, if no run has that id."""
        run = self.run(run_id)
        if not run.root.is_dir():
            newest = ", ".join(run.run_id for run in self.runs()[-5:]) or "none"
            raise WorkspaceError(f"{self.root} has no run {run_id}; its newest runs are: {newest}.")
        return run

    def chosen_run(self, run_id: str | None) -> RunFolder:
        """The run of an id, or the published run if the id is None. Raises WorkspaceError if there is no such run."""
        run = self.existing_run(run_id) if run_id else self.publication.run()
        if run is None:
            raise WorkspaceError(f"{self.root} has no published run yet; name a run, or run `laserbatch nightly` first")
        return run

    def within(self) -> "list[Workspace]":
        """The workspaces of extensions, which are folders of this one, sorted by name."""
        return [Workspace.open(path.parent, create=False) for path in sorted(self.root.glob("*/workspace.json"))]

    @property
    def is_within(self) -> bool:
        """Whether this is the workspace of an extension, which has no pools."""
        return (self.root.parent / "workspace.json").exists()

    def experiments(self) -> list[Path]:
        """The folders of experiments, which try settings of this workspace on a sample of its entities; in name order.

        Each has the tables of the sample, in `tables`, and a workspace for each variant. Its writer holds its lock, as
        for a workspace.
        """
        paths = sorted((self.root / EXPERIMENTS).glob("*"))
        return [path for path in paths if path.is_dir() and FOLDER_NAME.fullmatch(path.name)]

    def experiment(self, name: str) -> Path:
        """The folder of an experiment, which need not exist yet. Raises WorkspaceError if it cannot have that name."""
        if not FOLDER_NAME.fullmatch(name):
            raise WorkspaceError(f"{name!r} cannot name an experiment; expected letters, digits, dots and dashes.")
        return self.root / EXPERIMENTS / name

    def runs(self) -> list[RunFolder]:
        """All runs, finished or not, sorted by id; ids begin with the date."""
        paths = sorted((self.root / "runs").glob("*"))
        return [RunFolder(path) for path in paths if path.is_dir() and FOLDER_NAME.fullmatch(path.name)]

    def finished_runs(self, prefer_settings: str | None = None, include_held: bool = False) -> list[RunFolder]:
        """Finished runs that may be built on, the newest last: sorted by date, then by the time they were finished.

        Runs with the settings hash `prefer_settings` come last among those of a date. `include_held`: also held runs.
        """
        not_built_on = self.publication.not_built_on()
        runs = [run for run in self.runs() if run.is_finished or (include_held and run.is_held)]
        runs = [run for run in runs if run.run_id not in not_built_on]
        return sorted(runs, key=lambda run: (run.date, run.settings_hash == prefer_settings, run.finished_ns))

    def line_of(self, run: RunFolder) -> list[RunFolder]:
        """`finished_runs` without those that another configuration wrote since the first run that a run is built on."""
        line = [run.run_id, *run.ancestor_run_ids]
        others = self.finished_runs(run.settings_hash)
        return [
            other for other in others
            if other.run_id in line or other.settings_hash == run.settings_hash or other.date < min(line)[:10]
        ]  # fmt: skip

    def runs_up_to(self, run: RunFolder) -> list[RunFolder]:
        """The runs of `line_of` of dates before a run's, and the run itself; of a date, runs of its settings last."""
        return [*(other for other in self.line_of(run) if other.date < run.date), run]

    def lock(self) -> AbstractContextManager[None]:
        """Hold the workspace for writing. Raises WorkspaceBusy, with pid and host, if another process holds it."""
        return hold_lock(self.root)


@dataclass(frozen=True)
class Publication:
    """The pointer `published.json`: the run that readers see, the runs published before it, and those rolled back.

    Changing it needs the workspace's lock.
    """

    workspace: Workspace

    def run(self) -> RunFolder | None:
        """The run that readers see; None before the first is published.

        Raises WorkspaceError if the pointer is damaged, or names a run that is missing or not finished.
        """
        pointer = self._pointer
        if not pointer.exists():
            return None
        run_id = read_json(pointer, ", or delete it: the next night restores it").get("run_id")
        if not isinstance(run_id, str):
            raise WorkspaceError(f"{pointer} has no run_id; the next night restores it.")
        folder = self.workspace.run(run_id)
        if not folder.is_finished:
            raise WorkspaceError(
                f"{pointer} names the run {run_id}, which is not there or not finished. `laserbatch runs rollback`, or "
                "the next night, publishes the run before it."
            )
        return folder

    def run_id(self) -> str | None:
        """The id in the pointer, whether or not that run exists; None if it names none."""
        return self._history["run_id"]

    def publish(self, run_id: str) -> None:
        """Make a finished run the one that readers see, in one step. Raises WorkspaceError if it is not finished."""
        history = self._history
        before = [history["run_id"], *history["before"]] if history["run_id"] else history["before"]
        self._point_to(run_id, before, [other for other in history["rolled_back"] if other != run_id])

    def earlier_runs(self) -> list[RunFolder]:
        """The finished runs that readers saw before the published one, the last first."""
        return [run for run_id in self._history["before"] if (run := self.workspace.run(run_id)).is_finished]

    def rolled_back(self) -> list[str]:
        """Ids of rolled-back runs: no run is built on them, and only an explicit command publishes them again."""
        return self._history["rolled_back"]

    def not_built_on(self) -> set[str]:
        """Ids of runs that must not be built on: rolled-back runs, and runs built on these and never published.

        A removed run is known by the runs that were built on it. A run whose manifest cannot be read counts as built
        on no run.
        """
        history = self._history
        excluded, published = set(history["rolled_back"]), {history["run_id"], *history["before"]}
        if not excluded:
            return excluded
        first_date = min(excluded)[:10]
        later = [run for run in self.workspace.runs() if run.date >= first_date and run.run_id not in published]
        chains = [[run.run_id, *takewhile(lambda other: other not in published, run.ancestor_run_ids)] for run in later]
        num_before = 0
        while len(excluded) > num_before:
            num_before = len(excluded)
            for chain in chains:
                farthest = max((n for n, run_id in enumerate(chain) if run_id in excluded), default=0)
                excluded.update(chain[:farthest])
        return excluded

    def roll_back(self) -> str:
        """Publish the run that was published before, and mark the present one as rolled back, in one step.

        Returns the id of the run that is published now. Raises WorkspaceError if there is no earlier run.
        """
        history, before = self._history, self.earlier_runs()
        if not before:
            raise WorkspaceError(
                f"of the runs that were published before {history['run_id']}, none is left; publish another one with "
                "`laserbatch runs publish RUN`."
            )
        older = [run.run_id for run in before[1:]]
        self._point_to(before[0].run_id, older, [*history["rolled_back"], history["run_id"]])
        return before[0].run_id

    def repair(self) -> str | None:
        """If the pointer is missing, damaged, or names a missing run, point to the last published run that exists.

        Returns that run's id; None if the pointer was fine, or no published run exists. The lock must be held.
        """
        with suppress(WorkspaceError):
            if self.run() is not None:
                return None
        history = self._history
        published = filter(None, (history["run_id"], *history["before"]))
        seen = [run_id for run_id in published if self.workspace.run(run_id).is_finished]
        if not seen:
            return None
        self._point_to(seen[0], seen[1:], history["rolled_back"])
        return seen[0]

    @property
    def _pointer(self) -> Path:
        return self.workspace.root / "published.json"

    @property
    def _pointer_copy(self) -> Path:
        """A copy of the pointer, which is read if the pointer is missing or damaged."""
        return self.workspace.root / "published-copy.json"

    @property
    def _history(self) -> dict:
        """The content of the pointer, or of its copy if that cannot be read, or an empty history."""
        for path in (self._pointer, self._pointer_copy):
            with suppress(WorkspaceError):
                history = {"before": [], "rolled_back": []} | read_json(path)
                if "withdrawn" in history:  # the key of 0.1.0
                    history["rolled_back"] = history.pop("withdrawn")
                before, rolled_back = history["before"], history["rolled_back"]
                if isinstance(before, list) and isinstance(rolled_back, list):
                    run_ids = (history.get("run_id"), *before, *rolled_back)
                    if all(isinstance(run_id, str) and FOLDER_NAME.fullmatch(run_id) for run_id in run_ids):
                        return history
        return {"run_id": None, "before": [], "rolled_back": []}

    def _point_to(self, run_id: str, before: list[str], rolled_back: list[str]) -> None:
        if not self.workspace.run(run_id).is_finished:
            raise WorkspaceError(f"run {run_id} has no _SUCCESS, so it cannot be published; finish it first.")
        before = [other for other in dict.fromkeys(before) if other != run_id][:MAX_REMEMBERED]
        rolled_back = list(dict.fromkeys(rolled_back))  # also those whose folder is away: it can come back
        for path in (self._pointer_copy, self._pointer):
            write_json({"run_id": run_id, "before": before, "rolled_back": rolled_back}, path)
