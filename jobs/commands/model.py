"""`laserbatch model`: make model folders from other files."""

from pathlib import Path

import typer

from laserbatch.jobs.console import TO_FOLDER, say, summary
from laserbatch.jobs.settings import JSON
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.atomic import atomic_folder

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _model() -> None:
    """Make model folders from other files."""


@app.command(name="import")
def import_(
    file: Path = typer.Argument(..., help="GGUF file of a language model."),
    out: Path = typer.Argument(..., help="Folder to write the model to.", **TO_FOLDER),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT if it is there."),
    as_json: bool = JSON,
) -> None:
    """Write the model of a GGUF file as a folder that `decoding.model` takes, with its tokenizer and chat template.

    Quantised weights are unpacked to bfloat16. A model that cannot be read, or that the engine cannot run, is refused,
    and OUT stays as it was.

    Example: `laserbatch model import smollm2.Q4_1.gguf smollm2`
    """
    from laserbatch.pipeline.decoding.model.gguf_file import import_gguf
    from laserbatch.pipeline.decoding.model.load import load_model

    if file.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{out} would replace {file}, which is being imported; give another folder")
    say(f"reading {file}")
    with atomic_folder(out, overwrite=overwrite) as folder:
        facts = import_gguf(file, folder)
        say("trying the model with the engine")
        loaded = load_model(folder, device="cpu")
    outcome = {
        "model": str(out),
        "architecture": type(loaded.model).__name__,
        "parameters": loaded.num_parameters,
        "stored_as": str(facts.dtype).removeprefix("torch."),
        "chat_template": facts.chat_template is not None,
    }
    summary(outcome | {"next": f"laserbatch doctor --model {out}"}, as_json)
