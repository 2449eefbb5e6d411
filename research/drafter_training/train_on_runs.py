"""Trains drafters on the texts of runs."""

from functools import partial
from pathlib import Path

import torch

from laserbatch.jobs.console import progress, say
from laserbatch.jobs.formatting import counted
from laserbatch.jobs.stages.night import Night, open_run
from laserbatch.jobs.stages.pool_texts import planned_rows, read_run_texts
from laserbatch.pipeline.decoding.model.folder import model_identity
from laserbatch.pipeline.distributed.settings import usable_cores
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.research.drafter_training.texts import TrainingText
from laserbatch.research.drafter_training.train import TrainingOptions, num_steps, train_drafter
from laserbatch.research.drafters.options import Kind
from laserbatch.research.drafters.trained import CARD_NAME, DrafterCard
from laserbatch.research.learning import require_own_folder


def train_on_runs(night: Night, kind: Kind, folder: Path, num_texts: int, epochs: int) -> DrafterCard:
    """Train a drafter for the model on the newest texts of a run and of earlier runs; see `train_drafter`.

    Raises ConfigError if there are too few texts, or, before any is read, other files in the folder.
    """
    require_own_folder(folder, "drafter", CARD_NAME)
    torch.set_num_threads(usable_cores())  # fixed, since the bits of sums depend on the number of threads
    options = TrainingOptions(epochs=epochs, seed=night.settings.seed)
    texts = texts_of_runs(night, num_texts)
    say(f"training a drafter ({kind}) on {counted(len(texts), 'text')} of {night.run.run_id} and before")
    with progress(f"train {kind}", num_steps(len(texts), options)) as bar:

        def on_progress(step: int, loss: float) -> None:
            bar.reach(step, f"loss {loss:.3f}")

        return train_drafter(kind, night.settings.model_dir, texts, folder, options, on_progress)


def texts_of_runs(night: Night, num_texts: int) -> list[TrainingText]:
    """Prompts and the texts that the model wrote for them, half of each side, with the newest text of each entity."""
    target, texts_of_sides = model_identity(night.settings.model_dir), []
    not_built_on = night.workspace.publication.not_built_on()
    for side in SIDES:
        source, texts = night, {}
        max_texts = num_texts // len(SIDES)
        while source is not None and len(texts) < max_texts:
            model = source.manifest.generation.model
            if model is not None and model.id == target and source.run.run_id not in not_built_on:
                for entity_id, text in _texts_of_run(source, side, max_texts).items():
                    texts.setdefault(entity_id, text)
            earlier = source.manifest.origin.previous_run_id
            exists = earlier is not None and night.workspace.run(earlier).manifest_path.exists()
            source = unless_damaged(partial(open_run, night.settings, earlier)) if exists else None
        texts_of_sides += list(texts.values())[:max_texts]
    return texts_of_sides


def _texts_of_run(night: Night, side: Side, max_texts: int) -> dict[str | int, TrainingText]:
    rows = planned_rows(night, side, max_texts)
    with ScratchFolder("texts") as scratch:
        run_texts = read_run_texts(night, side, Path(scratch)) if rows else None
        written = {} if run_texts is None else run_texts.of_entities([row.entity_id for row in rows])
        return {
            row.entity_id: TrainingText(row.prompt.token_ids, written[row.entity_id].copy())
            for row in rows
            if len(written.get(row.entity_id, ()))
        }
