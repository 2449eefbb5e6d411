"""`laserbatch report`: draw a run's report again, from its manifest."""

from pathlib import Path

import typer

from laserbatch.jobs.console import summary
from laserbatch.jobs.report.page import write_report
from laserbatch.jobs.settings import CONFIG, WORKSPACE, load_settings
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.workspace import Workspace


def report(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    run: str | None = typer.Option(None, help="A run id. Default: the published run."),
    out: Path | None = typer.Option(None, "--out", "-o", help="HTML file. Default: report.html in the run's folder."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON summary."),
) -> None:
    """Write the HTML report of a run again, from the run's manifest alone.

    Example: `laserbatch report --workspace workspace --run 2025-03-01-1a2b3c4d --out night.html`
    """
    opened = Workspace.open(load_settings(config, {"workspace": workspace}).workspace, create=False)
    folder = opened.published() if run is None else opened.existing_run(run)
    if folder is None:
        raise WorkspaceError(f"{opened.root} has no published run yet; name one with --run")
    path = out if out is not None else folder.report_path
    write_report(folder.load_manifest(), path)
    summary({"run_id": folder.run_id, "report": str(path)}, as_json)
