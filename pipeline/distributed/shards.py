"""The night's work list: which entities are carried over, which are generated, in which shard.

A plan is written to disk before the first text is generated and is a function of the inputs alone, so that a killed
run finds its shards again. Shards follow the order of pool groups: an actor's consecutive sequences share drafts.
Knows no model beyond its tokenizer (inside `render`), and no Ray.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.errors import RowError
from pipeline.knowledge.entities import Entity
from pipeline.knowledge.prompts import RenderedPrompt
from pipeline.knowledge.records import as_current, knowledge_schema
from pipeline.sides import Side
from pipeline.storage.atomic import read_json, write_json
from pipeline.storage.parquet import read_parquet, write_parquet
from pipeline.storage.run_folder import RunFolder
from retrieval_pools.router import Route

CARRIED_SHARD = "carried"
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

    `path` is the plan's Parquet file, relative to the run's folder; `is_apart` says that its rows are those that
    `plan_side` was asked to keep apart.
    """

    name: str  # of its files: "00000"
    side: Side
    group: str  # of its first row
    num_rows: int
    path: str
    is_apart: bool = False


@dataclass(frozen=True)
class RefusedRow:
    """An entity that cannot even be asked about."""

    entity_id: object
    reason: str


@dataclass(frozen=True)
class SidePlan:
    """Everything that a side's generation needs to know; counts are of entities."""

    side: Side
    num_entities: int
    num_carried_over: int
    routes: dict[str, int]  # scheme -> entities, over all of them
    shards: tuple[Shard, ...]
    refused: tuple[RefusedRow, ...]


class PreviousKnowledge:
    """The last published records of a side, looked up by entity.

    Parameters
    ----------
    table : knowledge records, or None on the first night.
    """

    def __init__(self, table: pa.Table | None) -> None:
        self.table = table
        self._row_of = {} if table is None else {key: row for row, key in enumerate(table["entity_id"].to_pylist())}
        self._fingerprints = [] if table is None else table["fingerprint"].to_pylist()

    def row_of(self, entity_id: object) -> int | None:
        """Row of the entity's record, or None."""
        return self._row_of.get(entity_id)

    def fingerprint(self, row: int) -> str:
        """What the record of that row was generated from."""
        return self._fingerprints[row]

    def token_ids(self, row: int) -> np.ndarray:
        """Token ids of the record's text, int32."""
        return np.asarray(self.table["token_ids"][row].values, dtype=np.int32)


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
    refused: list[RefusedRow] = []
    carried: list[int] = []
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
            refused.append(RefusedRow(entity.entity_id, error.reason))
            continue
        row = previous.row_of(entity.entity_id)
        if row is not None and not force and previous.fingerprint(row) == fingerprint:
            carried.append(row)
            continue
        rows.append(
            PlannedRow(
                entity_id=entity.entity_id,
                prompt_ids=rendered.token_ids,
                num_history=rendered.num_history,
                num_history_dropped=rendered.num_history_dropped,
                fingerprint=fingerprint,
                previous_ids=None if row is None else previous.token_ids(row),
                group=routed.group or None,
            )
        )
    table = knowledge_schema(entity_id_type).empty_table()
    if carried:
        table = as_current(previous.table.take(pa.array(sorted(carried))), entity_id_type)
    RunFolder(run_dir).write_shard(side, CARRIED_SHARD, table)  # empty too: a side without a text has its schema
    shard_size = shard_size or default_shard_size(len(rows), batch_size)
    shards = [
        _write_shard(side, number, some, entity_id_type, run_dir, is_apart)
        for number, (some, is_apart) in enumerate(_cut(rows, apart, shard_size))
    ]
    return SidePlan(side, num_entities, len(carried), routes, tuple(shards), tuple(refused))


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
    write_parquet(pa.table(columns), run_dir / path)
    return Shard(name, side, rows[0].group or "", len(rows), path, is_apart)


def read_shard(path: Path) -> list[PlannedRow]:
    """The rows of a shard's plan file."""
    table = read_parquet(path)
    lists = {name: table[name].combine_chunks() for name in ("prompt_ids", "previous_ids")}
    rows = []
    for number, row in enumerate(table.drop_columns(["prompt_ids", "previous_ids"]).to_pylist()):
        previous = lists["previous_ids"][number]
        rows.append(
            PlannedRow(
                **row,
                prompt_ids=np.asarray(lists["prompt_ids"][number].values, np.int32),
                previous_ids=np.asarray(previous.values, np.int32) if previous.is_valid else None,
            )
        )
    return rows


def split_shard(run_dir: Path, shard: Shard) -> tuple[Shard, Shard]:
    """The halves of a shard of two rows or more, which take its place in the plan, now and for later attempts."""
    table = read_parquet(run_dir / shard.path)
    middle = len(table) // 2
    halves = []
    for number, rows in enumerate((table[:middle], table[middle:])):
        name = f"{shard.name}-{number}"  # in the order of names the halves are where the shard was
        path = str(Path(shard.path).with_stem(name))
        write_parquet(rows, run_dir / path)
        halves.append(replace(shard, name=name, group=rows["group"][0].as_py() or "", num_rows=len(rows), path=path))
    plan_path = run_dir / "plan" / f"{shard.side}.json"
    plan = load_plan(plan_path)
    shards = [part for known in plan.shards for part in (halves if known == shard else [known])]
    save_plan(replace(plan, shards=tuple(shards)), plan_path)
    return tuple(halves)


def save_plan(plan: SidePlan, path: Path) -> None:
    """Write a side's plan; the file's existence says that all its shards are on disk."""
    write_json(asdict(plan), path)


def load_plan(path: Path) -> SidePlan | None:
    """A plan written by an earlier attempt at this run, or None."""
    if not path.exists():
        return None
    data = read_json(path)
    shards = tuple(Shard(**shard) for shard in data.pop("shards"))
    refused = tuple(RefusedRow(**row) for row in data.pop("refused"))
    return SidePlan(**data, shards=shards, refused=refused)
