"""`laserbatch ctr`: train, evaluate and apply CTR models on the features of a run, and compare features by AUC."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import typer

from laserbatch.ctr.settings import CtrOptions, CtrSettings, History, ModelName
from laserbatch.jobs.console import TO_FILE, TO_FOLDER, print_table, stdout, summary
from laserbatch.jobs.report.ctr_table import ctr_lead, ctr_table
from laserbatch.jobs.settings import CONFIG, WORKSPACE, load_settings
from laserbatch.jobs.stages.compare_ctr import compare_ctr
from laserbatch.jobs.stages.night import Night, open_run
from laserbatch.jobs.stages.train_ctr import FeatureName, evaluate_folder, predict_pairs, train_to_folder, trained_on
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.figures import CtrFigures
from laserbatch.pipeline.tables.streamed import open_tables

app = typer.Typer(no_args_is_help=True, add_completion=False)
TABLES = typer.Option(None, show_default="the run's tables", help="Folder or URI of the input tables.")
RUN = typer.Option(None, show_default="the published run", help="A run id.")
OF_MODEL = typer.Option(None, show_default="the run that it was trained on", help="Run whose features the model reads.")
TABLES_OF_MODEL = typer.Option(None, show_default="the model's tables", help="Folder or URI of the input tables.")
CONFIGURED = "the configured value, or without a configuration the run's"
HISTORY = typer.Option(
    None,
    show_default=CONFIGURED,
    help="Texts that training rows see. latest: those of the run; asof: the newest that are older than the row; split: "
    "those of the run, and only rows after its date are trained on.",
)
MODEL = typer.Argument(..., help="Model folder that `laserbatch ctr train` wrote.")
JSON = typer.Option(False, "--json", help="Print everything as JSON.")


@app.command()
def train(
    out: Path = typer.Argument(..., help="Folder of the model to write.", **TO_FOLDER),
    model: ModelName = typer.Option("dcnv2", help="Model to train."),
    features: FeatureName = typer.Option(
        "own",
        help="Features to train on. own: those of the run; plain: those of its plainly decoded texts; none: "
        "no features of texts.",
    ),
    seed: int = typer.Option(0, min=0, max=2**31 - 1, help="Seed of the training."),
    history: History | None = HISTORY,
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    run: str | None = RUN,
    tables: str | None = TABLES,
    as_json: bool = JSON,
) -> None:
    """Train one model up to the date of a run, on its features, into a folder; evaluate it on later interactions.

    The same command continues a training that was killed; gbdt, which takes seconds, starts again. The folder holds
    weights, encoders, settings, metrics and the run that it was trained on.

    Example: `laserbatch ctr train models/dcnv2 --model dcnv2 --workspace workspace`
    """
    night, options = _opened(config, workspace, run)
    settings = changed_settings(options, None, None, history)
    tables = tables or str(night.settings.tables.required_path)
    metrics = train_to_folder(night, model, features, seed, tables, settings, out)
    summary({"folder": str(out), "run_id": night.run.run_id, "model": model, **metrics}, as_json)


@app.command()
def evaluate(
    model: Path = MODEL,
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    run: str | None = OF_MODEL,
    tables: str | None = TABLES_OF_MODEL,
    as_json: bool = JSON,
) -> None:
    """Evaluate a trained model on interactions after its date: AUC, LogLoss, AUC within users, calibration.

    Example: `laserbatch ctr evaluate models/dcnv2 --workspace workspace`
    """
    of_model = trained_on(model)
    night = open_run(load_settings(config, {"workspace": workspace}), run or of_model["run_id"])
    metrics = evaluate_folder(model, night, tables or of_model["tables"])
    summary({"folder": str(model), "run_id": night.run.run_id, **metrics}, as_json)


@app.command()
def predict(
    model: Path = MODEL,
    pairs: Path = typer.Argument(
        ..., help="Parquet file with the columns user_id, item_id and, optionally, timestamp."
    ),
    out: Path = typer.Option(..., help="Parquet file to write: the columns of PAIRS, and the column score.", **TO_FILE),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    run: str | None = OF_MODEL,
    tables: str | None = TABLES_OF_MODEL,
    as_json: bool = JSON,
) -> None:
    """Score pairs of users and items from the interactions before each pair's timestamp, or from all without one.

    Example: `laserbatch ctr predict models/dcnv2 pairs.parquet --out scores.parquet --workspace workspace`
    """
    of_model = trained_on(model)
    night = open_run(load_settings(config, {"workspace": workspace}), run or of_model["run_id"])
    num_pairs = predict_pairs(model, night, tables or of_model["tables"], pairs, out)
    summary({"file": str(out), "run_id": night.run.run_id, "pairs": num_pairs}, as_json)


@app.command()
def compare(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    run: str | None = RUN,
    models: str | None = typer.Option(
        None, show_default=CONFIGURED, help="Models to train, of din, dcnv2 and gbdt, separated by commas."
    ),
    seeds: int | None = typer.Option(
        None, min=1, show_default=CONFIGURED, help="Number of trainings per model and variant."
    ),
    history: History | None = HISTORY,
    tables: str | None = TABLES,
    as_json: bool = typer.Option(False, "--json", help="Print everything, also each seed, as JSON."),
) -> None:
    """Train DIN, DCNv2 and LightGBM without and with a run's knowledge; evaluate them after its date.

    The command reads the tables again, so that today's interactions can judge yesterday's run, and writes nothing.
    `laserbatch experiment` compares frameworks and configurations.

    Example: `laserbatch ctr compare --workspace workspace --models din,dcnv2 --seeds 3`
    """
    night, options = _opened(config, workspace, run)
    settings = changed_settings(options, models, seeds, history)
    of_run = night.settings.tables
    later_tables = open_tables(tables or of_run.required_path, of_run.keep_duplicates)
    runs, verifier = night.workspace.runs_up_to(night.run), night.settings.decoding.verifier
    night.run.require_features(night.manifest.features, compare_bytes=True)
    night.run.plain.require_features(night.manifest.plain_features, compare_bytes=True)
    figures = compare_ctr(night.run.root, later_tables, night.date, verifier, settings, runs)
    if as_json:
        return summary({"run_id": night.run.run_id, **asdict(figures)}, as_json=True)
    summary({"run_id": night.run.run_id, "rows": figures.split}, as_json=False)
    print_ctr(figures)


def _opened(config: Path | None, workspace: Path | None, run: str | None) -> tuple[Night, CtrOptions]:
    """Open a run; return it with the CTR options of the given configuration or, without one, of the run."""
    settings = load_settings(config, {"workspace": workspace})
    night = open_run(settings, run)
    return night, night.settings.ctr if config is None else settings.ctr


def changed_settings(
    options: CtrOptions, models: str | None, seeds: int | None, history: History | None = None
) -> CtrSettings:
    """Apply the command line's changes to the options. Raises ConfigError if a model is unknown or named twice."""
    changes: dict[str, Any] = {} if seeds is None else {"num_seeds": seeds}
    if models is not None:
        names = changes["models"] = tuple(name.strip().lower() for name in models.split(","))
        if not set(names) <= set(get_args(ModelName)) or len(set(names)) < len(names):
            raise ConfigError(
                f"--models: {models!r} is not a list of models; expected some of din, dcnv2, gbdt, each at most once"
            )
    if history is not None:
        changes["history"] = history
    return CtrSettings.of(options).model_copy(update=changes)


def print_ctr(figures: CtrFigures) -> None:
    """Print the report's table of a comparison, or why there is none."""
    lead = f"CTR models were not trained: {figures.skipped}" if figures.skipped else ctr_lead(figures)
    stdout.print(lead, markup=False, soft_wrap=True)
    if not figures.skipped:
        print_table(ctr_table(figures))
