"""The drafters that nights have trained: `<workspace>/drafters/<run>/`, each with its trial beside what was trained."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.atomic import read_json, remove, remove_folder, write_json
from laserbatch.pipeline.storage.damage import unless_damaged

TRIAL_NAME, WEIGHTS_NAME = "trial.json", "model.safetensors"
NUM_KEPT = 3  # newest that are kept with their weights


@dataclass(frozen=True)
class DrafterTrial:
    """What came of a training: whether nights draft with it, and how much.

    `target` is the id of the model that it was trained for. `gain` : how much faster held-back texts of its night were
    written with it than as nights drafted before. `tokens_per_step`, `tokens_per_step_before` likewise. `failure` : why
    the training was given up.
    """

    run_id: str
    kind: str
    target: str
    is_kept: bool
    gain: float
    tokens_per_step: float
    tokens_per_step_before: float
    draft_width: int
    max_draft_tokens: int
    num_texts: int
    training_seconds: float
    failure: str | None = None

    @classmethod
    def failed(cls, run_id: str, kind: str, target: str, failure: str) -> "DrafterTrial":
        """That of a training that was given up."""
        return cls(run_id, kind, target, False, 0.0, 0.0, 0.0, 0, 0, 0, 0.0, failure)


@dataclass(frozen=True)
class DrafterUsed:
    """The drafter, trained on an earlier run, that a run drafts with too; chosen when it begins, as pools are."""

    run_id: str  # that it was trained on
    kind: str
    draft_width: int
    max_draft_tokens: int


_TRIAL = TypeAdapter(DrafterTrial)


@dataclass(frozen=True)
class DrafterStore:
    """The trained drafters below a folder, which need not be there yet."""

    root: Path

    def folder(self, run_id: str) -> Path:
        return self.root / run_id

    def is_there(self, run_id: str) -> bool:
        """Whether one can still be drafted with."""
        return (self.folder(run_id) / WEIGHTS_NAME).is_file()

    def trials(self) -> list[DrafterTrial]:
        """Of every training that has ended, in the order of their runs; damaged ones are passed over."""
        found = (unless_damaged(partial(_read, path)) for path in sorted(self.root.glob(f"*/{TRIAL_NAME}")))
        return [trial for trial in found if trial is not None]

    def kept(self, date: str, target: str, not_built_on: Collection[str] = ()) -> DrafterTrial | None:
        """The newest for a model that is kept and still there, of a date (YYYY-MM-DD) or an earlier one.

        Those that were trained on runs that are `not_built_on` are passed over.
        """
        fitting = [one for one in self.trials() if one.is_kept and one.target == target and self.is_there(one.run_id)]
        fitting = [one for one in fitting if one.run_id[:10] <= date and one.run_id not in not_built_on]
        return fitting[-1] if fitting else None

    def end(self, trial: DrafterTrial) -> None:
        """Write what came of a training; of one that is not kept only that stays, and of the oldest kept ones.

        Nothing stays of others that were begun: nobody goes on with them.
        """
        write_json(asdict(trial), self.folder(trial.run_id) / TRIAL_NAME)
        kept = [one.run_id for one in self.trials() if one.is_kept][-NUM_KEPT:]
        for path in self.root.glob("*/*"):
            if path.parent.name not in kept and path.name != TRIAL_NAME:
                remove(path)

    def runs(self) -> list[str]:
        """Whose texts one was trained on, or is being."""
        return sorted(path.name for path in self.root.glob("*"))

    def drop(self) -> None:
        """Remove all of them."""
        if self.root.is_dir():
            remove_folder(self.root)


def _read(path: Path) -> DrafterTrial:
    try:
        return _TRIAL.validate_python(read_json(path, f", or remove the folder {path.parent}"))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]["msg"]
        raise WorkspaceError(f"{path} is damaged: {fault}; remove the folder {path.parent}") from None
