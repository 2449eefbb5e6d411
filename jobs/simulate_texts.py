"""Texts of a run, divided for a simulation: some to measure with, some to calibrate with, the others for pools.

What is measured or calibrated with is held back: pools, and leaves that are fitted to texts, see the rest alone.
Interactions and attributes of held-back entities are seen, as they are on a night.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from laserbatch.jobs.calibrate_pools import planned_rows
from laserbatch.jobs.console import say
from laserbatch.jobs.night import Night
from laserbatch.jobs.pool_texts import read_run_texts
from laserbatch.jobs.settings import Settings
from laserbatch.pipeline.knowledge.entities import Entity, iter_entities
from laserbatch.pipeline.planning.planner import entity_router
from laserbatch.pipeline.sides import Side
from laserbatch.retrieval_pools.calibration.calibrate import num_held_back
from laserbatch.retrieval_pools.calibration.replay import ReplayText
from laserbatch.retrieval_pools.index.texts import PoolText
from laserbatch.retrieval_pools.routing.leaves import EntityTexts
from laserbatch.retrieval_pools.routing.router import fit_routers

MIN_TEXTS = 5  # held back of a side; of fewer nothing can be said
MAX_HELD_BACK_SHARE = 0.25
MAX_POOL_TEXTS = 20_000  # of more a sample makes the pools
GroupOf = Callable[[Side, str], Mapping[object, str]]  # groups by entity of a side, under a scheme


@dataclass(frozen=True)
class SideTexts:
    """The texts of a side.

    Attributes
    ----------
    num_texts : all that the run has.
    measured, calibration : of those that the run wrote itself, so that earlier texts of their entities are known in the
        share that a night knows them; by entity, without groups.
    pool : int32[n] token ids by entity.
    entities : of all of these.
    """

    side: Side
    num_texts: int
    measured: Mapping[object, ReplayText]
    calibration: Mapping[object, ReplayText]
    pool: Mapping[object, np.ndarray]
    entities: Mapping[object, Entity]

    @property
    def share_changed(self) -> float:
        """Of the measured texts, the share whose entity has an earlier one."""
        return sum(text.previous_ids is not None for text in self.measured.values()) / len(self.measured)

    @property
    def counts(self) -> dict[str, float]:
        """For `--json`."""
        numbers = {f"num_{name}_texts": len(getattr(self, name)) for name in ("measured", "calibration", "pool")}
        return {"num_texts": self.num_texts, **numbers, "share_changed": self.share_changed}


def groups(night: Night, settings: Settings, texts: Sequence[SideTexts]) -> GroupOf:
    """The group of each entity, under any scheme of routing.

    Raises
    ------
    PoolError
        The entities cannot be grouped as the configuration says.
    """
    tables, sides = night.tables, {one.side: one for one in texts}
    routing = settings.routing.model_copy(update={"scheme": "router"})  # it knows all that the others do
    known = {
        one.side: EntityTexts(pa.array(list(one.pool)), pa.array(list(one.pool.values()), pa.list_(pa.int32())))
        for one in texts
        if routing.attribute_grouping == "leaves"
    }
    routers = fit_routers(tables.users, tables.items, tables.interactions, routing, settings.seed, known)

    @cache
    def group_of(side: Side, scheme: str) -> dict[object, str]:
        router = replace(routers[side], settings=routing.model_copy(update={"scheme": scheme}))
        route = entity_router(router, tables, side, night.date)
        return {entity_id: route(entity).group for entity_id, entity in sides[side].entities.items()}

    return group_of


def divided_texts(night: Night, settings: Settings, side: Side, num_texts: int) -> SideTexts | None:
    """Hold back `num_texts` of a side, at most a quarter, the same for the same seed; None where there are too few."""
    generator = np.random.default_rng(settings.seed)
    with tempfile.TemporaryDirectory(prefix="laserbatch-texts-") as folder:
        run_texts = read_run_texts(night.run, side, Path(folder))
        num_all = 0 if run_texts is None else len(run_texts)
        num_measured = min(num_texts, int(MAX_HELD_BACK_SHARE * num_all))
        num_calibration = num_held_back(num_all, settings.pools.calibration_texts)
        rows = planned_rows(night, side, num_measured + num_calibration)
        if len(rows) < num_measured + num_calibration:  # most was carried over
            num_measured = len(rows) // 2 if num_calibration else len(rows)
        if num_measured < MIN_TEXTS:
            say(f"no simulation of {side}s: the run {night.run.run_id} has {num_all} texts and wrote {len(rows)} anew")
            return None
        others = set(run_texts.entity_ids.to_pylist()).difference(row.entity_id for row in rows)
        others = sorted(others, key=str)
        chosen = [others[place] for place in generator.permutation(len(others))[:MAX_POOL_TEXTS]]
        token_ids = run_texts.of_entities([*(row.entity_id for row in rows), *chosen])
        entities = iter_entities(night.tables, side, with_history=False)
        known = {entity.entity_id: entity for entity in entities if entity.entity_id in token_ids}
        token_ids = {entity_id: np.array(token_ids[entity_id]) for entity_id in known}
    if len(chosen) < len(others):
        say(f"{side}s: pools are built from {len(chosen):,} of {num_all:,} texts")
    rows = [rows[place] for place in generator.permutation(len(rows)) if rows[place].entity_id in known]
    texts = [(row.entity_id, ReplayText(row.prompt_ids, token_ids[row.entity_id], row.previous_ids)) for row in rows]
    pool = {entity_id: token_ids[entity_id] for entity_id in chosen if entity_id in known}
    return SideTexts(side, num_all, dict(texts[:num_measured]), dict(texts[num_measured:]), pool, known)


def pool_texts(texts: SideTexts, group_of: Mapping[object, str], share: float) -> list[PoolText]:
    """The texts of a pool, or of a smaller one that is part of it."""
    kept = list(texts.pool)[: max(1, round(share * len(texts.pool)))]  # in random order
    return [PoolText(texts.pool[entity_id], group_of[entity_id], entity_id) for entity_id in kept]


def grouped(texts: Mapping[object, ReplayText], group_of: Mapping[object, str]) -> list[ReplayText]:
    """Texts to replay, with their groups."""
    return [replace(text, group=group_of[entity_id] or None) for entity_id, text in texts.items()]
