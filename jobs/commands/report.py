"""`laserbatch report`: draw a run's report again, from its manifest."""

from pathlib import Path

import typer

from laserbatch.jobs.console import summary
from laserbatch.jobs.report.page import write_report
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, open_workspace


def report(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    run: str | None = typer.Option(None, help="A run id. Default: the published run."),
    out: Path | None = typer.Option(None, "--out", "-o", help="HTML file. Default: report.html in the run's folder."),
    as_json: bool = JSON,
) -> None:
    """Write the HTML report of a run again, from the run's manifest alone.

    Example: `laserbatch report --workspace workspace --run 2025-03-01-1a2b3c4d --out night.html`
    """
    folder = open_workspace(config, workspace).chosen_run(run)
    path = out if out is not None else folder.report_path
    write_report(folder.load_manifest(), path)
    summary({"run_id": folder.run_id, "report": str(path)}, as_json)
