"""Entities that get no new text tonight: `refresh` postpones them, or the same prompt failed before.

A quarantine row without a text (a lost worker, a prompt that is too long, an empty answer) is tried again: that costs
little, or may succeed. A row with a text is not tried every night, since the model would write the same.
"""

import datetime
import math
import zlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.knowledge.questions import SideQuestions
from laserbatch.pipeline.knowledge.records import PreviousKnowledge
from laserbatch.pipeline.planning.refresh import BUDGET, EVIDENCE, NOT_DUE, Candidates, RefreshSettings, decide
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.storage.run_folder import POSTPONED, RunFolder
from laserbatch.pipeline.tables.read import Tables
from laserbatch.retrieval_pools.ids import rows_among

ROWS_AT_ONCE = 1024 * 1024
DAYS_BETWEEN_TRIES = 7  # after which other drafts may lead to another text, or a newer parser may accept it
_SEEN = ["run_id", "num_tokens", "num_history", "num_history_dropped"]


@dataclass(frozen=True)
class Refresh:
    """The inputs of a night's refresh decisions."""

    settings: RefreshSettings
    date: datetime.date
    max_tokens: float | None  # token limit of this side tonight; None: no limit
    usual_tokens: int  # expected tokens of a text if there are no earlier texts
    waiting: pa.Table  # entities that the previous night postponed, as `run_folder.POSTPONED`


def interactions_of(tables: Tables, side: Side) -> np.ndarray:
    """The number of interactions of each entity of a side: int64[num_entities]."""
    codes, rows = tables.coded(side)
    counts = np.zeros(len(rows), np.int64)
    for start in range(0, len(codes), ROWS_AT_ONCE):  # numpy copies what it counts to 64 bits
        counts += np.bincount(codes[start : start + ROWS_AT_ONCE], minlength=len(rows))
    per_entity = np.zeros(tables.entities(side).num_rows, np.int64)
    per_entity[rows[rows >= 0]] = counts[rows >= 0]
    return per_entity


@dataclass(frozen=True)
class Chosen:
    """The decision about changed entities: those that get a new text, and those that are postponed."""

    is_written: np.ndarray  # bool[n]
    scores: np.ndarray  # float64[n], the value of each new text
    postponed: pa.Table  # with the schema POSTPONED
    num_tokens: int  # expected tokens of the new texts


def choose(
    refresh: Refresh,
    questions: SideQuestions,
    previous: PreviousKnowledge,
    rows: np.ndarray,
    fingerprints: pa.Array,
    before: np.ndarray,
) -> Chosen:
    """Decide which entities get a new text, among those of a side whose prompt differs from the prompt of their text.

    `rows` and `before`, int64[n], are the entities' rows and those of their earlier records (-1: none).
    """
    side = questions.side
    entity_ids = questions.entities[f"{side}_id"].combine_chunks().take(pa.array(rows))
    num_interactions = questions.num_events(rows) if side == "user" else interactions_of(questions.tables, side)[rows]
    has_text = before >= 0
    seen, since = num_interactions.copy(), np.zeros(len(before), np.int32)
    num_tokens = np.full(len(before), float(refresh.usual_tokens))
    if has_text.any():
        last = previous.values(before[has_text], _SEEN)
        if side == "user":  # the number of an item's interactions does not say what is new about it
            seen[has_text] = last["num_history"].to_numpy() + last["num_history_dropped"].to_numpy()
        written_on = pc.utf8_slice_codeunits(last["run_id"], 0, 10).cast(pa.date32())
        since[has_text] = written_on.cast(pa.int32()).to_numpy()
        num_tokens[has_text] = last["num_tokens"].to_numpy()
        num_tokens[~has_text] = num_tokens[has_text].mean()
    since[~has_text] = _waiting_since(refresh, entity_ids).cast(pa.int32()).to_numpy()[~has_text]
    today = (refresh.date - datetime.date(1970, 1, 1)).days
    earlier = previous.fingerprints(before).cast(pa.string())
    same_but_history = pc.fill_null(pc.equal(_without_history(earlier), _without_history(fingerprints)), False)
    candidates = Candidates(
        has_text=has_text,
        is_changed_beyond_history=~same_but_history.to_numpy(False),
        num_interactions=num_interactions,
        num_seen=seen,
        age_days=np.maximum(today - since, 0).astype(float),
        num_tokens=num_tokens,
    )
    decided = decide(candidates, refresh.settings, refresh.max_tokens)
    left = np.flatnonzero(~decided.is_written)
    columns = [
        entity_ids.take(pa.array(left)),
        pa.array(np.where(decided.is_over_budget[left], BUDGET, NOT_DUE).tolist(), pa.string()),
        pa.array(has_text[left]),
        pa.array(decided.scores[left]),
        pa.array(since[left].astype(np.int32)).cast(pa.date32()),
    ]
    postponed = pa.Table.from_arrays(columns, schema=_schema(entity_ids.type))
    return Chosen(decided.is_written, decided.scores, postponed, math.ceil(num_tokens[decided.is_written].sum()))


def without_evidence(refresh: Refresh, entity_ids: pa.Array) -> pa.Table:
    """Entities with too few interactions for a text, as `POSTPONED`."""
    n = len(entity_ids)
    columns = [entity_ids, pa.repeat(EVIDENCE, n), pa.repeat(False, n), pa.nulls(n, pa.float64())]
    return pa.Table.from_arrays([*columns, _waiting_since(refresh, entity_ids)], schema=_schema(entity_ids.type))


def write_postponed(folder: RunFolder, side: Side, postponed: pa.Table | None) -> None:
    """Write the postponed entities; no file if there are none."""
    path = folder.postponed_path(side)
    if postponed is None or not len(postponed):
        path.unlink(missing_ok=True)
    else:
        write_parquet(postponed, path)


def unusable_texts(rows: pa.Table | None, date: datetime.date) -> pa.Table | None:
    """Rows of the last quarantine that are not tried again on a date unless their prompt changes.

    Each entity is tried again on one night a week; the entities are spread over the nights.
    """
    if rows is None:
        return None
    has_text = pc.not_equal(pc.utf8_trim_whitespace(rows["text"]), "")
    failed = rows.filter(pc.and_(has_text, rows["fingerprint"].is_valid()))
    if not len(failed):
        return failed
    turns = [zlib.crc32(str(key).encode("utf-8", "backslashreplace")) for key in failed["entity_id"].to_pylist()]
    return failed.filter(pa.array((np.array(turns) + date.toordinal()) % DAYS_BETWEEN_TRIES != 0))


def still_failing(unusable: pa.Table, entity_ids: pa.Array, fingerprints: pa.Array) -> np.ndarray:
    """The row in `unusable` with each entity and its fingerprint, int64[n]; -1 if there is none."""
    rows = rows_among(entity_ids, unusable["entity_id"])
    then = unusable["fingerprint"].combine_chunks().take(pa.array(rows, mask=rows < 0))
    return np.where(pc.fill_null(pc.equal(then, fingerprints), False), rows, -1)


def _waiting_since(refresh: Refresh, entity_ids: pa.Array) -> pa.Array:
    """The date since which entities without a text wait: the first night that postponed them, otherwise tonight."""
    tonight = pa.scalar(refresh.date, pa.date32())
    waiting = refresh.waiting.filter(pc.invert(refresh.waiting["has_text"]))
    rows = rows_among(entity_ids, waiting["entity_id"])
    return pc.fill_null(waiting["since"].combine_chunks().take(pa.array(rows, mask=rows < 0)), tonight)


def _schema(entity_id_type: pa.DataType) -> pa.Schema:
    return POSTPONED.set(0, pa.field("entity_id", entity_id_type, nullable=False))


def _without_history(fingerprints: pa.Array) -> pa.Array:
    """Fingerprints without their last part, which is for the history."""
    return pc.replace_substring_regex(fingerprints, "-[^-]*$", "")
