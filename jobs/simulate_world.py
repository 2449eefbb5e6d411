"""From a finished run to what a simulation replays: texts held back, texts for the pools, groups of both.

Nothing that is held back shapes what it is drafted from: pools, and leaves that are fitted to texts, see the rest
alone. A further part is held back to calibrate the pools with, as large as a first night holds back. Interactions and
attributes of held-back entities are seen, as they are on a night.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.calibrate_pools import drafted_with
from laserbatch.jobs.console import say
from laserbatch.jobs.night import Night
from laserbatch.jobs.settings import Settings
from laserbatch.pipeline.decoding.budget import Budget
from laserbatch.pipeline.errors import RowError, WorkspaceError
from laserbatch.pipeline.knowledge.entities import iter_entities
from laserbatch.pipeline.planning.prompting import prompt_renderer
from laserbatch.pipeline.planning.routing import entity_router
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.retrieval_pools.calibration.calibrate import num_held_back
from laserbatch.retrieval_pools.calibration.replay import ReplayText
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing.collaborative import train_embeddings
from laserbatch.retrieval_pools.routing.embeddings import EntityEmbeddings
from laserbatch.retrieval_pools.routing.leaves import EntityTexts
from laserbatch.retrieval_pools.routing.router import Router
from laserbatch.retrieval_pools.simulating.simulate import (
    CalibrationTexts,
    DraftSetting,
    Grouping,
    PoolCorpus,
    Simulator,
)
from laserbatch.retrieval_pools.simulating.studies import group_counts

MIN_TEXTS = 20  # of a side; of fewer nothing can be said
MAX_HELD_BACK_SHARE = 0.25
GROUPINGS: dict[str, dict[str, str]] = {
    "whole": {"scheme": "global"},
    "router": {"scheme": "router"},
    "collaborative": {"scheme": "collaborative"},
    "attribute": {"scheme": "attribute", "attribute_grouping": "path"},
    "leaves": {"scheme": "attribute", "attribute_grouping": "leaves"},
    "random": {"scheme": "random"},
}


@dataclass(frozen=True)
class SimulationSize:
    """How much is replayed.

    Parameters
    ----------
    num_texts : held back of a side, at most; never more than a quarter of them.
    max_pool_texts : a larger side's pools are built from a sample of so many texts.
    """

    num_texts: int = 200
    max_pool_texts: int = 20_000


@dataclass(frozen=True)
class SideTexts:
    """A side's texts, divided.

    Attributes
    ----------
    num_texts : all that the run has; `num_written` : those that it wrote itself.
    share_changed : of those that it wrote, the share whose entity has a text of the night before.
    held_back, held_back_ids : to measure with.
    calibration, calibration_ids : to calibrate pools with.
    corpus : to build pools from.
    """

    side: Side
    num_texts: int
    num_written: int
    share_changed: float
    held_back: list[ReplayText]
    held_back_ids: list[str | int]
    calibration: list[ReplayText]
    calibration_ids: list[str | int]
    corpus: PoolCorpus


def divided_texts(
    night: Night, side: Side, size: SimulationSize, seed: int, calibration_texts: int = 0
) -> SideTexts | None:
    """Hold back texts of a side, the same for the same seed, and keep the rest for pools; None where there are too few.

    Of the entities of each part that is held back up to half are such as changed that night, where there are any: they
    have a previous text.

    Parameters
    ----------
    calibration_texts : wanted to calibrate with; see `calibrate.num_held_back`.
    """
    knowledge = night.run.read_knowledge(side) if _has_knowledge(night, side) else None
    num_texts = 0 if knowledge is None else knowledge.num_rows
    if num_texts < MIN_TEXTS:
        say(f"no simulation of {side}s: the run {night.run.run_id} has {num_texts} texts, {MIN_TEXTS} are needed")
        return None
    entity_ids = knowledge["entity_id"].to_pylist()
    previous = _previous_of_changed(night, side, knowledge)
    order = sorted(range(num_texts), key=lambda row: _digest(seed, side, entity_ids[row]))
    changed = [row for row in order if entity_ids[row] in previous]
    measured = _taken(order, changed, min(size.num_texts, int(MAX_HELD_BACK_SHARE * num_texts)), set())
    calibrating = _taken(order, changed, num_held_back(num_texts, calibration_texts), measured)
    taken = measured | calibrating
    token_ids = [np.asarray(ids.values, np.int32) for ids in knowledge["token_ids"]]
    prompts = _prompts(night, side, [entity_ids[row] for row in taken])
    held_back, calibration = (
        [row for row in order if row in part and entity_ids[row] in prompts] for part in (measured, calibrating)
    )
    kept = sorted([row for row in order if row not in taken][: size.max_pool_texts])

    def replayed(rows: list[int]) -> list[ReplayText]:
        return [ReplayText(prompts[entity_ids[row]], token_ids[row], previous.get(entity_ids[row])) for row in rows]

    if len(kept) < num_texts - len(taken):
        say(f"{side}s: pools are built from {len(kept):,} of {num_texts:,} texts; --max-pool-texts takes more")
    num_written = pc.sum(pc.equal(knowledge["run_id"], night.run.run_id)).as_py() or 0
    return SideTexts(
        side,
        num_texts,
        num_written,
        len(previous) / max(1, num_written),
        replayed(held_back),
        [entity_ids[row] for row in held_back],
        replayed(calibration),
        [entity_ids[row] for row in calibration],
        PoolCorpus(side, [token_ids[row] for row in kept], [entity_ids[row] for row in kept]),
    )


def trained_embeddings(night: Night, settings: Settings) -> dict[str, EntityEmbeddings]:
    """LightGCN's vectors by side, for the sides that bring no vectors of their own; trained once for all groupings."""
    sides = [side for side in SIDES if settings.routing.embeddings_of(side) is None]
    if not sides:
        return {}
    trained = train_embeddings(night.tables.interactions, settings.routing, settings.seed)
    return {side: trained[side] for side in sides}


def simulator_of(
    night: Night,
    settings: Settings,
    texts: SideTexts,
    embeddings: dict[str, EntityEmbeddings],
    folder: Path,
    configured_only: bool = False,
) -> Simulator:
    """The simulator of a side: its texts, and every grouping to be tried, or the configured one alone.

    Raises
    ------
    PoolError
        The entities cannot be grouped as the configuration says.
    """
    routed = _Routed(night, settings, texts, embeddings.get(texts.side))
    groupings = {}
    for name, changes in GROUPINGS.items():
        if configured_only and name != configured_grouping(settings):
            continue
        try:
            groupings[name] = routed.grouping(**changes)
        except PoolError as error:
            if name == configured_grouping(settings):
                raise
            say(f"{texts.side}s: the grouping {name!r} is left out: {error}")
    for scheme in () if configured_only else ("collaborative", "random"):
        for count in group_counts(len(texts.corpus)):
            groupings[f"{scheme}/{count}"] = routed.grouping(scheme=scheme, num_groups=count)
    calibration = CalibrationTexts(texts.calibration, calibrated_setting(night, settings, texts.side))
    return Simulator(texts.corpus, texts.held_back, groupings, folder, settings.seed, calibration, texts.share_changed)


def configured_grouping(settings: Settings) -> str:
    """The name of the configured grouping."""
    match settings.routing.scheme:
        case "global":
            return "whole"
        case "attribute":
            return "leaves" if settings.routing.attribute_grouping == "leaves" else "attribute"
    return settings.routing.scheme


def calibrated_setting(night: Night, settings: Settings, side: Side) -> DraftSetting:
    """How the configuration drafts; a budget that it leaves open is the run's, as pools are calibrated."""
    decoding, budget = settings.decoding, None
    if decoding.max_draft_tokens is None and decoding.min_acceptance is None:
        budget = drafted_with(night, side)
    budget = budget or Budget.of(decoding)
    return DraftSetting(
        configured_grouping(settings),
        settings.pools,
        decoding.drafters,
        budget.max_draft_tokens or Budget.max_draft_tokens,
        budget.min_acceptance,
    )


def require_something(sides: Sequence[SideTexts], night: Night) -> None:
    """Raise WorkspaceError where no side has enough texts."""
    if not sides:
        raise WorkspaceError(
            f"run {night.run.run_id} has fewer than {MIN_TEXTS} texts on either side: too few to hold some back; "
            "run a night over more entities, or name another run with --run"
        )


class _Routed:
    """The entities of a side, routed in one way or another."""

    def __init__(self, night: Night, settings: Settings, texts: SideTexts, embeddings: EntityEmbeddings | None) -> None:
        self._tables, self._settings, self._texts, self._embeddings = night.tables, settings, texts, embeddings
        self._entities = night.tables.entities(texts.side)
        self._date = night.date

    def grouping(self, **changes: object) -> Grouping:
        """Groups under the configured routing with changes."""
        texts, routing = self._texts, self._settings.routing
        routing = routing.model_validate(routing.model_dump() | changes)
        needs_texts = routing.attribute_grouping == "leaves" and routing.scheme in ("router", "attribute")
        router = Router.fit(
            texts.side,
            self._entities,
            self._tables.interactions,
            routing,
            self._settings.seed,
            self._embeddings,
            self._known_texts() if needs_texts else None,
        )
        route = entity_router(router, self._tables, texts.side, self._date)
        entities = iter_entities(self._tables, texts.side, with_history=False)
        group_of = {entity.entity_id: route(entity).group for entity in entities}
        return Grouping(
            [group_of.get(entity_id) for entity_id in texts.corpus.entity_ids],
            [group_of.get(entity_id) for entity_id in texts.held_back_ids],
            [group_of.get(entity_id) for entity_id in texts.calibration_ids],
        )

    def _known_texts(self) -> EntityTexts:
        corpus = self._texts.corpus
        return EntityTexts(pa.array(corpus.entity_ids), pa.array(corpus.token_ids, pa.list_(pa.int32())))


def _taken(order: list[int], changed: list[int], num_wanted: int, others: set[int]) -> set[int]:
    """So many rows that are not among others, in their order: up to half of them changed ones."""
    first = [row for row in changed if row not in others][: num_wanted // 2]
    taken = set(first)
    taken.update([row for row in order if row not in taken and row not in others][: num_wanted - len(first)])
    return taken


def _has_knowledge(night: Night, side: Side) -> bool:
    return any(night.run.knowledge_folder(side).glob("*.parquet"))


def _previous_of_changed(night: Night, side: Side, knowledge: pa.Table) -> dict[str | int, np.ndarray]:
    """Texts of the night before, of the entities that this night wrote anew."""
    if night.previous is None or not any(night.previous.knowledge_folder(side).glob("*.parquet")):
        return {}
    written = knowledge.filter(pc.equal(knowledge["run_id"], night.run.run_id))["entity_id"].combine_chunks()
    before = night.previous.read_knowledge(side)
    before = before.filter(pc.is_in(before["entity_id"], value_set=written))
    texts = zip(before["entity_id"].to_pylist(), before["token_ids"], strict=True)
    return {entity_id: np.asarray(ids.values, np.int32) for entity_id, ids in texts}


def _prompts(night: Night, side: Side, entity_ids: list[str | int]) -> dict[str | int, np.ndarray]:
    """Prompts as the run's model was given them; entities that cannot be asked about are left out."""
    settings, found = night.settings, {}
    render = prompt_renderer(side, settings.knowledge, settings.decoding, settings.model_dir)
    for entity in iter_entities(night.tables, side, entity_ids):
        try:
            found[entity.entity_id] = render(entity)[0].token_ids
        except RowError:
            continue
    return found


def _digest(seed: int, side: Side, entity_id: str | int) -> bytes:
    return hashlib.blake2b(f"{seed}:{side}:{entity_id}".encode(), digest_size=8).digest()
