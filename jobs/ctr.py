"""`laserbatch ctr train`: what the features of a run are worth to CTR models."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from laserbatch.ctr.compare import CtrRow, train_ctr
from laserbatch.ctr.dataset import EntityTables
from laserbatch.ctr.feature_set import FeatureSet, read_feature_set
from laserbatch.ctr.settings import CtrSettings
from laserbatch.jobs.console import progress as progress_bar
from laserbatch.jobs.console import say, summary
from laserbatch.jobs.settings import CONFIG, WORKSPACE, load_settings
from laserbatch.pipeline.errors import ConfigError
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
    section = ctr_table(night.run.root, later_tables, night.date, night.settings.decoding.verifier, settings)
    if as_json:
        summary({"run_id": night.run.run_id, **section}, as_json=True)
        return
    rows = ctr_summary(section, as_json=False)
    verdicts = {model: _shown_verdict(verdict) for model, verdict in section["equivalence"].items()}
    against = {f"{night.settings.decoding.verifier} against plain": verdicts} if verdicts else {}
    summary({"run_id": night.run.run_id, "rows": section["split"], "test": rows} | against, as_json=False)


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


def ctr_table(
    run_dir: Path,
    tables: EntityTables,
    as_of: datetime.date,
    verifier: str,
    settings: CtrSettings | None = None,
    progress: Callable[[str], None] = say,
) -> dict[str, Any]:
    """Compare CTR models without knowledge, with plainly decoded knowledge where the run has it, and with the run's.

    Parameters
    ----------
    run_dir : folder of a run with `features/`, perhaps with `plain/features/`.
    tables : the input tables, with what came after the run's date.
    as_of : the run's date; training ends with it.
    verifier : the run's: the name of its texts beside those of plain decoding.
    progress : is told the verdict, a line.

    Returns
    -------
    dict
        The manifest's `ctr` section.

    Raises
    ------
    CtrError
        There are no features, nothing came after the date, or the features are of a later date (a leak).
    """
    settings = settings or CtrSettings()
    variants = run_variants(RunFolder(Path(run_dir)), verifier)
    num_trainings = len(variants) * len(settings.models) * settings.num_seeds
    with progress_bar("train CTR models", num_trainings) as bar:

        def on_fit(row: CtrRow) -> None:
            bar.advance(1, f"{row.model}, {row.variant}: AUC {row.auc:.4f}")

        comparison = train_ctr(tables, variants, as_of, settings, on_fit)
    section = comparison.to_manifest()
    if "all" in section["equivalence"]:
        progress(f"{verifier} against plain texts: {_shown_verdict(section['equivalence']['all'])}")
    return section


def run_variants(run: RunFolder, verifier: str) -> dict[str, FeatureSet | None]:
    """The variants of knowledge that a run can compare: none, plain (where it was decoded), and its own."""
    variants: dict[str, FeatureSet | None] = {"none": None}
    if run.plain.features_path("user").parent.is_dir():
        variants["plain"] = read_feature_set(run.plain.features_path("user").parent)
    variants[verifier] = read_feature_set(run.features_path("user").parent)
    return variants


def ctr_summary(section: dict[str, Any], as_json: bool) -> dict[str, Any] | str:
    """A comparison in a summary: all but the single trainings, or a line a model and variant; or why there is none."""
    if as_json:
        return {name: value for name, value in section.items() if name != "seeds"}
    return {f"{row['model']}, {row['variant']}": _shown(row) for row in section["rows"]} or section["skipped"]


def _shown(row: dict[str, Any]) -> str:
    cells = []
    for title, name in (("AUC", "auc"), ("LogLoss", "logloss"), ("AUC of cold users", "auc_cold")):
        if row[name] is not None:
            spread = f" ±{row[f'{name}_std']:.4f}" if row[f"{name}_std"] is not None else ""
            cells.append(f"{title} {row[name]:.4f}{spread}")
    return "  ".join(cells)


def _shown_verdict(verdict: dict[str, Any]) -> str:
    if verdict["low"] is None:
        return f"{verdict['verdict']}: AUC {verdict['mean_difference']:+.4f}, one pair only"
    return (
        f"{verdict['verdict']}: AUC {verdict['mean_difference']:+.4f} "
        f"({verdict['confidence']:.0%} interval {verdict['low']:+.4f} to {verdict['high']:+.4f}, "
        f"margin {verdict['margin']}, {verdict['num_pairs']} pairs)"
    )
