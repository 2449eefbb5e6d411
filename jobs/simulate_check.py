"""Was the prediction right? What a simulation of one night says of the next, beside what that night really did.

Knows no page and no terminal. A greedy night should agree but for chance; a relaxed one accepts more than a replay
can see, because it also takes drafts that the text would not have had. A night that drafted in a way that cannot be
simulated here is not compared: its figures would say nothing of the simulation.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from laserbatch.jobs.night import Night, open_run
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.simulate_world import (
    SideTexts,
    SimulationSize,
    calibrated_setting,
    divided_texts,
    simulator_of,
    trained_embeddings,
)
from laserbatch.pipeline.errors import ConfigError, WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.calibration.estimates import Bootstrap, Estimate, Tally
from laserbatch.retrieval_pools.index.store import PoolVersion
from laserbatch.retrieval_pools.simulating.simulate import MIN_WITH_PREVIOUS, Kind


@dataclass(frozen=True)
class CheckedPrediction:
    """Predicted and realised tokens per step, of one kind of entity of one side.

    Attributes
    ----------
    run_before, run_after : the night that was simulated, and the one that was predicted.
    kind : "changed": entities that had a text of the night before; "new": those that had none.
    num_texts : that the night after wrote; `num_replayed` : that were replayed to predict it.
    verifier : of the night after.
    replayed : what the simulation measured, `predicted` : the same extrapolated to the pool that the night had.
    """

    run_before: str
    run_after: str
    side: Side
    kind: Kind
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


@dataclass(frozen=True)
class Check:
    """What was compared, by kind of entity; where a night could not be, `refused` says why in a sentence."""

    predictions: list[CheckedPrediction]
    refused: str | None = None


@dataclass(frozen=True)
class _Nights:
    """A night, one that drafted from its pools, and those pools."""

    before: Night
    after: Night
    pools: PoolVersion


class _Refused(Exception):
    """Two nights cannot be compared; the message is a sentence that says why."""


def checked_nights(settings: Settings, night: Night, size: SimulationSize) -> Check:
    """Compare the simulated night with its next, or else the one before with it: the latest that can be compared."""
    refused = None
    for run_before, run_after in _candidates(night):
        try:
            nights = _comparable(settings, night, run_before, run_after)
        except _Refused as refusal:
            refused = refused or str(refusal)
        else:
            return Check(_checked_predictions(nights, size))
    return Check([], refused)


def _candidates(night: Night) -> Iterator[tuple[str, str]]:
    """Finished runs, and finished ones that drafted from their pools."""
    for run in reversed(night.workspace.runs()):
        if run.is_finished and _drafted_from(run) == night.run.run_id:
            yield night.run.run_id, run.run_id
    drafted_from = night.manifest.pools.version
    if drafted_from is not None and night.workspace.run(drafted_from).is_finished:
        yield drafted_from, night.run.run_id


def _drafted_from(run: RunFolder) -> str | None:
    try:
        return run.load_manifest().pools.version
    except WorkspaceError:  # of another format: which pools it drafted from is not to be known
        return None


def _comparable(settings: Settings, night: Night, run_before: str, run_after: str) -> _Nights:
    try:
        before, after = open_run(settings, run_before), open_run(settings, run_after)
    except (ConfigError, WorkspaceError) as error:
        raise _Refused(str(error)) from None
    here = version("laserbatch")
    for one in (before, after):
        if one.manifest.laserbatch_version != here:
            made_by = one.manifest.laserbatch_version
            raise _Refused(f"run {one.run.run_id} was made by laserbatch {made_by}, which may draft unlike this {here}")
    pools = next((known for known in night.pools.list() if known.version == run_before), None)
    if pools is None:
        raise _Refused(f"the pools {run_before}, which run {run_after} drafted from, are no longer there to look into")
    if pools.problem is not None:
        raise _Refused(f"run {run_after} drafted from pools that cannot be read: {pools.problem}")
    wanted = after.settings.pools.model_dump()
    for side, manifest in pools.pools.items():
        built = manifest.settings.model_dump()
        other = [name for name in wanted if built[name] != wanted[name]]
        if other:
            raise _Refused(
                f"run {run_after} drafted {side}s from a pool with other settings than its own: pools.{other[0]} is "
                f"{built[other[0]]!r} there and {wanted[other[0]]!r} in the run's configuration"
            )
    return _Nights(before, after, pools)


def _checked_predictions(nights: _Nights, size: SimulationSize) -> list[CheckedPrediction]:
    """Predict the night after from the texts of the night before, under the settings of the night after.

    Where the pool that it drafted from was not calibrated, neither is the simulated one.
    """
    before, after = nights.before, nights.after
    embeddings = trained_embeddings(before, after.settings)
    checked = []
    for side in SIDES:
        settings = _as_drafted(after, side)
        if settings.decoding.max_draft_tokens == 0:
            continue
        pool = nights.pools.pools.get(side)
        num_wanted = settings.pools.calibration_texts if pool is not None and pool.calibration is not None else 0
        texts = divided_texts(before, side, size, settings.seed, num_wanted)
        if texts is None:
            continue
        for kind in ("new", "changed"):
            realised = _realised(before.run, after.run, side, kind)
            if len(realised) < MIN_WITH_PREVIOUS:
                continue
            replayed = _replayed(before, settings, texts, embeddings, kind)
            if replayed is None:
                continue
            checked.append(
                CheckedPrediction(
                    before.run.run_id,
                    after.run.run_id,
                    side,
                    kind,
                    len(realised),
                    replayed.num_texts,
                    settings.decoding.verifier,
                    replayed.measured,
                    replayed.with_all_texts or replayed.measured,
                    Bootstrap(len(realised), settings.seed).tokens_per_step(realised),
                )
            )
    return checked


def _as_drafted(night: Night, side: Side) -> Settings:
    """A night's settings with the budget that it chose for a side in place of the choice."""
    recorded = night.manifest.budgets.get(side)
    if recorded is None:
        return night.settings
    budget = {name: recorded[name] for name in ("max_draft_tokens", "min_acceptance")}
    decoding = night.settings.decoding.model_copy(update=budget)
    return night.settings.model_copy(update={"decoding": decoding})


@dataclass(frozen=True)
class _Replayed:
    num_texts: int
    measured: Estimate
    with_all_texts: Estimate | None


def _replayed(before: Night, settings: Settings, texts: SideTexts, embeddings, kind: Kind) -> _Replayed | None:
    """The configured setting on the held-back texts; None where too few have a previous one."""
    if kind == "changed" and sum(text.previous_ids is not None for text in texts.held_back) < MIN_WITH_PREVIOUS:
        return None
    setting = calibrated_setting(before, settings, texts.side)
    with tempfile.TemporaryDirectory() as folder:
        simulator = simulator_of(before, settings, texts, embeddings, Path(folder), configured_only=True)
        tally = simulator.replay(setting, kind)
        bootstrap = Bootstrap(len(tally), settings.seed)
        whole = simulator.full_pool_tokens_per_step(setting, texts.num_texts, bootstrap, kind)
        return _Replayed(len(tally), bootstrap.tokens_per_step(tally), whole)


def _realised(before: RunFolder, after: RunFolder, side: Side, kind: Kind) -> Tally:
    """What the night after counted for each text that it wrote itself."""
    known = set(before.read_knowledge(side)["entity_id"].to_pylist())
    table = after.read_knowledge(side)
    columns = {name: table[name].to_pylist() for name in ("entity_id", "run_id")}
    chosen = np.array(
        [
            run_id == after.run_id and (entity_id in known) == (kind == "changed")
            for entity_id, run_id in zip(columns["entity_id"], columns["run_id"], strict=True)
        ],
        bool,
    )
    counts = [table[name].to_numpy().astype(float) for name in ("num_steps", "num_drafted", "num_accepted")]
    return Tally(*counts).where(chosen)
