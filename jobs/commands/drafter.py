"""`laserbatch drafter ...`: train what drafts for the model on its own texts, and see what nights have trained."""

from pathlib import Path
from typing import Any

import typer

from laserbatch.jobs.console import print_table, say, summary
from laserbatch.jobs.formatting import count, decimal
from laserbatch.jobs.report.blocks import Table
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, load_settings, open_workspace
from laserbatch.pipeline.drafter_training.settings import DrafterTrainingSettings, Kind
from laserbatch.pipeline.errors import ConfigError

USUAL = DrafterTrainingSettings()

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def train(
    kind: Kind = typer.Argument(
        ...,
        help="medusa, eagle, hass: a head on the model's hidden states; medusa2: the same and an adapter of the model; "
        "small: a model.",
    ),
    out: Path = typer.Option(..., help="Folder to write; a folder of the same training that was killed is continued."),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    run: str | None = typer.Option(
        None, "--run", show_default="the published run", help="Run whose texts it learns from."
    ),
    num_texts: int = typer.Option(
        USUAL.num_texts,
        "--texts",
        min=40,
        help="Number of the newest texts, of that run and earlier ones, to learn from.",
    ),
    epochs: int = typer.Option(USUAL.epochs, min=1, help="Passes over these texts."),
    as_json: bool = JSON,
) -> None:
    """Train a drafter for the model on texts that it wrote, and report its accuracy on held-back texts.

    The same command continues a training that was killed. Nights draft with a head that `decoding.draft_head` names,
    or with a small model that `decoding.draft_models` names; with `drafter_training.kind` nights train and try one.

    Example: `laserbatch drafter train eagle --out drafters/eagle --config laserbatch.yaml`
    """
    from laserbatch.jobs.stages.night import open_run
    from laserbatch.jobs.stages.train_drafter import train_on_runs
    from laserbatch.pipeline.drafter_training.medusa import ADAPTER_NAME

    settings = load_settings(config, {"workspace": workspace})
    if settings.decoding.adapter is not None:
        raise ConfigError(f"a drafter learns from a model alone: merge the adapter {settings.decoding.adapter} into it")
    card = train_on_runs(open_run(settings, run), kind, out, num_texts, epochs)
    use = f"draft_models: [{out}]" if kind == "small" else f"draft_head: {out}"
    if kind == "medusa2":
        use = f"adapter: {out / ADAPTER_NAME}, {use}"
    result: dict[str, Any] = {
        "folder": str(out),
        "num_texts": card.num_texts,
        "num_held_back": card.num_held_back,
        "training_seconds": card.training_seconds,
        "right_by_depth": [round(share, 3) for share in card.acceptance],
        "tokens_per_step_alone": card.tokens_per_step,
    }
    summary(result, as_json)
    if not as_json:
        say(f"to draft with it: `decoding: {{{use}}}`; a pool's drafts stand beside its own")


@app.command(name="list")
def list_trials(config: Path | None = CONFIG, workspace: Path | None = WORKSPACE, as_json: bool = JSON) -> None:
    """List the drafters that nights have trained, how much faster nights are with them, and which are kept.

    Example: `laserbatch drafter list --config laserbatch.yaml`
    """
    trials = open_workspace(config, workspace).drafters.trials()
    if as_json:
        summary({"trials": [vars(trial) for trial in trials]}, as_json=True)
    elif not trials:
        say("no night has trained a drafter yet; `drafter_training: {kind: eagle}` has nights do it")
    else:
        rows = [
            {
                "run": trial.run_id,
                "kind": trial.kind,
                "kept": "given up" if trial.failure else "yes" if trial.is_kept else "no",
                "tokens/s over before": decimal(trial.gain or None, 2),
                "tokens/step": decimal(trial.tokens_per_step or None),
                "before": decimal(trial.tokens_per_step_before or None),
                "texts": count(trial.num_texts or None),
                "training s": decimal(trial.training_seconds, 0),
            }
            for trial in trials
        ]
        print_table(Table("Drafters that nights trained", rows, ("run", "kind", "kept")))
        for trial in trials:
            if trial.failure:
                say(f"the training on {trial.run_id} was given up: {trial.failure}")
