"""A run's shards, of texts or of lists: handed to workers, with progress shown, and gathered to a side."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from laserbatch.jobs.console import progress, say
from laserbatch.jobs.events import emit
from laserbatch.jobs.formatting import counted
from laserbatch.jobs.writing import finished_counts, shard_counts
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.distributed.actors import ShardAbandoned, WorkerPool, run_shards
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.planning.plan import STALE_SHARD, Shard, drop_plan
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.completeness import require_every_entity
from laserbatch.pipeline.storage.figures import ShardRecord
from laserbatch.pipeline.storage.quarantine import count_reasons, reason_of
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.retrieval_pools.step_cost import StepCost

Finished = dict[str, ShardRecord]  # shards of a side by name


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
    """Hand shards to the workers and add them to `finished`; return the abandoned ones.

    `choose` and `on_first_text` are those of `run_shards`. `check` is called with each finished shard; its errors end
    the work. `expected_tokens` of a text, where they are known, tell those who watch how long it will take.
    """
    abandoned, num_done, num_rows = [], 0, sum(shard.num_rows for shard in pending)
    folder = RunFolder(worker_pool.spec.run_dir)
    say(f"{label}: {num_rows:,} to write, in {counted(len(pending), 'shard')}")
    emit_begin(label, folder, pending, finished, expected_tokens)
    with progress(label, num_rows) as bar:
        for outcome in run_shards(pending, worker_pool, choose, on_first_text):
            if isinstance(outcome, ShardAbandoned):
                abandoned.append(outcome)
                counts = {"quarantined": outcome.shard.num_rows}
                counts |= {"reasons": {reason_of(outcome.reason): outcome.shard.num_rows}}
                emit("shard_abandoned", **_named(outcome.shard), reason=outcome.reason, **counts)
                bar.advance(outcome.shard.num_rows)
                continue
            shard, record = outcome
            if not num_done:  # workers loaded the model, and one may have measured, before they wrote
                bar.begin(record.written_by.stats.wall_s)
            finished[shard.side][shard.name] = record
            num_done += shard.num_rows
            counts = shard_counts(record, folder.shards(shard.side))
            emit("shard_done", **_named(shard), **counts, done=num_done, total=num_rows)
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
    """Finish a side: merge its quarantine, keep stale texts of quarantined entities, and check that none is missing.

    `stale_of` returns the earlier texts of quarantined entities, as `SideShards.write` takes them, or None.
    Returns the quarantine counts by reason, and how many entities keep a stale text. Raises WorkspaceError if an
    entity is missing; the next attempt then plans the side again.
    """
    rows = [row for lost in abandoned if lost.shard.side == side for row in lost.rows(folder.root)]
    folder.merge_quarantine(side, finished.values(), rows, entity_ids.type)
    quarantine = folder.read_quarantine(side, ["entity_id", "reason"])
    stale = stale_of(quarantine["entity_id"]) if quarantine.num_rows else None
    num_stale = 0 if stale is None else folder.shards(side).write(STALE_SHARD, stale).num_rows
    try:
        require_every_entity(folder, side, entity_ids)
    except WorkspaceError:
        drop_plan(folder.root, side)
        raise
    return count_reasons(quarantine), num_stale


def stats_of(records: Iterable[ShardRecord]) -> DecodingStats:
    """The sum over shards. Workers run in parallel, so the time of a shard is divided by their number."""
    infos = (record.written_by for record in records)
    return DecodingStats.total(replace(info.stats, wall_s=info.stats.wall_s / info.num_workers) for info in infos)


def emit_begin(
    label: str,
    folder: RunFolder,
    pending: Sequence[Shard],
    finished: Mapping[Side, Finished],
    expected_tokens: Mapping[Side, float | None] = MappingProxyType({}),
) -> None:
    """Record how much a stage will write and how much is done, by side."""
    sides = {side: _planned(side, pending, finished[side], folder) for side in finished}
    emit("shards_begin", of=label, sides=sides, expected_tokens=dict(expected_tokens))


def _planned(side: Side, pending: Sequence[Shard], finished: Finished, folder: RunFolder) -> dict[str, Any]:
    """The counts of a side in the event `shards_begin`: shards and rows of all attempts, and those that are done."""
    shards = [shard for shard in pending if shard.side == side]
    done = finished_counts(finished.values(), folder.shards(side))
    num_rows = sum(shard.num_rows for shard in shards)
    return {"shards": len(shards) + done["shards"], "rows": num_rows + done["rows"], "done": done}


def _named(shard: Shard) -> dict[str, object]:
    return {"side": shard.side, "shard": shard.name, "rows": shard.num_rows}
