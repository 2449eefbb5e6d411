"""Tables to arrays that models index: interactions are read as a stream, and take some 55 bytes a row from then on.

The split goes by time, never at random: the knowledge of a date was made from what was known at the end of that day, so
everything up to then is training and only what comes later may judge. Vocabularies, bins, known ids and reductions come
from training rows alone.

A row is the numbers of its user and item, what was known of both before its moment, and where in one array of liked
items its user's history lies. What is known of an entity lies in tables by its number, and models gather from them.
"""

import datetime
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from laserbatch.ctr.errors import CtrError, NothingToJudge
from laserbatch.ctr.feature_set import SIDES, Basis, FeatureSet, SideVectors, align, check_provenance, fit_basis
from laserbatch.ctr.fields import Encoder, Field, fit_encoders
from laserbatch.ctr.labels import LabelRule, sample_negatives
from laserbatch.ctr.settings import CtrSettings

BATCH_ROWS = 1 << 20  # of interactions that are read at once
PRIOR_ROWS = 5  # as many rows of mean rate are added to every entity's own
LOG_SCALE = 4.0  # log(1 + count) and rates above the mean come to about one
PAST_COLUMNS = ("user_count", "user_rate", "item_count", "item_rate", "history_length")

logger = logging.getLogger(__name__)


class EntityTables(Protocol):
    """What is needed of the input tables; interactions may be a data set of Parquet files, which is streamed."""

    users: pa.Table
    items: pa.Table
    interactions: pa.Table | ds.Dataset


@dataclass(frozen=True)
class Log:
    """Labelled interactions in order of time; of one moment by user and item."""

    users: np.ndarray  # int32 (n,) entity numbers, rows of the entity tables
    items: np.ndarray  # int32 (n,)
    times_us: np.ndarray  # int64 (n,), since 1970 UTC, non-decreasing
    labels: np.ndarray  # float32 (n,), 1 for a positive


@dataclass(frozen=True)
class Rows:
    """What models see of rows to score, besides fields and knowledge of their entities."""

    users: np.ndarray  # int32 (n,)
    items: np.ndarray  # int32 (n,)
    past: np.ndarray  # float32 (n, len(PAST_COLUMNS)), of what came strictly before the row's moment
    liked: np.ndarray  # int32 (num_positives,) items, by user, a user's in order of time
    starts: np.ndarray  # int32 (n,): `liked[starts:ends]` is the row's history, oldest first
    ends: np.ndarray  # int32 (n,)


@dataclass(frozen=True)
class ModelRows(Rows):
    """Rows with the fields of their entities: with knowledge all that a model is built of and scores."""

    user_fields: tuple[Field, ...]  # codes by entity number
    item_fields: tuple[Field, ...]

    @property
    def num_items(self) -> int:
        """Items of the table."""
        return len(self.item_fields[0].codes)


@dataclass(frozen=True)
class CtrData(ModelRows):
    """Everything but knowledge, the same for every variant, model and seed; rows are in chronological order."""

    times_us: np.ndarray  # int64 (n,)
    labels: np.ndarray  # float32 (n,)
    is_cold: np.ndarray  # bool (n,), rows of users with little behaviour up to the date
    train: np.ndarray  # int32 row indices
    validation: np.ndarray
    test: np.ndarray
    prior: float  # share of positives in training
    encoders: dict[str, list[Encoder]]  # by side


@dataclass(frozen=True)
class Knowledge:
    """One variant's features, in the order of the entity tables."""

    user: SideVectors
    item: SideVectors
    basis: Basis


def build_dataset(tables: EntityTables, as_of: datetime.date, settings: CtrSettings) -> CtrData:
    """Split the interactions at the run's date and turn ids, attributes and histories into numbers.

    Raises CtrError where nothing precedes or follows the date, a part has rows of one label only, so that no AUC
    exists, the label cannot be told, or an interaction is of an unknown entity.
    """
    log = labelled_log(tables, as_of, settings)
    parts = split_by_time(log, as_of, settings)
    train = slice(0, len(parts["train"]))
    num_of = {"user": tables.users.num_rows, "item": tables.items.num_rows}
    seen = {"user": np.bincount(log.users[train], minlength=num_of["user"])}
    seen["item"] = np.bincount(log.items[train], minlength=num_of["item"])
    encoders = {
        side: fit_encoders(table, f"{side}_id", seen[side], settings.min_id_interactions)
        for side, table in (("user", tables.users), ("item", tables.items))
    }
    prior = float(log.labels[train].mean(dtype=np.float64))
    rows = rows_before(log, log.users, log.items, log.times_us, settings.max_history, prior)
    return CtrData(
        **vars(rows),
        times_us=log.times_us,
        labels=log.labels,
        is_cold=seen["user"][log.users] < settings.cold_max_interactions,
        **parts,
        prior=prior,
        encoders=encoders,
        user_fields=tuple(encoder.encode(tables.users) for encoder in encoders["user"]),
        item_fields=tuple(encoder.encode(tables.items) for encoder in encoders["item"]),
    )


def labelled_log(tables: EntityTables, as_of: datetime.date, settings: CtrSettings) -> Log:
    """The interactions of known label, with sampled negatives where every one is a positive."""
    log = read_log(tables, settings.label)
    if LabelRule.parse(settings.label).column is not None:
        return log
    return with_negatives(log, tables.items.num_rows, _end_of_day_us(as_of), settings)


def read_log(tables: EntityTables, label: str) -> Log:
    """The interactions of known label, read in batches. Raises CtrError as `build_dataset` does."""
    rule, source = LabelRule.parse(label), tables.interactions
    if rule.column is not None and rule.column not in source.schema.names:
        raise CtrError(
            f"interactions have no column {rule.column!r}, of which ctr.label ({label}) tells positives; there are "
            f"{', '.join(source.schema.names)}. Name another as ctr.label, or set it to `all`: every interaction is a "
            "positive then, and negatives are sampled"
        )
    source = source if isinstance(source, ds.Dataset) else ds.dataset(source)
    num_rows, num_read, num_unknown = source.count_rows(), 0, 0
    users, items = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    times_us, labels = np.empty(num_rows, np.int64), np.ones(num_rows, np.float32)
    known = {side: getattr(tables, f"{side}s")[f"{side}_id"].combine_chunks() for side in SIDES}
    columns = dict.fromkeys(["user_id", "item_id", "timestamp", *([rule.column] if rule.column else [])])
    for batch in source.to_batches(columns=list(columns), batch_size=BATCH_ROWS, batch_readahead=1):
        if rule.column is not None:
            is_positive = rule.labels(batch[rule.column])
            num_unknown += is_positive.null_count
            batch = batch.filter(pc.is_valid(is_positive))
            is_positive = is_positive.drop_null()
        place = slice(num_read, num_read := num_read + len(batch))
        if rule.column is not None:
            labels[place] = is_positive.to_numpy(zero_copy_only=False)
        users[place] = numbers_of(batch["user_id"], known["user"], "user", "interactions")
        items[place] = numbers_of(batch["item_id"], known["item"], "item", "interactions")
        times_us[place] = to_us(batch["timestamp"])
    if num_unknown:
        logger.warning(
            "%d of %d interactions have no %s and are left out (`%s is not null` as ctr.label makes them negatives)",
            num_unknown, num_rows, rule.column, rule.column,
        )  # fmt: skip
    users, items, times_us, labels = (column[:num_read] for column in (users, items, times_us, labels))
    order = np.lexsort((labels, items, users, times_us))
    return Log(users[order], items[order], times_us[order], labels[order])


def to_us(times: pa.Array) -> np.ndarray:
    """Timestamps of any unit, or integer seconds since 1970, as microseconds: int64 (n,)."""
    if times.null_count:
        raise CtrError(f"{times.null_count} rows have no timestamp")
    if pa.types.is_integer(times.type):
        return times.cast(pa.int64()).to_numpy() * 1_000_000
    return times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()).to_numpy()


def numbers_of(ids: pa.Array, known: pa.Array, side: str, table: str) -> np.ndarray:
    """Rows of the entity table, int32 (n,). Raises CtrError on an unknown id, or ids of another type."""
    if (pa.types.is_integer(ids.type) and pa.types.is_integer(known.type)) or pa.types.is_large_string(ids.type):
        ids = ids.cast(known.type)
    elif pa.types.is_dictionary(ids.type):
        ids = ids.dictionary_decode().cast(known.type)
    if ids.type != known.type:
        raise CtrError(f"{table} have {side} ids of type {ids.type}, the table of {side}s {known.type}")
    positions = pc.index_in(ids, known)
    if positions.null_count:
        unknown = ids.filter(pc.is_null(positions))[0].as_py()
        raise CtrError(
            f"{positions.null_count} rows of {table} are of unknown {side}s (the first: {unknown!r}); check the tables"
        )
    return np.array(positions)


def with_negatives(log: Log, num_items: int, end_us: int, settings: CtrSettings) -> Log:
    """A log of positives with the sampled negatives that settings ask for, each at the moment of a positive."""
    rows, items = sample_negatives(
        log.users, log.items, int(np.searchsorted(log.times_us, end_us)), num_items,
        settings.negatives_per_positive, settings.negatives_by, settings.seed,
    )  # fmt: skip
    users = np.concatenate([log.users, log.users[rows]])
    times_us, labels = np.concatenate([log.times_us, log.times_us[rows]]), np.ones(len(users), np.float32)
    items, labels[len(log.users) :] = np.concatenate([log.items, items]), 0
    order = np.lexsort((labels, items, users, times_us))
    return Log(users[order], items[order], times_us[order], labels[order])


def split_by_time(log: Log, as_of: datetime.date, settings: CtrSettings) -> dict[str, np.ndarray]:
    """Rows of `train`, `validation` and `test`, int32; rows of one moment stay in one part.

    Training ends with the day `as_of` (UTC); `validation_share` is the first part of what comes after it. Raises
    CtrError where nothing precedes or follows the date, or a part has rows of one label only, so that no AUC exists.
    """
    times_us = log.times_us
    num_train = first_test = int(np.searchsorted(times_us, _end_of_day_us(as_of)))
    num_after = len(times_us) - num_train
    if not num_train:
        raise CtrError(f"no interactions up to {as_of}: nothing to train on; give a later date")
    if not num_after:
        raise NothingToJudge(
            f"no interactions after {as_of}: nothing can judge the models; give an earlier date, or wait until "
            "the tables hold the days after it"
        )
    first_test_us = times_us[num_train + min(round(num_after * settings.validation_share), num_after - 1)]
    first_test = int(np.searchsorted(times_us, first_test_us))
    train, validation, test = np.split(np.arange(len(times_us), dtype=np.int32), [num_train, first_test])
    for name, rows in (("train", train), ("validation", validation), ("test", test)):
        of_part = log.labels[rows]
        if len(of_part) == 0 or of_part.min() == of_part.max():
            raise (CtrError if name == "train" else NothingToJudge)(
                f"the {name} part around {as_of} has {int(of_part.sum())} positives among {len(of_part)} rows "
                f"({settings.label}); both labels are needed: set ctr.label, or choose another date"
            )
    return {"train": train, "validation": validation, "test": test}


def _end_of_day_us(day: datetime.date) -> int:
    next_day = datetime.datetime.combine(day, datetime.time(), datetime.UTC) + datetime.timedelta(days=1)
    return int(next_day.timestamp()) * 1_000_000


def rows_before(
    log: Log, users: np.ndarray, items: np.ndarray, times_us: np.ndarray, max_history: int, prior: float
) -> Rows:
    """Rows to score as models see them, (n,) users, items and times: from what the log has strictly before each moment.

    A row sees neither itself nor anything of its own moment or later, whatever part of the split those rows are in.
    The same for rows of the log itself and for pairs that somebody asks for.
    """
    moment_of_row = np.cumsum(np.r_[False, log.times_us[1:] != log.times_us[:-1]], dtype=np.int32)
    moments = moment_of_row if times_us is log.times_us else _moments(log.times_us, moment_of_row, times_us)
    num_moments = int(moment_of_row[-1]) + 2
    past = np.empty((len(users), len(PAST_COLUMNS)), np.float32)
    for place, of_log, of_rows in ((0, log.users, users), (2, log.items, items)):
        keys = of_log.astype(np.int64) * num_moments + moment_of_row
        order = np.argsort(keys, kind="stable")
        positives = np.concatenate([np.zeros(1, np.int32), np.cumsum(log.labels[order] > 0, dtype=np.int32)])
        starts, ends = _between(keys[order], of_rows, moments, num_moments)
        counts, liked = ends - starts, positives[ends] - positives[starts]
        past[:, place] = np.log1p(counts) / LOG_SCALE
        past[:, place + 1] = ((liked + PRIOR_ROWS * prior) / (counts + PRIOR_ROWS) - prior) * LOG_SCALE
        del keys, order, positives, starts, ends, counts, liked
    positives = np.flatnonzero(log.labels > 0)
    keys = log.users[positives].astype(np.int64) * num_moments + moment_of_row[positives]
    order = np.argsort(keys, kind="stable")
    starts, ends = _between(keys[order], users, moments, num_moments)
    starts = np.maximum(starts, ends - max_history)
    past[:, 4] = np.log1p(ends - starts) / LOG_SCALE
    return Rows(users, items, past, log.items[positives[order]], starts, ends)


def _moments(log_times_us: np.ndarray, moment_of_row: np.ndarray, times_us: np.ndarray) -> np.ndarray:
    """The first moment of the log that is not before each time, as its number."""
    return np.append(moment_of_row, moment_of_row[-1] + 1)[np.searchsorted(log_times_us, times_us)]


def _between(
    sorted_keys: np.ndarray, numbers: np.ndarray, moments: np.ndarray, num_moments: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of each (entity, moment) where its entity's keys begin, and where those of its moment would: int32 (n,) each."""
    keys = numbers.astype(np.int64) * num_moments + moments
    order = np.argsort(keys)  # neighbours look up neighbours: of 20 million rows ten times as fast
    ends, starts = np.empty(len(keys), np.int32), np.empty(len(keys), np.int32)
    ends[order] = np.searchsorted(sorted_keys, keys[order])
    firsts = np.searchsorted(sorted_keys, np.arange(int(numbers.max(initial=0)) + 1, dtype=np.int64) * num_moments)
    starts[:] = firsts[numbers]
    return starts, ends


def build_knowledge(
    tables: EntityTables,
    data: CtrData,
    variants: Mapping[str, FeatureSet],
    as_of: datetime.date,
    settings: CtrSettings,
) -> dict[str, Knowledge]:
    """Features of each variant, aligned with the entities and reduced by one basis.

    Raises CtrError when they are of a later date, of another id type, twice for an id, not finite, or of encoders of
    different widths.
    """
    if not variants:
        return {}
    for features in variants.values():
        check_provenance(features, as_of)
    is_trained = {
        side: np.bincount(numbers[data.train], minlength=len(fields[0].codes)) > 0
        for side, numbers, fields in (("user", data.users, data.user_fields), ("item", data.items, data.item_fields))
    }
    aligned = {name: align_sides(tables, features) for name, features in variants.items()}
    basis = fit_basis(aligned, is_trained, settings.vector_dim)
    return {name: Knowledge(**basis.reduce(sides), basis=basis) for name, sides in aligned.items()}


def align_sides(tables: EntityTables, features: FeatureSet) -> dict[str, SideVectors]:
    """Features of both sides in the order of the entity tables. Raises CtrError as `align` does."""
    ids = {side: getattr(tables, f"{side}s")[f"{side}_id"].combine_chunks() for side in SIDES}
    return {side: align(features[side], side, ids[side]) for side in SIDES}
