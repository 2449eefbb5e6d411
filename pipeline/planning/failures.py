"""Who failed before by the same question and is not asked again: the model would answer the same.

It asks an earlier run's quarantine. A row without a text of the model's (a lost worker, a prompt that is too long) says
nothing of the next try, and costs little or may succeed.
"""

import datetime
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.run_folder import RunFolder

DAYS_BETWEEN_TRIES = 7  # by then other drafts, or a newer parser, may make another text of it, or keep it


def unusable_texts(previous: RunFolder | None, side: Side, date: datetime.date) -> pa.Table | None:
    """Rows of a run's quarantine whose text is not asked for again on a date unless it is asked otherwise.

    Everybody has one night of a week to try again, not all the same.
    """
    if previous is None:
        return None
    rows = previous.read_quarantine(side)
    rows = rows.filter(pc.and_(rows["text"].is_valid(), rows["fingerprint"].is_valid()))
    if not len(rows):
        return rows
    turns = [zlib.crc32(str(key).encode("utf-8", "backslashreplace")) for key in rows["entity_id"].to_pylist()]
    return rows.filter(pa.array((np.array(turns) + date.toordinal()) % DAYS_BETWEEN_TRIES != 0))


def failing_still(unusable: pa.Table | None, entity_ids: pa.Array, fingerprints: pa.Array) -> np.ndarray:
    """The row of each entity in `unusable` that has the same fingerprint: int64[n], -1 without one."""
    if unusable is None or not len(unusable) or unusable["entity_id"].type != entity_ids.type:
        return np.full(len(entity_ids), -1)
    rows = pc.index_in(entity_ids, value_set=unusable["entity_id"].combine_chunks())
    then = unusable["fingerprint"].combine_chunks().take(rows)
    return pc.if_else(pc.fill_null(pc.equal(then, fingerprints), False), rows, -1).to_numpy(False).astype(np.int64)
