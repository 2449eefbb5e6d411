"""From an entity to its pool group: the router, asked with what the tables say of the entity on the night's date."""

import datetime
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.knowledge.entities import Entity
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.tables.read import Tables
from laserbatch.retrieval_pools.routing.router import Route, Router

DAY_US = 24 * 3600 * 1_000_000
NO_ROUTE = Route("", "none")


def no_route(entity: Entity) -> Route:
    """No group: there are no pools, or none are used."""
    return NO_ROUTE


def entity_router(router: Router, tables: Tables, side: Side, date: datetime.date) -> Callable[[Entity], Route]:
    """A function from an entity to its route.

    Parameters
    ----------
    tables : cut at the end of `date`.
    date : ages are counted to its end (UTC).
    """
    counts = count_interactions(tables.interactions, side)
    ages = ages_days(tables.entities(side), side, date)

    def route(entity: Entity) -> Route:
        entity_id = entity.entity_id
        return router.route(entity_id, entity.attributes, counts.get(entity_id, 0), ages.get(entity_id))

    return route


def count_interactions(interactions: pa.Table, side: Side) -> dict[object, int]:
    """Number of interactions by entity."""
    counted = pc.value_counts(interactions[f"{side}_id"].combine_chunks())
    return dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True))


def ages_days(entities: pa.Table, side: Side, date: datetime.date) -> dict[object, float]:
    """Days from `created_at` to the end of the date, by entity; those with no `created_at` are left out."""
    if "created_at" not in entities.column_names:
        return {}
    known = entities.filter(pc.is_valid(entities["created_at"]))
    end = datetime.datetime.combine(date, datetime.time(), datetime.UTC) + datetime.timedelta(days=1)
    created_us = known["created_at"].cast(pa.int64()).to_numpy()
    days = (int(end.timestamp()) * 1_000_000 - created_us) / DAY_US
    return dict(zip(known[f"{side}_id"].to_pylist(), days.tolist(), strict=True))
