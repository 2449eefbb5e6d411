"""A side's plan on disk: the rows to generate, by shard.

It is written before the first text is generated and depends only on the inputs. So a killed run finds its shards again.
If a part of the plan is lost, the side is planned again, and shards whose rows are the same stay finished.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.knowledge.prompts import RenderedPrompt, Shown
from laserbatch.pipeline.knowledge.questions import shown_of_row
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import read_json, sha256_file, write_json
from laserbatch.pipeline.storage.figures import Inside, ShardRecord
from laserbatch.pipeline.storage.parquet import iter_parquet, read_parquet, write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder

logger = logging.getLogger(__name__)

CARRIED_SHARD = "carried"  # records carried over (further ones are in "carried-00000" and on), and the quarantine rows
# of entities without a prompt
WAITING_SHARD = "waiting"  # earlier texts of rows whose new text is not due, or has no place in the budget
STALE_SHARD = "stale"  # earlier texts of rows in quarantine


@dataclass(frozen=True)
class PlannedRow:
    """An entity to generate a text for; its prompt is not rendered yet."""

    entity_id: str | int
    shown: Shown
    fingerprint: str
    previous_ids: np.ndarray | None  # int32, the entity's own earlier text
    group: str | None


@dataclass(frozen=True)
class RenderedRow(PlannedRow):
    prompt: RenderedPrompt


@dataclass(frozen=True)
class Shard:
    """Rows that one worker generates in one call."""

    name: Inside  # the stem of its files, such as "00000"
    side: Side
    group: str  # the pool group of its first row
    num_rows: int
    path: Inside  # the path of its Parquet file, relative to the run's folder
    sha256: str  # the checksum of that file
    is_isolated: bool = False  # whether its rows are from `Sharding.isolate_ids`


@dataclass(frozen=True)
class SidePlan:
    """The plan of a side; counts are of entities."""

    side: Side
    num_entities: int
    num_carried_over: int
    num_unpromptable: int  # entities quarantined without being written: no prompt, or the same one failed before
    routes: dict[str, int]  # routing scheme -> number of entities, over all entities
    shards: tuple[Shard, ...]
    num_waiting: int = 0  # entities that keep an earlier text, since a new one is not due or not in the budget
    num_without_text: int = 0  # postponed entities without a text: too few interactions, or not in the budget
    postponed: dict[str, int] = field(default_factory=dict)  # reason -> number of entities, of both kinds
    num_tokens: int = 0  # expected tokens of the shards' texts; 0 if there is no refresh rule


_PLAN = TypeAdapter(SidePlan)


def open_plan(
    folder: RunFolder, side: Side, make_plan: Callable[[], SidePlan]
) -> tuple[SidePlan, dict[str, ShardRecord]]:
    """The plan of a side and its finished shards; `make_plan` is called if there is no complete plan.

    Files of unfinished shards, and of shards of another plan, are deleted.
    """
    plan, finished = load_plan(folder.root, side), folder.shards(side).finished()
    if plan is None or not _is_whole(plan, finished, folder.root):
        folder.shards(side).drop_unfinished([name for name in finished if not is_by_plan(name)])
        plan = make_plan()
        save_plan(plan, folder.root)
        finished = folder.shards(side).finished()
    planned = {shard.name: shard.sha256 for shard in plan.shards}
    finished = {
        name: record
        for name, record in finished.items()
        if is_by_plan(name) or (record.info is not None and record.info.planned_sha256 == planned.get(name))
    }
    folder.shards(side).drop_unfinished(finished)
    return plan, finished


def is_by_plan(name: str) -> bool:
    """Whether a shard is written from a plan, without a model."""
    return name.startswith(CARRIED_SHARD) or name == WAITING_SHARD


def write_shard_plan(side: Side, name: str, rows: pa.Table, run_dir: Path, is_isolated: bool) -> Shard:
    """Write the rows of a shard for `read_shard`.

    The columns are `entity_id`, the columns of `SHOWN_SCHEMA`, `fingerprint`, `previous_ids` and `group`.
    """
    path = f"plan/{side}/{name}.parquet"
    written = write_parquet(rows, run_dir / path)
    return Shard(name, side, rows["group"][0].as_py() or "", len(rows), path, written.sha256, is_isolated)


def read_shard(path: Path) -> list[PlannedRow]:
    """The rows of a shard's plan file."""
    rows = []
    for batch in iter_parquet(path):
        for row, ids in zip(batch.drop_columns(["previous_ids"]).to_pylist(), batch["previous_ids"], strict=True):
            previous_ids = np.asarray(ids.values, np.int32) if ids.is_valid else None
            rows.append(PlannedRow(row["entity_id"], shown_of_row(row), row["fingerprint"], previous_ids, row["group"]))
    return rows


def split_shard(run_dir: Path, shard: Shard) -> tuple[Shard, Shard]:
    """Replace a shard of two or more rows by its halves, also in the plan, so that later attempts see them."""
    table = read_parquet(run_dir / shard.path)
    middle = len(table) // 2
    first, second = (
        write_shard_plan(shard.side, f"{shard.name}-{number}", rows, run_dir, shard.is_isolated)
        for number, rows in enumerate((table[:middle], table[middle:]))
    )  # sorted by name, the halves take the shard's place
    plan = load_plan(run_dir, shard.side)
    if plan is not None:
        shards = [part for planned in plan.shards for part in ((first, second) if planned == shard else [planned])]
        save_plan(replace(plan, shards=tuple(shards)), run_dir)
    return first, second


def save_plan(plan: SidePlan, run_dir: Path) -> None:
    """Write a side's plan; if the file exists, all its shards are on disk."""
    write_json(asdict(plan), _plan_path(run_dir, plan.side))


def load_plan(run_dir: Path, side: Side) -> SidePlan | None:
    """The plan that an earlier attempt at this run wrote; None if there is no complete one."""
    path = _plan_path(run_dir, side)
    if not path.exists():
        return None
    try:
        plan = _PLAN.validate_python(read_json(path))
    except (WorkspaceError, ValidationError) as error:
        logger.warning("the plan %s cannot be used, so the side is planned again: %s", path, error)
        return None
    counts = (plan.num_carried_over, plan.num_unpromptable, plan.num_waiting, plan.num_without_text)
    num_planned = sum((*counts, *(shard.num_rows for shard in plan.shards)))
    if num_planned != plan.num_entities:
        message = "the plan %s has only %d of its %d entities, so the side is planned again"
        logger.warning(message, path, num_planned, plan.num_entities)
        return None
    return plan


def drop_plan(run_dir: Path, side: Side) -> None:
    """Delete a side's plan, so that the next attempt makes a new one; finished shards with the same rows stay."""
    _plan_path(run_dir, side).unlink(missing_ok=True)


def _is_whole(plan: SidePlan, finished: Mapping[str, ShardRecord], run_dir: Path) -> bool:
    """Whether all files of a plan are there and unchanged: the inputs of its shards, and the records carried over."""
    carried = [record for name, record in finished.items() if name.startswith(CARRIED_SHARD)]
    counts = sum(record.num_rows for record in carried), sum(record.num_quarantined for record in carried)
    is_there = CARRIED_SHARD in finished and counts == (plan.num_carried_over, plan.num_unpromptable)
    lost = [] if is_there else [CARRIED_SHARD]
    waiting = finished.get(WAITING_SHARD)
    lost += [WAITING_SHARD] if plan.num_waiting != (0 if waiting is None else waiting.num_rows) else []
    postponed = RunFolder(run_dir).read_postponed(plan.side).num_rows
    lost += ["postponed"] if plan.num_waiting + plan.num_without_text != postponed else []
    paths = ((run_dir / shard.path, shard.sha256) for shard in plan.shards)
    lost += [path for path, sha256 in paths if not path.exists() or sha256_file(path) != sha256]
    if lost:
        logger.warning("%s of the plan of %ss is missing or changed; the side is planned again", lost[0], plan.side)
    return not lost


def _plan_path(run_dir: Path, side: Side) -> Path:
    return run_dir / "plan" / f"{side}.json"
