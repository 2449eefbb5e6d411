"""Was the prediction right? What a simulation of one night says of the next, beside what that night really did.

Knows no page and no terminal. A greedy night should agree but for chance; a relaxed one accepts more than a replay
can see, because it also takes drafts that the text would not have had.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jobs.night import Night, open_run
from jobs.settings import Settings
from jobs.simulate_world import (
    SideTexts,
    SimulationSize,
    configured_setting,
    divided_texts,
    simulator_of,
    trained_embeddings,
)
from pipeline.knowledge.records import SIDES, Side
from pipeline.storage.run_folder import RunFolder
from retrieval_pools.estimates import Bootstrap, Estimate, Tally
from retrieval_pools.studies import MIN_WITH_PREVIOUS


@dataclass(frozen=True)
class CheckedPrediction:
    """Predicted and realised tokens per step, of one kind of entity of one side.

    Attributes
    ----------
    run_before, run_after : the night that was simulated, and the one that was predicted.
    with_previous : entities that had a text of the night before, or those that had none.
    num_texts : that the night after wrote; `num_replayed` : that were replayed to predict it.
    verifier : of the night after.
    replayed : what the simulation measured, `predicted` : the same extrapolated to the pool that the night had.
    """

    run_before: str
    run_after: str
    side: Side
    with_previous: bool
    num_texts: int
    num_replayed: int
    verifier: str
    replayed: Estimate
    predicted: Estimate
    realised: Estimate

    @property
    def error(self) -> float:
        """Predicted over realised, less 1: below 0 where the night did better than was said."""
        return self.predicted.value / self.realised.value - 1


def find_nights(settings: Settings, night: Night) -> tuple[Night, Night] | None:
    """A night and one that drafted from its pools: the simulated one and its next, or else the one before and it."""
    for run in reversed(night.workspace.runs()):
        if run.is_finished and run.load_manifest()["pools"]["version"] == night.run.run_id:
            return night, open_run(settings, run.run_id)
    version = night.manifest["pools"]["version"]
    if version is None or not night.workspace.run(version).is_finished:
        return None
    return open_run(settings, version), night


def checked_predictions(before: Night, after: Night, size: SimulationSize) -> list[CheckedPrediction]:
    """Predict the night after from the texts of the night before, under the settings of the night after."""
    settings = after.settings
    embeddings = trained_embeddings(before, settings)
    checked = []
    for side in SIDES:
        texts = divided_texts(before, side, size, settings.seed, settings.pools.calibration_texts)
        if texts is None:
            continue
        for with_previous in (False, True):
            realised = _realised(before.run, after.run, side, with_previous)
            if len(realised) < MIN_WITH_PREVIOUS:
                continue
            replayed = _replayed(before, settings, texts, embeddings, with_previous)
            if replayed is None:
                continue
            checked.append(
                CheckedPrediction(
                    before.run.run_id,
                    after.run.run_id,
                    side,
                    with_previous,
                    len(realised),
                    replayed.num_texts,
                    settings.decoding.verifier,
                    replayed.measured,
                    replayed.with_all_texts or replayed.measured,
                    Bootstrap(len(realised), settings.seed).tokens_per_step(realised),
                )
            )
    return checked


@dataclass(frozen=True)
class _Replayed:
    num_texts: int
    measured: Estimate
    with_all_texts: Estimate | None


def _replayed(before: Night, settings: Settings, texts: SideTexts, embeddings, with_previous: bool) -> _Replayed | None:
    """The configured setting on the held-back texts; None where too few have a previous one."""
    if with_previous and sum(text.previous_ids is not None for text in texts.held_back) < MIN_WITH_PREVIOUS:
        return None
    setting = configured_setting(settings)
    with tempfile.TemporaryDirectory() as folder:
        simulator = simulator_of(before, settings, texts, embeddings, Path(folder), configured_only=True)
        tally = simulator.replay(setting, with_previous)
        bootstrap = Bootstrap(len(tally), settings.seed)
        whole = simulator.full_pool_tokens_per_step(setting, texts.num_texts, bootstrap, with_previous)
        return _Replayed(len(tally), bootstrap.tokens_per_step(tally), whole)


def _realised(before: RunFolder, after: RunFolder, side: Side, with_previous: bool) -> Tally:
    """What the night after counted for each text that it wrote itself."""
    known = set(before.read_knowledge(side)["entity_id"].to_pylist())
    table = after.read_knowledge(side)
    columns = {name: table[name].to_pylist() for name in ("entity_id", "run_id")}
    chosen = np.array(
        [
            run_id == after.run_id and (entity_id in known) == with_previous
            for entity_id, run_id in zip(columns["entity_id"], columns["run_id"], strict=True)
        ],
        bool,
    )
    counts = [table[name].to_numpy().astype(float) for name in ("num_steps", "num_drafted", "num_accepted")]
    return Tally(*counts).where(chosen)
