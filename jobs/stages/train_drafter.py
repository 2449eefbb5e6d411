"""Drafters trained on what runs wrote: into a folder of one's own, or by nights for the nights after them.

A night trains one after its publication, every so many nights, and writes texts that it held back with it and without,
in turns, on this machine: it is kept where that is faster by more than noise. What a training meets ends no night. Each
attempt is an event of its run, so that a training that dies MAX_ATTEMPTS times at the same step is given up.
"""

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from laserbatch.jobs.console import progress, say
from laserbatch.jobs.events import emit, read_events
from laserbatch.jobs.failures import line_of
from laserbatch.jobs.formatting import counted
from laserbatch.jobs.stages.budgets import budget_of
from laserbatch.jobs.stages.night import Night, open_run
from laserbatch.jobs.stages.pool_texts import num_written, planned_rows, read_run_texts
from laserbatch.jobs.stages.publishing import ends_no_night
from laserbatch.pipeline.decoding.model.folder import model_identity
from laserbatch.pipeline.decoding.sequence import GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.distributed.settings import usable_cores
from laserbatch.pipeline.drafter_training.settings import Kind
from laserbatch.pipeline.errors import LaserbatchError
from laserbatch.pipeline.planning.plan import RenderedRow
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.drafters import DrafterTrial, DrafterUsed
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.pipeline.storage.stats import DecodingStats

if TYPE_CHECKING:
    from laserbatch.pipeline.decoding.drafters.trained import DrafterCard
    from laserbatch.pipeline.drafter_training.texts import TrainingText
    from laserbatch.pipeline.engines.own import OwnEngine

logger = logging.getLogger("laserbatch")

MIN_GAIN = 1.03  # in tokens a second: less is noise, and a drafter has its price in memory
SHAPES = ((1, 8), (3, 16), (3, 32))  # tokens at a depth, largest tree
NUM_TRIED = 24  # texts a side, at most a quarter of those written; with fewer than MIN_TRIED of both none is trained
MIN_TRIED = 10
NUM_REPETITIONS = 3
MAX_ATTEMPTS = 3
BEGUN, STOPPED = "drafter_training", "drafter_training_stopped"  # events; what was stopped is no attempt that died

Rows = Mapping[Side, Sequence[RenderedRow]]
Shape = tuple[int, int]


def train_on_runs(
    night: Night, kind: Kind, folder: Path, num_texts: int, epochs: int, but: Rows | None = None
) -> "DrafterCard":
    """Train a drafter for the model on the newest texts of a run and of those before it; see `train_drafter`.

    `but` : rows whose texts it must not see. Raises ConfigError: too few texts.
    """
    import torch

    from laserbatch.pipeline.drafter_training.train import TrainingOptions, num_steps, train_drafter

    torch.set_num_threads(usable_cores())  # whatever was done before: sums come out by it
    options = TrainingOptions(epochs=epochs, seed=night.settings.seed)
    texts = texts_of_runs(night, num_texts, but or {})
    say(f"training a drafter ({kind}) on {counted(len(texts), 'text')} of {night.run.run_id} and before")
    with progress(f"train {kind}", num_steps(len(texts), options)) as bar:

        def tell(step: int, loss: float) -> None:
            bar.reach(step, f"loss {loss:.3f}")

        return train_drafter(kind, night.settings.model_dir, texts, folder, options, tell)


def texts_of_runs(night: Night, num_texts: int, but: Rows) -> "list[TrainingText]":
    """Prompts and what the model wrote to them, half of each side, of each entity the newest, without some."""
    target, found = model_identity(night.settings.model_dir), []
    not_built_on = night.workspace.not_built_on()
    for side in SIDES:
        one, texts = night, dict.fromkeys(row.entity_id for row in but.get(side, ()))
        num_wanted = num_texts // len(SIDES) + len(texts)
        while one is not None and len(texts) < num_wanted:
            is_of_target = one.manifest.model is not None and one.manifest.model.id == target
            if is_of_target and one.run.run_id not in not_built_on:
                for entity_id, text in _texts_of_run(one, side, num_wanted).items():
                    texts.setdefault(entity_id, text)
            earlier = one.manifest.previous_run_id
            is_there = earlier is not None and night.workspace.run(earlier).manifest_path.exists()
            one = unless_damaged(partial(open_run, night.settings, earlier)) if is_there else None
        found += [text for text in texts.values() if text is not None][: num_texts // len(SIDES)]
    return found


def _texts_of_run(night: Night, side: Side, num_wanted: int) -> "dict[str | int, TrainingText]":
    from laserbatch.pipeline.drafter_training.texts import TrainingText

    rows = planned_rows(night, side, num_wanted)
    with ScratchFolder("texts") as scratch:
        run_texts = read_run_texts(night.run, side, Path(scratch)) if rows else None
        written = {} if run_texts is None else run_texts.of_entities([row.entity_id for row in rows])
        return {
            row.entity_id: TrainingText(row.prompt.token_ids, written[row.entity_id].copy())
            for row in rows
            if len(written.get(row.entity_id, ()))
        }


def train_if_due(night: Night, was_finished: bool) -> None:
    """Train the nightly drafter on a run that was just finished where one is due, try it, and keep it or not.

    Killed, the night's command goes on with it: with `was_finished` only what was begun is. The run is published
    before, so what the training meets (too few texts, a model that no head fits, no memory) is logged and makes no
    night fail. The same command tries again, or the next night does, up to MAX_ATTEMPTS; the next training is then
    `every_nights` nights later.
    """
    options, store = night.settings.drafter_training, night.workspace.drafters
    if options.kind is None:
        return
    with ends_no_night("no drafter is trained"):
        folder = store.folder(night.run.run_id)
        if not (folder.is_dir() if was_finished else _is_due(night)):
            return
        if any(trial.run_id == night.run.run_id for trial in store.trials()):
            return
        rows = {side: planned_rows(night, side, min(NUM_TRIED, num_written(night, side) // 4)) for side in SIDES}
        if sum(map(len, rows.values())) < MIN_TRIED:
            say(f"no drafter is trained: the night wrote too few texts, at least {4 * MIN_TRIED} are needed")
        else:
            _attempt(night, folder, rows)


def _attempt(night: Night, folder: Path, rows: Rows) -> None:
    """Train and try a drafter, unless too many attempts at it have died."""
    from laserbatch.pipeline.learning import CHECKPOINT_NAME, read_facts

    options, store = night.settings.drafter_training, night.workspace.drafters
    step = read_facts(folder / CHECKPOINT_NAME).get("step", 0)
    attempt = {"kind": options.kind, "target": model_identity(night.settings.model_dir), "step": step}
    num_died, died_of = _num_died(night, attempt), "the process was ended, as the kernel does where memory runs short"
    if num_died < MAX_ATTEMPTS:
        folder.mkdir(parents=True, exist_ok=True)
        emit(BEGUN, **attempt)
        try:
            trial = _trial(night, folder, rows)
        except (KeyboardInterrupt, SystemExit, LaserbatchError) as error:
            emit(STOPPED, **attempt)
            if isinstance(error, LaserbatchError):
                with suppress(OSError):  # there is nothing to go on with, unless something is in it
                    folder.rmdir()
            raise
        except Exception as error:  # no memory, say, or our own fault: the next attempt may do better
            logger.exception("attempt %d of %d to train a drafter failed", num_died + 1, MAX_ATTEMPTS)
            num_died, died_of = num_died + 1, line_of(error, names_values=False)
            if num_died < MAX_ATTEMPTS:
                say("no drafter is trained; the same command, or the next night, tries again")
                return
        else:
            store.end(trial)
            kept = "kept: the next nights draft with it" if trial.is_kept else "not kept"
            say(
                f"the drafter ({trial.kind}) writes {trial.gain:.2f} times the tokens a second of before, and is {kept}"
            )
            emit("drafter_tried", **asdict(trial))
            return
    trial = DrafterTrial.failed(night.run.run_id, options.kind, attempt["target"], died_of)
    store.end(trial)
    say(
        f"the training of a drafter ({options.kind}) is given up after {num_died} attempts ({died_of}); the next is "
        f"{counted(options.every_nights, 'night')} later. Where memory runs short, lower drafter_training.num_texts, "
        "choose another drafter_training.kind, or train on a larger machine with `laserbatch drafter train`; "
        "drafter_training.kind: null trains none"
    )
    emit("drafter_given_up", **asdict(trial))


def _num_died(night: Night, attempt: Mapping[str, object]) -> int:
    """How many attempts at the same training died since one ended, without those of this run that came further."""
    last = max((one.run_id[:10] for one in night.workspace.drafters.trials()), default="")
    since = [run for run in night.workspace.finished_runs() if last < run.date < str(night.date)]
    num_died = 0
    for run in (*since, night.run):
        known = attempt if run.run_id == night.run.run_id else {name: attempt[name] for name in ("kind", "target")}
        for event in read_events(run.events_path):
            if event["event"] in (BEGUN, STOPPED) and known.items() <= event.items():
                num_died += 1 if event["event"] == BEGUN else -1
    return num_died


def _trial(night: Night, folder: Path, rows: Rows) -> DrafterTrial:
    """What comes of a drafter that is trained into a folder and tried on rows whose texts it must not see."""
    options = night.settings.drafter_training
    card = train_on_runs(night, options.kind, folder, options.num_texts, options.epochs, but=rows)
    say("writing texts that were held back with the drafter and without it")
    paces = _tried(night, folder, rows)
    before, shape = paces.pop(None), max(paces, key=lambda one: paces[one].tokens_per_s)
    gain = paces[shape].tokens_per_s / before.tokens_per_s
    return DrafterTrial(
        run_id=night.run.run_id,
        kind=options.kind,
        target=card.target,
        is_kept=gain >= MIN_GAIN,
        gain=round(gain, 3),
        tokens_per_step=round(paces[shape].tokens_per_step, 3),
        tokens_per_step_before=round(before.tokens_per_step, 3),
        draft_width=shape[0],
        max_draft_tokens=shape[1],
        num_texts=card.num_texts,
        training_seconds=card.training_seconds,
    )


def _is_due(night: Night) -> bool:
    """Whether none was trained for the model, or so many nights are finished since as `every_nights` says."""
    target, not_built_on = model_identity(night.settings.model_dir), night.workspace.not_built_on()
    trials = [one for one in night.workspace.drafters.trials() if one.run_id not in not_built_on]
    dates = [one.run_id[:10] for one in trials if one.run_id[:10] <= str(night.date) and one.target == target]
    if not dates:
        return True
    later = {run.date for run in night.workspace.finished_runs() if dates[-1] < run.date <= str(night.date)}
    return len(later) >= night.settings.drafter_training.every_nights


def _tried(night: Night, folder: Path, rows: Rows) -> dict[Shape | None, DecodingStats]:
    """How rows are written as the night drafted (None), and with a drafter's folder in each of SHAPES."""
    from laserbatch.pipeline.engines.own import OwnEngine

    budgets = {side: budget_of(figures) for side, figures in night.manifest.budgets.items()}
    ways: dict[Shape | None, tuple[DecodingSettings, Mapping[Side, Budget]]] = {None: (night.decoding, budgets)}
    for shape in SHAPES:
        used = DrafterUsed(night.run.run_id, night.settings.drafter_training.kind, *shape)
        decoding = night.decoding_with(used)
        ways[shape] = decoding, dict.fromkeys(SIDES, Budget.of(decoding))
    engine = OwnEngine(
        night.settings.model_dir, night.decoding, "auto", usable_cores(), 1, 1, night.pool_folders(), folder
    )
    seconds = {shape: [] for shape in ways}
    results = {}
    for repetition in range(-1, NUM_REPETITIONS):  # the first has code compiled
        for shape, (decoding, of_side) in ways.items():
            engine.draft_with(decoding)
            start_s = time.perf_counter()
            results[shape] = [one for side in SIDES for one in _written(engine, side, rows[side], decoding, of_side)]
            if repetition >= 0:
                seconds[shape].append(time.perf_counter() - start_s)
    return {shape: DecodingStats.of(one, statistics.median(seconds[shape])) for shape, one in results.items()}


def _written(
    engine: "OwnEngine",
    side: Side,
    rows: Sequence[RenderedRow],
    decoding: DecodingSettings,
    budgets: Mapping[Side, Budget],
) -> list[GenerationResult]:
    requests = (
        GenerationRequest(str(number), row.prompt.token_ids, row.previous_ids, row.group, decoding.max_new_tokens)
        for number, row in enumerate(rows)
    )
    results = engine.generate(side, requests, decoding, budgets.get(side))
    return [one for one in results if isinstance(one, GenerationResult)]
