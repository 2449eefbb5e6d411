"""Reads, labels and splits the log of interactions on which models are trained and judged.

The split is by time, never random: the knowledge of a date was made from what was known at the end of that day, so only
later interactions may judge it. Only negatives are drawn at random, if every interaction is a positive.
"""

import datetime
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from laserbatch.ctr.errors import CtrError, NothingToJudge
from laserbatch.ctr.feature_set import SIDES
from laserbatch.ctr.fields import plain
from laserbatch.ctr.labels import LabelRule, sample_negatives
from laserbatch.ctr.settings import CtrSettings

BATCH_ROWS = 1 << 20  # interactions that are read at once
MAX_LABEL_VALUES = 8  # a message names at most this many
SPLIT_TRAIN_SHARE = 0.5  # training share of the rows after the date, with `history: split`

logger = logging.getLogger(__name__)


class EntityTables(Protocol):
    """The input tables, with ids and times in the types in which they are read; interactions are a table or a stream
    with the methods of an Arrow data set."""

    @property
    def users(self) -> pa.Table: ...
    @property
    def items(self) -> pa.Table: ...
    @property
    def interactions(self) -> Any: ...  # a pa.Table, or an object with `schema`, `count_rows` and `to_batches`


@dataclass(frozen=True)
class Log:
    """Labelled interactions in order of time, then of user and item."""

    users: np.ndarray  # int32 (n,) entity numbers, rows of the entity tables
    items: np.ndarray  # int32 (n,)
    times_us: np.ndarray  # int64 (n,), since 1970 UTC, non-decreasing
    labels: np.ndarray  # float32 (n,), 1 for a positive
    label_values: str = ""  # text with the first different values of the label's column


def labelled_log(tables: EntityTables, as_of: datetime.date, settings: CtrSettings) -> Log:
    """The interactions with a known label, with sampled negatives if every interaction is a positive."""
    log = read_log(tables, settings.label)
    if LabelRule.parse(settings.label).column is not None:
        return log
    return with_negatives(log, tables.items.num_rows, _end_of_day_us(as_of), settings)


def read_log(tables: EntityTables, label: str) -> Log:
    """Read the interactions with a known label in batches. Raises CtrError as `build_dataset` does."""
    rule, source = LabelRule.parse(label), tables.interactions
    if rule.column is not None and rule.column not in source.schema.names:
        raise CtrError(
            f"interactions have no column {rule.column!r}, which ctr.label ({label}) reads; there are "
            f"{', '.join(source.schema.names)}. Use another column in ctr.label (for example `event == 'purchase'`), "
            "or set it to `all`, which makes every interaction a positive and samples negatives"
        )
    source = ds.dataset(source) if isinstance(source, pa.Table) else source
    num_rows, num_read, num_unlabelled, num_left = source.count_rows(), 0, 0, 0
    users, items = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    times_us, labels = np.empty(num_rows, np.int64), np.ones(num_rows, np.float32)
    table_ids = ids_of(tables)
    for side, ids in table_ids.items():
        _require_distinct(ids, side)
    columns = dict.fromkeys(["user_id", "item_id", "timestamp", *([rule.column] if rule.column else [])])
    is_positive, label_values = None, {}
    for batch in source.to_batches(columns=list(columns), batch_size=BATCH_ROWS):
        if rule.column is not None:
            is_positive = rule.labels(batch[rule.column])
            if rule.value is not None and len(label_values) < MAX_LABEL_VALUES:
                label_values |= dict.fromkeys(pc.unique(batch[rule.column]).drop_null()[:MAX_LABEL_VALUES].to_pylist())
            num_unlabelled += is_positive.null_count
            batch = batch.filter(pc.is_valid(is_positive))
            is_positive = is_positive.drop_null()
        of_user, of_item = (_rows_of(batch[f"{side}_id"], table_ids[side], side, "interactions") for side in SIDES)
        has_entities = (of_user >= 0) & (of_item >= 0)
        num_left += len(batch) - (num_valid := int(has_entities.sum()))
        place = slice(num_read, num_read := num_read + num_valid)
        if is_positive is not None:
            labels[place] = is_positive.to_numpy(zero_copy_only=False)[has_entities]
        users[place], items[place] = of_user[has_entities], of_item[has_entities]
        times = batch["timestamp"]
        if times.null_count:
            raise CtrError("interactions, column timestamp: found null; expected a time in every row")
        in_us = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()).to_numpy()
        times_us[place] = in_us[has_entities]
    if num_left and not num_read:
        raise CtrError(
            f"none of {num_left} labelled interactions has a user and an item of the tables; expected their ids as in "
            f"the tables (the first: {', '.join(repr(ids[0].as_py()) for ids in table_ids.values() if len(ids))})"
        )
    if num_left:
        logger.warning("%d of %d interactions are left out: their user or item is in no table", num_left, num_rows)
    if num_unlabelled:
        logger.warning(
            "%d of %d interactions have no %s and are left out (set ctr.label to `%s is not null` for negatives)",
            num_unlabelled, num_rows, rule.column, rule.column,
        )  # fmt: skip
    similar = [other for other in map(str, label_values) if other.strip().lower() == str(rule.value).strip().lower()]
    if isinstance(rule.value, str) and {*similar} > {rule.value}:
        logger.warning("ctr.label (%s) takes only one of the values %s of %s", label, similar, rule.column)
    users, items, times_us, labels = (column[:num_read] for column in (users, items, times_us, labels))
    order = np.lexsort((labels, items, users, times_us))
    values = ", ".join(map(repr, [*label_values][:MAX_LABEL_VALUES]))
    found = f"; {rule.column} has values such as {values}" if values else ""
    return Log(users[order], items[order], times_us[order], labels[order], found)


def ids_of(tables: EntityTables) -> dict[str, pa.Array]:
    """The ids of the entities of both sides, in the order of their tables."""
    return {side: getattr(tables, f"{side}s")[f"{side}_id"].combine_chunks() for side in SIDES}


def _require_distinct(ids: pa.Array, side: str) -> None:
    is_bad = pc.index_in(ids, ids).to_numpy() != np.arange(len(ids))  # index_in finds the first of equal ids
    is_bad |= ids.is_null().to_numpy(zero_copy_only=False)
    if is_bad.any():
        row = int(np.argmax(is_bad))
        raise CtrError(
            f"the {side}s table has the id {ids[row].as_py()!r} in row {row}; expected each id once, and no null. "
            "`laserbatch data check` lists all such rows"
        )


def numbers_of(ids: pa.Array, table_ids: pa.Array, side: str, table: str) -> np.ndarray:
    """The row of each id in the entity table, int32 (n,). Raises CtrError on an unknown id, or ids of another type."""
    rows = _rows_of(ids, table_ids, side, table)
    if (is_unknown := rows < 0).any():
        first = int(np.argmax(is_unknown))
        raise CtrError(
            f"{is_unknown.sum()} of {len(rows)} rows of {table} have a {side} that is not in the table of {side}s (the "
            f"first: {ids[first].as_py()!r}, row {first}). Leave these rows out, or give tables with these {side}s"
        )
    return rows


def _rows_of(ids: pa.Array, table_ids: pa.Array, side: str, table: str) -> np.ndarray:
    """The row of each id in the entity table, int32 (n,), -1 if unknown. Raises CtrError on ids of another type."""
    if plain(ids.type) != plain(table_ids.type):
        raise CtrError(
            f"{table}, column {side}_id: found ids of type {ids.type}, expected {table_ids.type}, as in the table of "
            f"{side}s; write both in one type (`laserbatch data import` does with `ids: {{{side}_id: string}}`)"
        )
    return np.array(pc.fill_null(pc.index_in(ids, table_ids), -1))


def with_negatives(log: Log, num_items: int, end_us: int, settings: CtrSettings) -> Log:
    """Add sampled negatives to a log of positives, each at the moment of a positive."""
    num_train = int(np.searchsorted(log.times_us, end_us))
    if settings.history == "split":
        num_train += round((len(log.users) - num_train) * SPLIT_TRAIN_SHARE)
    per_positive, seed = settings.negatives_per_positive, settings.seed
    rows, items = sample_negatives(log.users, log.items, num_train, num_items, per_positive, seed)
    users = np.concatenate([log.users, log.users[rows]])
    times_us, labels = np.concatenate([log.times_us, log.times_us[rows]]), np.ones(len(users), np.float32)
    items, labels[len(log.users) :] = np.concatenate([log.items, items]), 0
    order = np.lexsort((labels, items, users, times_us))
    return Log(users[order], items[order], times_us[order], labels[order])


def split_by_time(log: Log, as_of: datetime.date, settings: CtrSettings) -> dict[str, np.ndarray]:
    """The rows of `train`, `validation` and `test`, int32; rows of one moment stay in one part.

    Training ends with the day `as_of` (UTC); the first `validation_share` of later rows is validation, the rest test.
    With `history: split` training is the first `SPLIT_TRAIN_SHARE` of the later rows, and the rest is split likewise.
    Raises CtrError if nothing precedes or follows the date, or a part has rows of only one label, so that it has no
    AUC.
    """
    times_us, is_split = log.times_us, settings.history == "split"
    first, num = int(np.searchsorted(times_us, _end_of_day_us(as_of))), len(times_us)

    def part_way(start: int, share: float) -> int:
        return int(np.searchsorted(times_us, times_us[start + min(round((num - start) * share), num - start - 1)]))

    if not num:
        raise CtrError(f"no interaction has a label: {settings.label} is unknown for all; set ctr.label")
    if not first:
        raise CtrError(f"no interactions up to {as_of}: nothing to train on; give a later date")
    if first == num:
        raise NothingToJudge(
            f"no interactions after {as_of}, so the models cannot be judged; give an earlier date, or wait until "
            "the tables have later interactions"
        )
    num_train = part_way(first, SPLIT_TRAIN_SHARE) if is_split else first
    first_test = part_way(num_train, settings.validation_share)
    _, *rows_of_parts = np.split(np.arange(num, dtype=np.int32), [first if is_split else 0, num_train, first_test])
    parts: dict[str, np.ndarray] = dict(zip(("train", "validation", "test"), rows_of_parts, strict=True))
    for name, rows in parts.items():
        of_part = log.labels[rows]
        if len(of_part) == 0:
            raise NothingToJudge(
                f"the {name} part around {as_of} has no rows: interactions of one time stay together, and those after "
                "the date have too few different times to be divided; give an earlier date, or wait for later days"
            )
        if of_part.min() == of_part.max():
            raise (CtrError if name == "train" and not is_split else NothingToJudge)(
                f"the {name} part around {as_of} has {int(of_part.sum())} positives among {len(of_part)} rows "
                f"({settings.label}{log.label_values}); both labels are needed: set ctr.label, or choose another date"
            )
    return parts


def _end_of_day_us(day: datetime.date) -> int:
    next_day = datetime.datetime.combine(day, datetime.time(), datetime.UTC) + datetime.timedelta(days=1)
    return int(next_day.timestamp()) * 1_000_000
