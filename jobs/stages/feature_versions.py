"""The features of the runs of a workspace as versions in time, for who joins them with a log."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from laserbatch.pipeline.encoding.versions import Versions, read_versions
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace


def earlier_runs(workspace: Workspace, run: RunFolder) -> list[RunFolder]:
    """Finished runs of earlier dates than a run's, and the run itself."""
    return [*(other for other in workspace.dated_runs() if other.date < run.date), run]


TEXTS: dict[str, Callable[[RunFolder, Side], Path]] = {  # whose features a run's are
    "own": RunFolder.features_path,
    "plain": lambda run, side: run.plain.features_path(side),
}


@contextmanager
def feature_versions(
    runs: Sequence[RunFolder], path_of: Callable[[RunFolder, Side], Path] = RunFolder.features_path
) -> Iterator[dict[Side, Versions]]:
    """The versions of both sides in the features of runs, the newest last, that are of the newest one's encoder.

    Codes are told where they are of the newest one's codebook. `path_of` says which file of a run is read, if it is
    there. Raises WorkspaceError where no run has features.
    """
    with tempfile.TemporaryFile() as of_users, tempfile.TemporaryFile() as of_items:
        scratch = {"user": of_users, "item": of_items}
        manifests = {run: run.load_manifest() for run in runs}
        versions = {}
        for side in SIDES:
            found = {run: manifest.features.get(side) for run, manifest in manifests.items()}
            found = {run: of_run for run, of_run in found.items() if of_run and path_of(run, side).is_file()}
            if not found:
                raise WorkspaceError(f"no finished run has features of {side}s. Run `laserbatch nightly` first.")
            newest = list(found.values())[-1]
            found = {run: of_run for run, of_run in found.items() if of_run.encoder == newest.encoder}
            files = {run.run_id: path_of(run, side) for run in found}
            others = {run.run_id for run, of in found.items() if not of.codebook or of.codebook != newest.codebook}
            versions[side] = read_versions(files, side, scratch[side], others)
        yield versions
