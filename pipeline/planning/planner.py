"""Which entities are carried over, which are generated, and in which shard.

Shards follow the order of pool groups: a worker's consecutive texts share drafts.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.entities import Entity
from laserbatch.pipeline.knowledge.prompts import RenderedPrompt
from laserbatch.pipeline.planning.plan import CARRIED_SHARD, PlannedRow, SidePlan, write_shard_plan
from laserbatch.pipeline.planning.previous import PreviousKnowledge
from laserbatch.pipeline.planning.routing import no_route
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.retrieval_pools.routing.router import Route

SHARDS_A_SIDE = 16  # by default at least, of a side that is not small: so that several workers all have some
FIRST_TEXTS = 32  # of a side, that are judged before the others are written
LEAST_BATCHES, MOST_BATCHES = 4, 32  # of a shard by default: at its end the batch empties


def plan_side(
    side: Side,
    entities: Iterable[Entity],
    entity_id_type: pa.DataType,
    *,
    render: Callable[[Entity], tuple[RenderedPrompt, str]],
    previous: PreviousKnowledge,
    batch_size: int,
    run_dir: Path,
    route: Callable[[Entity], Route] = no_route,
    force: bool = False,
    shard_size: int | None = None,
    on_entity: Callable[[], None] = lambda: None,
    apart: Container[object] = (),
) -> SidePlan:
    """Decide about every entity of a side and write its shards' inputs.

    Parameters
    ----------
    entities : the side's entities, in the order of the input table.
    render : entity -> (rendered prompt, fingerprint); raises `RowError` when it cannot be asked about.
    previous : the last published records.
    batch_size : texts that a worker writes side by side.
    run_dir : the run's folder; `plan/<side>/` and the carried-over records are written below it.
    route : entity -> its pool group (empty: none) and the scheme that chose it.
    force : generate unchanged entities too.
    shard_size : rows a shard; None: `default_shard_size`.
    apart : ids of entities that share no shard with others and come first, so that their time is known.
    """
    rows: list[PlannedRow] = []
    refused: list[QuarantineRow] = []
    carried: list[int] = []
    changed: dict[int, int] = {}  # row of the earlier record -> its place in `rows`
    routes: dict[str, int] = {}
    for entity in entities:
        on_entity()
        routed = route(entity)
        routes[routed.scheme] = routes.get(routed.scheme, 0) + 1
        try:
            rendered, fingerprint = render(entity)
        except RowError as error:
            refused.append(QuarantineRow.of(entity.entity_id, side, error.reason))
            continue
        row = previous.row_of(entity.entity_id)
        if row is not None and not force and previous.fingerprint(row) == fingerprint:
            carried.append(row)
            continue
        if row is not None:
            changed[row] = len(rows)
        rows.append(
            PlannedRow(
                entity_id=entity.entity_id,
                prompt_ids=rendered.token_ids,
                num_history=rendered.num_history,
                num_history_dropped=rendered.num_history_dropped,
                fingerprint=fingerprint,
                previous_ids=None,
                group=routed.group or None,
            )
        )
    for row, token_ids in previous.token_ids(changed).items():
        rows[changed[row]] = replace(rows[changed[row]], previous_ids=token_ids)
    records = previous.records(sorted(carried), entity_id_type, is_stale=False)
    RunFolder(run_dir).write_shard(side, CARRIED_SHARD, records, refused)  # of none too: a side then has its schema
    shard_size = shard_size or default_shard_size(len(rows), batch_size)
    shards = tuple(
        write_shard_plan(side, number, some, entity_id_type, run_dir, is_apart)
        for number, (some, is_apart) in enumerate(_cut(rows, apart, shard_size))
    )
    return SidePlan(side, sum(routes.values()), len(carried), len(refused), routes, shards)


def default_shard_size(num_rows: int, batch_size: int) -> int:
    """Rows a shard of a side that has so many to generate.

    A shard's texts are written together and with no others, so that its forwards, and with them how sums are rounded,
    are the same whatever came before it and on which worker. So the batch empties at its end, which costs the less the
    longer a shard is; but a killed run loses what is in unfinished ones.
    """
    return min(max(-(-num_rows // SHARDS_A_SIDE), LEAST_BATCHES * batch_size), MOST_BATCHES * batch_size)


def _cut(rows: list[PlannedRow], apart: Container[object], shard_size: int) -> Iterator[tuple[list[PlannedRow], bool]]:
    """The rows of each shard, by group and else in the input's order, and whether they are those to keep apart.

    Where none are kept apart and shards are long, a few rows of all groups come first: a night of which most cannot be
    kept is stopped after them.
    """
    by_group = sorted(rows, key=lambda row: row.group or "")
    if not apart and len(rows) > shard_size > FIRST_TEXTS:
        stride = len(rows) // FIRST_TEXTS
        yield by_group[: stride * FIRST_TEXTS : stride], False
        by_group = [row for place, row in enumerate(by_group) if place % stride or place >= stride * FIRST_TEXTS]
    for is_apart in (True, False):
        part = [row for row in by_group if (row.entity_id in apart) == is_apart]
        for start in range(0, len(part), shard_size):
            yield part[start : start + shard_size], is_apart
