"""Which run of a workspace readers see, which ones they saw before, and which ones were rolled back."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.atomic import read_json, write_json
from laserbatch.pipeline.storage.run_folder import FOLDER_NAME, RunFolder, run_folder, run_folders

MAX_REMEMBERED = 100  # earlier published runs that the pointer remembers


@dataclass(frozen=True)
class Publication:
    """The pointer `published.json` of the workspace at `root`; changing it needs the workspace's lock."""

    root: Path

    def run(self) -> RunFolder | None:
        """The run that readers see; None before the first is published.

        Raises WorkspaceError where the pointer is damaged, or names a run that is not there or not finished.
        """
        pointer = self._pointer
        if not pointer.exists():
            return None
        run_id = read_json(pointer, ", or delete it: the next `laserbatch nightly` restores it").get("run_id")
        if not isinstance(run_id, str):
            raise WorkspaceError(f"{pointer} names no run_id; the next `laserbatch nightly` restores it.")
        folder = run_folder(self.root, run_id)
        if not folder.is_finished:
            raise WorkspaceError(
                f"{pointer} names the run {run_id}, which is not there or not finished; the next `laserbatch nightly` "
                "points to the one that was published before it."
            )
        return folder

    def run_id(self) -> str | None:
        """The id in the pointer, whether or not that run exists; None if it names none."""
        return self._history["run_id"]

    def publish(self, run_id: str) -> None:
        """Make a finished run the one that readers see, in one step. Raises WorkspaceError where it is not finished."""
        history = self._history
        before = [history["run_id"], *history["before"]] if history["run_id"] else history["before"]
        self._point_to(run_id, before, [other for other in history["rolled_back"] if other != run_id])

    def earlier_runs(self) -> list[RunFolder]:
        """The finished runs that readers saw before the published one, the last first."""
        return [run for run_id in self._history["before"] if (run := run_folder(self.root, run_id)).is_finished]

    def rolled_back(self) -> list[str]:
        """Ids of rolled-back runs: nothing is built on them, and only an explicit command publishes them again."""
        return self._history["rolled_back"]

    def not_built_on(self) -> set[str]:
        """Ids of runs that nothing is built on: those rolled back, and what was built on these and never published.

        A run whose manifest cannot be read counts as built on none.
        """
        history = self._history
        excluded, published = set(history["rolled_back"]), {history["run_id"], *history["before"]}
        if not excluded:
            return excluded
        first_date = min(excluded)[:10]
        later = [run for run in run_folders(self.root) if run.date >= first_date and run.run_id not in published]
        built_on = {run.run_id: run.previous_run_id for run in later}
        while more := {run_id for run_id, previous in built_on.items() if previous in excluded} - excluded:
            excluded |= more
        return excluded

    def roll_back(self) -> str:
        """Publish the run that was published before, and mark the published one as rolled back, in one step.

        Returns the id of the run that is published now. Raises WorkspaceError if there is none.
        """
        history, before = self._history, self.earlier_runs()
        if not before:
            raise WorkspaceError(
                f"no run that is still there was published before {history['run_id']}; name one with "
                "`laserbatch runs publish RUN`."
            )
        older = [run.run_id for run in before[1:]]
        self._point_to(before[0].run_id, older, [*history["rolled_back"], history["run_id"]])
        return before[0].run_id

    def repair(self) -> str | None:
        """If the pointer is lost, damaged, or names a run that is gone, point to the last published run that exists.

        Returns that run's id; None if the pointer was fine, or no published run exists. The lock must be held.
        """
        with suppress(WorkspaceError):
            if self.run() is not None:
                return None
        history = self._history
        published = filter(None, (history["run_id"], *history["before"]))
        seen = [run_id for run_id in published if run_folder(self.root, run_id).is_finished]
        if not seen:
            return None
        self._point_to(seen[0], seen[1:], history["rolled_back"])
        return seen[0]

    @property
    def _pointer(self) -> Path:
        return self.root / "published.json"

    @property
    def _pointer_copy(self) -> Path:
        """A copy of the pointer, read if that is lost."""
        return self.root / "published-copy.json"

    @property
    def _history(self) -> dict:
        """The content of the pointer, else of its copy, else nothing."""
        for path in (self._pointer, self._pointer_copy):
            with suppress(WorkspaceError):
                history = {"before": [], "rolled_back": []} | read_json(path)
                if "withdrawn" in history:  # the key of 0.1.0
                    history["rolled_back"] = history.pop("withdrawn")
                before, rolled_back = history["before"], history["rolled_back"]
                are_lists = isinstance(before, list) and isinstance(rolled_back, list)
                if are_lists and all(map(_is_run_id, (history.get("run_id"), *before, *rolled_back))):
                    return history
        return {"run_id": None, "before": [], "rolled_back": []}

    def _point_to(self, run_id: str, before: list[str], rolled_back: list[str]) -> None:
        if not run_folder(self.root, run_id).is_finished:
            raise WorkspaceError(f"run {run_id} has no _SUCCESS, so it cannot be published; finish it first.")
        before = [other for other in dict.fromkeys(before) if other != run_id][:MAX_REMEMBERED]
        rolled_back = [other for other in dict.fromkeys(rolled_back) if run_folder(self.root, other).root.is_dir()]
        for path in (self._pointer_copy, self._pointer):
            write_json({"run_id": run_id, "before": before, "rolled_back": rolled_back}, path)


def _is_run_id(value: object) -> bool:
    return isinstance(value, str) and FOLDER_NAME.fullmatch(value) is not None
