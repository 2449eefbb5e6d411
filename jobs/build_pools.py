"""Pools for the next night, from a run's knowledge: routers fitted, indexes built, one version published.

Whatever the run holds goes in, carried-over texts too: the pools of a version stand for the newest text of every
entity. Only tables as of the run's date are seen.
"""

import logging
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from jobs.console import say
from jobs.night import Night
from jobs.routing import entity_router
from pipeline.decoding.identity import tokenizer_hash
from pipeline.knowledge.entities import iter_entities
from pipeline.knowledge.records import SIDES, Side
from retrieval_pools.build import PoolText, build_pool
from retrieval_pools.grouping.text_clusters import EntityTexts
from retrieval_pools.router import Router, fit_routers

logger = logging.getLogger(__name__)


def build_pools(night: Night) -> dict[str, Any]:
    """Build and publish the pools of a run.

    Returns
    -------
    dict
        The manifest's `pools_built`: a side's version, texts, tokens, seconds and groups.
    """
    tables, routing = night.tables, night.settings.routing
    texts = {side: _entity_texts(night, side) for side in SIDES} if routing.attribute_grouping == "leaves" else None
    routers = fit_routers(tables.users, tables.items, tables.interactions, routing, night.settings.seed, texts)
    hash_of_tokenizer = tokenizer_hash(night.settings.model_dir)
    built: dict[str, Any] = {}
    with night.pools.publish(night.run.run_id) as (folder, version):
        for side in SIDES:
            routers[side].save(folder / "router" / side)
            knowledge = night.run.read_knowledge(side)
            if not knowledge.num_rows:
                say(f"no {side} texts: no {side} pool")
                continue
            start_s = time.perf_counter()
            pool = build_pool(
                _pool_texts(night, side, knowledge, routers[side]),
                folder / side,
                side=side,
                tokenizer_hash=hash_of_tokenizer,
                model_id=knowledge["model_id"][0].as_py(),
                settings=night.settings.pools,
            )
            built[side] = {
                "version": version,
                "num_texts": pool.manifest.num_texts,
                "num_tokens": pool.manifest.num_tokens,
                "build_s": time.perf_counter() - start_s,
                "groups": pool.manifest.groups,
            }
    return built


def _entity_texts(night: Night, side: Side) -> EntityTexts | None:
    knowledge = night.run.read_knowledge(side)
    if not knowledge.num_rows:
        return None
    return EntityTexts(knowledge["entity_id"].combine_chunks(), knowledge["token_ids"].combine_chunks())


def _pool_texts(night: Night, side: Side, knowledge: pa.Table, router: Router) -> Iterator[PoolText]:
    route = entity_router(router, night.tables, side, night.date)
    texts = dict(zip(knowledge["entity_id"].to_pylist(), knowledge["token_ids"].combine_chunks(), strict=True))
    for entity in iter_entities(night.tables, side):
        token_ids = texts.get(entity.entity_id)
        if token_ids is not None:
            yield PoolText(token_ids.values.to_numpy(), route(entity).group, entity.entity_id)
