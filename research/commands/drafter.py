"""`laserbatch drafter train`: train a drafter for the model on texts that the model wrote."""

from pathlib import Path
from typing import Any

import typer

from laserbatch.jobs.console import TO_FOLDER, say, summary
from laserbatch.jobs.settings import CONFIG, JSON, WORKSPACE, load_settings
from laserbatch.pipeline.decoding.plugins import TEXT_SOURCES
from laserbatch.pipeline.errors import ConfigError
from laserbatch.research.drafters.options import EPOCHS, NUM_TEXTS, Kind

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def train(
    kind: Kind = typer.Argument(
        ...,
        help="medusa, eagle, hass: a head on the model's hidden states; medusa2: such a head and an adapter of the "
        "model; small: a small model.",
    ),
    out: Path = typer.Option(
        ..., help="Folder to write. If the same training was killed, the command goes on with it.", **TO_FOLDER
    ),
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    run: str | None = typer.Option(
        None, "--run", show_default="the published run", help="Run whose texts the drafter learns from."
    ),
    num_texts: int = typer.Option(
        NUM_TEXTS, "--texts", min=40, help="Number of the newest texts, of that run and earlier ones, to learn from."
    ),
    epochs: int = typer.Option(EPOCHS, min=1, help="Passes over these texts."),
    as_json: bool = JSON,
) -> None:
    """Train a drafter for the model on texts that it wrote, and report its accuracy on held-back texts.

    The same command continues a training that was killed. Nights draft with it once `trained` is among
    `decoding.drafters` and `decoding.drafter_options.trained` names the folder as its head, or among its models.

    Example: `laserbatch drafter train eagle --out drafters/eagle --config laserbatch.yaml`
    """
    from laserbatch.jobs.stages.night import open_run
    from laserbatch.research.drafter_training.medusa import ADAPTER_NAME
    from laserbatch.research.drafter_training.train_on_runs import train_on_runs

    settings = load_settings(config, {"workspace": workspace})
    if settings.decoding.adapter is not None:
        raise ConfigError(
            f"decoding.adapter is {settings.decoding.adapter}, but a drafter learns from a model without an adapter: "
            "set decoding.model to a folder with the merged model"
        )
    card = train_on_runs(open_run(settings, run), kind, out, num_texts, epochs)
    place = out.resolve()  # a configuration's paths are relative to its own folder
    named = f"models: [{place}]" if kind == "small" else f"head: {place}"
    drafters = ", ".join((*TEXT_SOURCES, "trained"))
    use = f"drafters: [{drafters}], drafter_options: {{trained: {{{named}}}}}"
    if kind == "medusa2":
        use = f"adapter: {place / ADAPTER_NAME}, {use}"
    result: dict[str, Any] = {
        "folder": str(out), "num_texts": card.num_texts, "num_held_back": card.num_held_back,
        "training_seconds": card.training_seconds, "right_by_depth": [round(share, 3) for share in card.acceptance],
        "tokens_per_step_alone": card.tokens_per_step,
    }  # fmt: skip
    summary(result, as_json)
    if not as_json:
        say(f"to draft with it, set `decoding: {{{use}}}`; the pool's drafts are then used too")
