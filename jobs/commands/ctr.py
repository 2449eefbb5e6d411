"""`laserbatch ctr train`: what the features of a run are worth to CTR models."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import typer

from laserbatch.ctr.settings import CtrSettings, ModelName
from laserbatch.jobs.console import print_table, stdout, summary
from laserbatch.jobs.report.ctr_table import ctr_lead, ctr_table
from laserbatch.jobs.settings import CONFIG, WORKSPACE, load_settings
from laserbatch.jobs.stages.compare_ctr import compare_ctr
from laserbatch.jobs.stages.night import open_run
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.manifest import CtrFigures
from laserbatch.pipeline.tables.read import read_tables

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Train and compare CTR models on the features of a run."""


@app.command()
def train(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    run: str | None = typer.Option(None, help="A run id. Default: the published run."),
    models: str | None = typer.Option(None, help="Comma-separated, of din, dcnv2 and gbdt. Default: the run's own."),
    seeds: int | None = typer.Option(None, min=1, help="Trainings of each model and variant. Default: the run's own."),
    tables: str | None = typer.Option(
        None, help="Folder or URI of the input tables. Default: the one that the run read."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print everything, each seed too, as JSON."),
) -> None:
    """Train DIN, DCNv2 and LightGBM without and with a run's knowledge; judge them on what came after the run's date.

    Reads the tables anew, so that a run of yesterday can be judged on today. Writes nothing.

    Example: `laserbatch ctr train --workspace workspace --models din,dcnv2 --seeds 3`
    """
    night = open_run(load_settings(config, {"workspace": workspace}), run)
    settings = changed_settings(night.settings.ctr, models, seeds)
    later_tables = read_tables(tables or night.settings.tables.path, as_of=None)
    figures = compare_ctr(night.run.root, later_tables, night.date, night.settings.decoding.verifier, settings)
    if as_json:
        summary({"run_id": night.run.run_id, **asdict(figures)}, as_json=True)
        return
    summary({"run_id": night.run.run_id, "rows": figures.split}, as_json=False)
    print_ctr(figures)


def changed_settings(settings: CtrSettings, models: str | None, seeds: int | None) -> CtrSettings:
    """The settings with what the command line says otherwise. Raises ConfigError on a model that is not one of ours."""
    changes: dict[str, Any] = {} if seeds is None else {"num_seeds": seeds}
    if models is not None:
        changes["models"] = tuple(name.strip().lower() for name in models.split(","))
        if not set(changes["models"]) <= set(get_args(ModelName)):
            raise ConfigError(f"--models: {models!r} is not a list of models; expected some of din, dcnv2, gbdt")
    return settings.model_copy(update=changes)


def print_ctr(figures: CtrFigures) -> None:
    """Show the report's table of a comparison on the terminal, or why there is none."""
    if figures.skipped:
        stdout.print(f"CTR models were not trained: {figures.skipped}", markup=False, soft_wrap=True)
        return
    stdout.print(ctr_lead(figures), markup=False, soft_wrap=True)
    print_table(ctr_table(figures))
