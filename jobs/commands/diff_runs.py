"""The difference between two runs: entities whose text changed, and why, and entities that were added or removed."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.knowledge.prompts import changed_parts
from laserbatch.pipeline.knowledge.records import knowledge_schema
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.run_folder import RunFolder

WRITTEN_AGAIN = "written again"  # the reason if the fingerprint did not change: --force


@dataclass(frozen=True)
class NamedEntity:
    """An entity, the reason why it is named, and its texts if its text changed."""

    entity_id: str | int
    reason: str  # parts of the fingerprint, joined by "+", or a sentence
    before: str | None = None
    after: str | None = None


@dataclass(frozen=True)
class SideDiff:
    """The changes of a side's entities from one run to another: counts by kind, and a few named entities of each."""

    num_unchanged: int
    num_regenerated_same: int  # written again, with the same text
    num_changed: int
    num_added: int
    num_removed: int
    reasons: dict[str, int]  # number of changed texts by reason, the most frequent first
    changed: list[NamedEntity]
    added: list[NamedEntity]
    removed: list[NamedEntity]


def diff_side(before: RunFolder, after: RunFolder, side: Side, num_named: int) -> SideDiff:
    """Compare a side of two runs; name up to `num_named` entities of each kind, in the order of their ids."""
    old, new = _Texts(before, side), _Texts(after, side)
    kind = old.ids.type if old.ids.type == new.ids.type else pa.string()
    old_ids, new_ids = old.ids.cast(kind), new.ids.cast(kind)
    row = pc.fill_null(pc.index_in(new_ids, value_set=old_ids), -1).to_numpy(zero_copy_only=False)
    added, stayed = np.flatnonzero(row < 0), np.flatnonzero(row >= 0)
    removed = np.setdiff1d(np.arange(len(old_ids)), row)
    other = stayed[~_equal(new.written_by.take(stayed), old.written_by.take(row[stayed]))]
    texts_now, texts_before = new.texts(other), old.texts(row[other])
    is_changed = ~_equal(texts_now, texts_before)
    changed = other[is_changed]
    fingerprints = zip(old.fingerprints.take(row[changed]), new.fingerprints.take(changed), strict=True)
    reasons = ["+".join(changed_parts(was.as_py(), now.as_py())) or WRITTEN_AGAIN for was, now in fingerprints]
    named = np.argsort(new_ids.take(changed).to_numpy(zero_copy_only=False), kind="stable")[:num_named]
    now, then = texts_now.filter(pa.array(is_changed)), texts_before.filter(pa.array(is_changed))
    return SideDiff(
        num_unchanged=len(stayed) - len(other),
        num_regenerated_same=len(other) - len(changed),
        num_changed=len(changed),
        num_added=len(added),
        num_removed=len(removed),
        reasons=dict(Counter(reasons).most_common()),
        changed=[
            NamedEntity(new.ids[int(changed[k])].as_py(), reasons[k], then[int(k)].as_py(), now[int(k)].as_py())
            for k in named
        ],
        added=_named(new.ids.take(added), before, side, num_named, "was in quarantine", "new"),
        removed=_named(old.ids.take(removed), after, side, num_named, "is in quarantine", "no longer in the tables"),
    )


class _Texts:
    """A side of a run: ids, fingerprints and origins in memory; texts are read on demand."""

    def __init__(self, run: RunFolder, side: Side) -> None:
        self._run: RunFolder = run
        self._side: Side = side
        batches = list(run.iter_knowledge(side, ["entity_id", "fingerprint", "run_id"]))
        table = pa.Table.from_batches(batches) if batches else knowledge_schema(pa.string()).empty_table()
        self.ids, self.fingerprints = table["entity_id"], table["fingerprint"]
        # Texts of the same origin, run and fingerprint, are the same.
        self.written_by = pc.binary_join_element_wise(table["run_id"], self.fingerprints, " ")

    def texts(self, rows: np.ndarray) -> pa.ChunkedArray:
        """Read the texts of some rows, in the order of `rows`."""
        order, start, parts = np.sort(rows), 0, []
        for batch in self._run.iter_knowledge(self._side, ["text"]) if len(rows) else ():
            low, high = np.searchsorted(order, [start, start + batch.num_rows])
            parts.append(batch["text"].take(pa.array(order[low:high] - start)))
            start += batch.num_rows
        return pa.chunked_array(parts, pa.string()).take(pa.array(np.searchsorted(order, rows)))


def _equal(column: pa.ChunkedArray, other: pa.ChunkedArray) -> np.ndarray:
    return pc.equal(column, other).to_numpy() if len(column) else np.zeros(0, bool)


def _named(
    ids: pa.ChunkedArray, other: RunFolder, side: Side, num_named: int, if_quarantined: str, otherwise: str
) -> list[NamedEntity]:
    """Name the first ids, with the reason from the other run's quarantine, if they are in it."""
    failed = other.read_quarantine(side, ["entity_id", "reason"])
    why = dict(zip(failed["entity_id"].to_pylist(), failed["reason"].to_pylist(), strict=True))
    first = pc.take(ids, pc.sort_indices(ids)[:num_named]).to_pylist()
    return [NamedEntity(key, f"{if_quarantined}: {why[key]}" if key in why else otherwise) for key in first]
