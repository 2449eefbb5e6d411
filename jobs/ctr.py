"""`laserbatch ctr train`: what the features of a run are worth to CTR models."""

import datetime
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from pydantic import TypeAdapter
from rich.text import Text

from laserbatch.ctr.compare import CtrRow, train_ctr
from laserbatch.ctr.dataset import EntityTables
from laserbatch.ctr.feature_set import FeatureSet, read_feature_set
from laserbatch.ctr.settings import CtrSettings
from laserbatch.jobs.console import progress, stdout, summary, text_table
from laserbatch.jobs.report.ctr_table import ctr_table
from laserbatch.jobs.settings import CONFIG, WORKSPACE, load_settings
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.manifest import CtrFigures
from laserbatch.pipeline.storage.run_folder import RunFolder

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
    tables: Path | None = typer.Option(None, help="Folder of the input tables. Default: the one that the run read."),
    as_json: bool = typer.Option(False, "--json", help="Print everything, each seed too, as JSON."),
) -> None:
    """Train DIN, DCNv2 and LightGBM without and with a run's knowledge; judge them on what came after the run's date.

    Reads the tables anew, so that a run of yesterday can be judged on today. Writes nothing.

    Example: `laserbatch ctr train --workspace workspace --models din,dcnv2 --seeds 3`
    """
    from laserbatch.jobs.night import open_run
    from laserbatch.pipeline.tables.read import read_tables

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
    """The settings with what the command line says otherwise.

    Raises
    ------
    ConfigError
        A model that is not one of ours.
    """
    changes: dict[str, Any] = {}
    if models is not None:
        names = tuple(name.strip().lower() for name in models.split(",") if name.strip())
        unknown = [name for name in names if name not in ("din", "dcnv2", "gbdt")]
        if unknown or not names:
            raise ConfigError(f"--models: {models!r} is not a list of models; expected some of din, dcnv2, gbdt")
        changes["models"] = names
    if seeds is not None:
        changes["num_seeds"] = seeds
    return settings.model_copy(update=changes)


def compare_ctr(
    run_dir: Path, tables: EntityTables, as_of: datetime.date, verifier: str, settings: CtrSettings | None = None
) -> CtrFigures:
    """Compare CTR models without knowledge, with plainly decoded knowledge where the run has it, and with the run's.

    Parameters
    ----------
    run_dir : folder of a run with `features/`, perhaps with `plain/features/`.
    tables : the input tables, with what came after the run's date.
    as_of : the run's date; training ends with it.
    verifier : the run's: the name of its texts beside those of plain decoding.

    Raises
    ------
    CtrError
        There are no features, nothing came after the date, or the features are of a later date (a leak).
    """
    settings = settings or CtrSettings()
    variants = run_variants(RunFolder(Path(run_dir)), verifier)
    num_trainings = len(variants) * len(settings.models) * settings.num_seeds
    with progress("train CTR models", num_trainings) as bar:

        def on_fit(row: CtrRow) -> None:
            bar.advance(1, f"{row.model}, {row.variant}: AUC {row.auc:.4f}")

        comparison = train_ctr(tables, variants, as_of, settings, on_fit)
    return TypeAdapter(CtrFigures).validate_python(comparison.to_manifest())


def run_variants(run: RunFolder, verifier: str) -> dict[str, FeatureSet | None]:
    """The variants of knowledge that a run can compare: none, plain (where it was decoded), and its own."""
    variants: dict[str, FeatureSet | None] = {"none": None}
    if run.plain.features_path("user").parent.is_dir():
        variants["plain"] = read_feature_set(run.plain.features_path("user").parent)
    variants[verifier] = read_feature_set(run.features_path("user").parent)
    return variants


def ctr_data(figures: CtrFigures) -> dict[str, Any]:
    """A comparison for `--json`: all but the single trainings."""
    return {name: value for name, value in asdict(figures).items() if name != "seeds"}


def print_ctr(figures: CtrFigures) -> None:
    """Show the report's table of a comparison on the terminal, or why there is none."""
    if figures.skipped:
        stdout.print(f"CTR models were not trained: {figures.skipped}", markup=False, soft_wrap=True)
        return
    shown = ctr_table(figures)
    table = text_table(shown.columns[:2], shown.columns[2:], shown.title, caption=shown.caption, caption_justify="left")
    for row in shown.rows:
        table.add_row(*map(Text, row))
    stdout.print(table)
