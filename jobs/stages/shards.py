"""Hands a run's shards, of texts or of lists, to workers, shows progress, and gathers the shards of a side.

Before publication every entity of a side is in its texts, in quarantine or postponed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.jobs.console import progress, say
from laserbatch.jobs.events import emit
from laserbatch.jobs.formatting import counted
from laserbatch.jobs.writing import finished_counts, shard_counts
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.distributed.actors import ShardAbandoned, WorkerPool, run_shards
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.planning.plan import STALE_SHARD, Shard, drop_plan
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import ShardRecord
from laserbatch.pipeline.storage.quarantine import count_reasons, reason_of
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.retrieval_pools.ids import IdCodes
from laserbatch.retrieval_pools.step_cost import StepCost

NUM_NAMED = 5  # ids that a message names
PLACES = ("fresh", "stale", "quarantined", "waiting", "without text")  # kinds of an entity's rows in a run
MAX_COUNT = 9  # counts of an entity's records stop here, so that they fit int8
Finished = dict[str, ShardRecord]  # records of a side's finished shards, by shard name


def hand_out(
    worker_pool: WorkerPool,
    pending: Sequence[Shard],
    finished: Mapping[Side, Finished],
    label: str,
    choose: Callable[[Callable[[], StepCost]], Mapping[Side, Budget | int]],
    check: Callable[[Shard], object] = lambda shard: None,
    on_first_text: Callable[[], None] = lambda: None,
    expected_tokens: Mapping[Side, float | None] = MappingProxyType({}),
) -> list[ShardAbandoned]:
    """Hand shards to the workers and add their records to `finished`; return the abandoned shards.

    `run_shards` describes `choose` and `on_first_text`. `check` is called with each finished shard; its errors end
    the work. `expected_tokens` per text, if known, lets `status` estimate the remaining time.
    """
    abandoned, has_begun, num_rows = [], False, sum(shard.num_rows for shard in pending)
    folder = RunFolder(worker_pool.spec.run_dir)
    say(f"{label}: {counted(num_rows, 'row')} to write in {counted(len(pending), 'shard')}")
    emit_begin(label, folder, pending, finished, expected_tokens)
    with progress(label, num_rows) as bar:
        for outcome in run_shards(pending, worker_pool, choose, on_first_text):
            if isinstance(outcome, ShardAbandoned):
                abandoned.append(outcome)
                counts = {
                    "quarantined": outcome.shard.num_rows,
                    "reasons": {reason_of(outcome.reason): outcome.shard.num_rows},
                }
                emit("shard_abandoned", **_named(outcome.shard), reason=outcome.reason, **counts)
                bar.advance(outcome.shard.num_rows)
                continue
            shard, record = outcome
            if not has_begun:  # workers loaded the model, and one may have measured, before they wrote
                bar.begin(record.written_by.stats.wall_s)
                has_begun = True
            finished[shard.side][shard.name] = record
            counts = shard_counts(record, folder.shards(shard.side))
            emit("shard_done", **_named(shard), **counts)
            pace = record.written_by.stats.tokens_per_step
            bar.advance(shard.num_rows, "" if pace is None else f"{pace:.1f} tokens/step")
            check(shard)
    return abandoned


def gather(
    folder: RunFolder,
    side: Side,
    entity_ids: pa.ChunkedArray,
    finished: Finished,
    abandoned: Iterable[ShardAbandoned],
    stale_of: Callable[[pa.ChunkedArray], Any],
) -> tuple[dict[str, int], int]:
    """Finish a side: merge its quarantine, keep stale texts of quarantined entities, and require every entity.

    `stale_of` returns the earlier texts of quarantined entities, as `SideShards.write` takes them, or None.
    Returns the quarantine counts by reason, and the number of entities that keep a stale text. Raises WorkspaceError
    as `_require_every_entity` does; the next attempt then plans the side again.
    """
    rows = [row for lost in abandoned if lost.shard.side == side for row in lost.rows(folder.root)]
    folder.merge_quarantine(side, finished.values(), rows, entity_ids.type)
    quarantine = folder.read_quarantine(side, ["entity_id", "reason"])
    stale = stale_of(quarantine["entity_id"]) if quarantine.num_rows else None
    num_stale = 0 if stale is None else folder.shards(side).write(STALE_SHARD, stale).num_rows
    try:
        _require_every_entity(folder, side, entity_ids)
    except WorkspaceError:
        drop_plan(folder.root, side)
        raise
    return count_reasons(quarantine), num_stale


def _require_every_entity(run: RunFolder, side: Side, entity_ids: pa.ChunkedArray) -> None:
    """Require that each entity has exactly one record that is not stale, or one row in quarantine or postponed.

    An entity with a stale record must also be in quarantine or postponed. A postponed entity with `has_text` must have
    a stale record. `entity_ids` are the ids of the side's table as the run sees it, without duplicates. Raises
    WorkspaceError, which names the first ids that break a rule.
    """
    known = IdCodes(entity_ids.type)
    for chunk in entity_ids.chunks:
        known.add(chunk)
    counts = {name: np.zeros(len(known), np.int8) for name in PLACES}
    unknown: dict[str, list[pa.Array]] = {name: [] for name in PLACES}
    for name, ids in _ids_by_place(run, side):
        rows = known.find(ids) if ids.type == known.kind else np.full(len(ids), -1)
        if (rows < 0).any():
            unknown[name].append(ids.filter(pa.array(rows < 0)))
        there, times = np.unique(rows[rows >= 0], return_counts=True)
        counts[name][there] = np.minimum(counts[name][there] + times, MAX_COUNT)
    num_fresh, num_stale, num_quarantined, num_waiting, num_without_text = counts.values()
    num_places = num_fresh + num_quarantined + num_waiting + num_without_text
    faults = {
        "missing, or postponed without the text that they keep": (num_places == 0) | (num_waiting > num_stale),
        "recorded more than once": (num_places > 1) | (num_stale > 1),
        "recorded with a stale text but neither in quarantine nor postponed": num_stale > num_quarantined + num_waiting,
    }
    violations = [(fault, known.values().filter(pa.array(is_so))) for fault, is_so in faults.items()]
    violations += [("not in the table", pa.chunked_array(parts)) for parts in unknown.values() if parts]
    problems = []
    for fault, violating_ids in violations:
        if len(violating_ids):
            named = ", ".join(map(str, violating_ids[:NUM_NAMED])) + (", ..." if len(violating_ids) > NUM_NAMED else "")
            problems.append(f"{len(violating_ids)} are {fault} ({named})")
    if problems:
        raise WorkspaceError(
            f"{run.root}: of {len(entity_ids)} {side}s {'; '.join(problems)}. Nothing is published. Run the same "
            "command again: it writes the lost rows again and keeps the others. If this error comes back, delete the "
            "folder."
        )


def _ids_by_place(run: RunFolder, side: Side) -> Iterator[tuple[str, pa.Array]]:
    """Yield the ids of a side in a run, one chunk at a time, each chunk with one of `PLACES`."""
    for batch in run.iter_knowledge(side, ("entity_id", "is_stale")):
        yield "fresh", batch["entity_id"].filter(pc.invert(batch["is_stale"]))
        yield "stale", batch["entity_id"].filter(batch["is_stale"])
    postponed = run.read_postponed(side)
    for name, ids in (
        ("quarantined", run.read_quarantine(side, ["entity_id"])["entity_id"]),
        ("waiting", postponed.filter(postponed["has_text"])["entity_id"]),
        ("without text", postponed.filter(pc.invert(postponed["has_text"]))["entity_id"]),
    ):
        yield from ((name, chunk) for chunk in ids.chunks)


def stats_of(records: Iterable[ShardRecord]) -> DecodingStats:
    """The sum over shards. Workers run in parallel, so the time of a shard is divided by the number of workers."""
    infos = (record.written_by for record in records)
    return DecodingStats.total(replace(info.stats, wall_s=info.stats.wall_s / info.num_workers) for info in infos)


def emit_begin(
    label: str,
    folder: RunFolder,
    pending: Sequence[Shard],
    finished: Mapping[Side, Finished],
    expected_tokens: Mapping[Side, float | None] = MappingProxyType({}),
) -> None:
    """Emit the event `shards_begin`: by side, how many shards and rows the stage has, and how many are done."""
    sides = {}
    for side, records in finished.items():
        rows = [shard.num_rows for shard in pending if shard.side == side]
        done = finished_counts(records.values(), folder.shards(side))
        sides[side] = {"shards": len(rows) + done["shards"], "rows": sum(rows) + done["rows"], "done": done}
    emit("shards_begin", of=label, sides=sides, expected_tokens=dict(expected_tokens))


def _named(shard: Shard) -> dict[str, object]:
    return {"side": shard.side, "shard": shard.name, "rows": shard.num_rows}
