"""The last published records of a side, looked up by entity; texts and tokens stay on disk until they are needed."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.knowledge.records import as_current, knowledge_schema
from laserbatch.pipeline.storage.parquet import iter_parquet


class PreviousKnowledge:
    """Records by their row: the place in their files one after another.

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
