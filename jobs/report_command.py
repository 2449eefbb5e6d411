"""`laserbatch report`: draw a run's report again, from its manifest."""

from pathlib import Path
from typing import Annotated

import typer

from laserbatch.jobs.console import summary
from laserbatch.jobs.report.page import write_report
from laserbatch.jobs.settings import CONFIG, WORKSPACE, load_settings
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace


def report(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    run: Annotated[
        str | None, typer.Option("--run", help="A run id. Default: the published run, else the newest.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML file; report.html in the run's folder by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary.")] = False,
) -> None:
    """Write the HTML report of a run again, from the run's manifest alone.

    Example: `laserbatch report --workspace workspace --run 2025-03-01-1a2b3c4d --out night.html`
    """
    settings = load_settings(config, {"workspace": workspace})
    folder = chosen_run(Workspace.open(settings.workspace, create=False), run)
    path = out if out is not None else folder.report_path
    write_report(folder.load_manifest(), path)
    summary({"run_id": folder.run_id, "report": str(path)}, as_json)


def chosen_run(workspace: Workspace, run_id: str | None) -> RunFolder:
    """The run of that id; without one the published run, else the newest that has a manifest.

    Raises
    ------
    WorkspaceError
        There is no such run, or none at all.
    """
    if run_id is not None:
        return workspace.existing_run(run_id)
    runs = [folder for folder in workspace.runs() if folder.manifest_path.exists()]
    if not runs:
        raise WorkspaceError(f"{workspace.root} holds no run yet; `laserbatch nightly` makes one.")
    return workspace.published() or runs[-1]
