"""The night's work list: which entities are carried over, which are generated, in which shard.

A plan is written to disk before the first text is generated and is a function of the inputs alone, so that a killed
run finds its shards again, and makes a plan anew of which anything was lost: shards whose rows are the same stay
finished. Shards follow the order of pool groups: an actor's consecutive sequences share drafts.
Knows no model beyond its tokenizer (inside `render`), and no Ray.
"""

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.errors import RowError, WorkspaceError
from laserbatch.pipeline.knowledge.entities import Entity
from laserbatch.pipeline.knowledge.prompts import RenderedPrompt
from laserbatch.pipeline.knowledge.records import as_current, knowledge_schema
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import read_json, sha256_file, write_json
from laserbatch.pipeline.storage.parquet import iter_parquet, read_parquet, write_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow
from laserbatch.pipeline.storage.run_folder import RunFolder, ShardRecord
from laserbatch.retrieval_pools.routing.router import Route

logger = logging.getLogger(__name__)

CARRIED_SHARD = "carried"  # what needed no model: rows whose text stays, and rows that cannot be asked about
KEPT_SHARD = "kept"  # earlier texts of rows in quarantine
SHARDS_A_SIDE = 16  # by default at least, of a side that is not small: so that several workers all have some
FIRST_TEXTS = 32  # of a side, that are judged before the others are written
LEAST_BATCHES, MOST_BATCHES = 4, 32  # of a shard by default: at its end the batch empties


@dataclass(frozen=True)
class PlannedRow:
    """One entity to generate, ready for the engine."""

    entity_id: object
    prompt_ids: np.ndarray  # int32 (num_prompt_tokens,)
    num_history: int
    num_history_dropped: int
    fingerprint: str
    previous_ids: np.ndarray | None  # int32, the entity's own earlier text
    group: str | None


@dataclass(frozen=True)
class Shard:
    """Rows that one worker generates in one go.

    `path` is the plan's Parquet file, relative to the run's folder, and `sha256` its checksum; `is_apart` says that its
    rows are those that `plan_side` was asked to keep apart.
    """

    name: str  # of its files: "00000"
    side: Side
    group: str  # of its first row
    num_rows: int
    path: str
    sha256: str
    is_apart: bool = False


@dataclass(frozen=True)
class SidePlan:
    """Everything that a side's generation needs to know; counts are of entities."""

    side: Side
    num_entities: int
    num_carried_over: int
    num_refused: int  # that cannot even be asked about
    routes: dict[str, int]  # scheme -> entities, over all of them
    shards: tuple[Shard, ...]


class PreviousKnowledge:
    """The last published records of a side, looked up by entity; texts and tokens stay on disk until they are needed.

    Parameters
    ----------
    folder : of knowledge files; None, or none in it, on the first night.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        batches = list(self._batches(["entity_id", "fingerprint"]))
        self.num_rows = sum(batch.num_rows for batch in batches)
        self._entity_ids = [batch["entity_id"] for batch in batches]
        self._fingerprints = pa.chunked_array([batch["fingerprint"] for batch in batches], pa.string())

    @cached_property
    def _row_of(self) -> dict[object, int]:
        ids = (key for part in self._entity_ids for key in part.to_pylist())
        return {key: row for row, key in enumerate(ids)}

    def row_of(self, entity_id: object) -> int | None:
        """Row of the entity's record, or None."""
        return self._row_of.get(entity_id)

    def fingerprint(self, row: int) -> str:
        """What the record of that row was generated from."""
        return self._fingerprints[row].as_py()

    def rows_of(self, entity_ids: pa.ChunkedArray) -> list[int]:
        """Rows of the entities that have a record, ascending."""
        known = pa.chunked_array(self._entity_ids) if self._entity_ids else entity_ids[:0]
        if known.type != entity_ids.type:
            return []
        return np.flatnonzero(pc.is_in(known, value_set=entity_ids).to_numpy()).tolist()

    def token_ids(self, rows: Iterable[int]) -> dict[int, np.ndarray]:
        """Token ids of the texts of some rows, int32."""
        rows = sorted(rows)
        ids = (value.values for batch in self._taken(rows, ["token_ids"]) for value in batch["token_ids"])
        return {row: np.asarray(values, np.int32) for row, values in zip(rows, ids, strict=True)}

    def records(self, rows: list[int], entity_id_type: pa.DataType, is_stale: bool) -> pa.RecordBatchReader:
        """Records of some rows, ascending, as this version keeps them, a few in memory at a time."""
        tables = (
            as_current(pa.Table.from_batches([batch]), entity_id_type, is_stale) for batch in self._taken(rows, None)
        )
        parts = (part for table in tables for part in table.to_batches())
        return pa.RecordBatchReader.from_batches(knowledge_schema(entity_id_type), parts)

    def _taken(self, rows: list[int], columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        is_taken, start = np.zeros(self.num_rows, bool), 0
        is_taken[rows] = True
        for batch in self._batches(columns) if rows else ():
            mask = is_taken[start : start + batch.num_rows]
            start += batch.num_rows
            if mask.any():
                yield batch.filter(pa.array(mask))  # `take` of a whole side fails where it has 2 GiB of text

    def _batches(self, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        return iter(()) if self._folder is None else iter_parquet(self._folder, columns)


def plan_side(
    side: Side,
    entities: Iterable[Entity],
    entity_id_type: pa.DataType,
    *,
    render: Callable[[Entity], tuple[RenderedPrompt, str]],
    route: Callable[[Entity], Route],
    previous: PreviousKnowledge,
    force: bool,
    shard_size: int | None,
    batch_size: int,
    run_dir: Path,
    on_entity: Callable[[], None] = lambda: None,
    apart: Container[object] = (),
) -> SidePlan:
    """Decide about every entity of a side and write its shards' inputs.

    Parameters
    ----------
    entities : the side's entities, in the order of the input table.
    render : entity -> (rendered prompt, fingerprint); raises `RowError` when it cannot be asked about.
    route : entity -> its pool group (empty: none) and the scheme that chose it.
    previous : the last published records.
    force : generate unchanged entities too.
    shard_size : rows a shard; None: `default_shard_size`.
    batch_size : texts that a worker writes side by side.
    run_dir : the run's folder; `plan/<side>/` and the carried-over records are written below it.
    apart : ids of entities that share no shard with others and come first, so that their time is known.
    """
    rows: list[PlannedRow] = []
    refused: list[QuarantineRow] = []
    carried: list[int] = []
    changed: dict[int, int] = {}  # row of the earlier record -> its place in `rows`
    routes: dict[str, int] = {}
    num_entities = 0
    for entity in entities:
        num_entities += 1
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
    shards = [
        _write_shard(side, number, some, entity_id_type, run_dir, is_apart)
        for number, (some, is_apart) in enumerate(_cut(rows, apart, shard_size))
    ]
    return SidePlan(side, num_entities, len(carried), len(refused), routes, tuple(shards))


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


def _write_shard(
    side: Side, number: int, rows: list[PlannedRow], entity_id_type: pa.DataType, run_dir: Path, is_apart: bool
) -> Shard:
    name = f"{number:05d}"
    path = f"plan/{side}/{name}.parquet"
    columns = {
        "entity_id": pa.array([row.entity_id for row in rows], entity_id_type),
        "prompt_ids": pa.array([row.prompt_ids for row in rows], pa.list_(pa.int32())),
        "num_history": pa.array([row.num_history for row in rows], pa.int32()),
        "num_history_dropped": pa.array([row.num_history_dropped for row in rows], pa.int32()),
        "fingerprint": pa.array([row.fingerprint for row in rows], pa.string()),
        "previous_ids": pa.array([row.previous_ids for row in rows], pa.list_(pa.int32())),
        "group": pa.array([row.group for row in rows], pa.string()),
    }
    written = write_parquet(pa.table(columns), run_dir / path)
    return Shard(name, side, rows[0].group or "", len(rows), path, written.sha256, is_apart)


def read_shard(path: Path) -> list[PlannedRow]:
    """The rows of a shard's plan file."""
    rows = []
    for batch in iter_parquet(path):
        lists = {name: batch[name] for name in ("prompt_ids", "previous_ids")}
        for number, row in enumerate(batch.drop_columns(list(lists)).to_pylist()):
            ids = {name: values[number] for name, values in lists.items()}
            arrays = {name: np.asarray(ids.values, np.int32) if ids.is_valid else None for name, ids in ids.items()}
            rows.append(PlannedRow(**row, **arrays))
    return rows


def split_shard(run_dir: Path, shard: Shard) -> tuple[Shard, Shard]:
    """The halves of a shard of two rows or more, which take its place in the plan, now and for later attempts."""
    table = read_parquet(run_dir / shard.path)
    middle = len(table) // 2
    halves = []
    for number, rows in enumerate((table[:middle], table[middle:])):
        name = f"{shard.name}-{number}"  # in the order of names the halves are where the shard was
        path = str(Path(shard.path).with_stem(name))
        sha256 = write_parquet(rows, run_dir / path).sha256
        group = rows["group"][0].as_py() or ""
        halves.append(replace(shard, name=name, group=group, num_rows=len(rows), path=path, sha256=sha256))
    plan = load_plan(run_dir, shard.side)
    if plan is not None:
        shards = [part for known in plan.shards for part in (halves if known == shard else [known])]
        save_plan(replace(plan, shards=tuple(shards)), run_dir)
    return tuple(halves)


def save_plan(plan: SidePlan, run_dir: Path) -> None:
    """Write a side's plan; the file's existence says that all its shards are on disk."""
    write_json(asdict(plan), _plan_path(run_dir, plan.side))


def load_plan(run_dir: Path, side: Side) -> SidePlan | None:
    """A plan written by an earlier attempt at this run; None where there is none, or no longer a whole one."""
    path = _plan_path(run_dir, side)
    if not path.exists():
        return None
    try:
        data = read_json(path)
        plan = SidePlan(**data | {"shards": tuple(Shard(**shard) for shard in data.get("shards", ()))})
    except (WorkspaceError, TypeError) as error:
        logger.warning("the plan %s cannot be used and is made again: %s", path, error)
        return None
    num_planned = plan.num_carried_over + plan.num_refused + sum(shard.num_rows for shard in plan.shards)
    if num_planned != plan.num_entities:
        logger.warning("the plan %s has %d of its %d entities and is made again", path, num_planned, plan.num_entities)
        return None
    return plan


def drop_plan(run_dir: Path, side: Side) -> None:
    """Have the next attempt plan a side again; finished shards of which it makes the same rows stay."""
    _plan_path(run_dir, side).unlink(missing_ok=True)


def is_whole(plan: SidePlan, finished: Mapping[str, ShardRecord], run_dir: Path) -> bool:
    """Whether everything that a plan has written is there and as it was: its shards' inputs, and what is carried over.

    Parameters
    ----------
    finished : finished shards of the side by name.
    """
    carried = finished.get(CARRIED_SHARD)
    found = None if carried is None else (carried.num_rows, carried.num_quarantined)
    lost = [] if found == (plan.num_carried_over, plan.num_refused) else [CARRIED_SHARD]
    paths = ((run_dir / shard.path, shard.sha256) for shard in plan.shards)
    lost += [path for path, sha256 in paths if not path.exists() or sha256_file(path) != sha256]
    if lost:
        logger.warning("%s of the plan of %ss is missing or changed; the side is planned again", lost[0], plan.side)
    return not lost


def _plan_path(run_dir: Path, side: Side) -> Path:
    return run_dir / "plan" / f"{side}.json"
