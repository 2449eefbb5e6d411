"""The records that a night keeps of its texts: their Arrow schema, and the records of the previous night by entity.

There is one row per entity and side. It has both the text and its token ids, since tomorrow's pools are built from the
ids. The ids of a reasoning model include its thoughts, which it writes again tomorrow; its text does not. Nothing here
depends on the clock, so that the same night run twice writes the same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from laserbatch.pipeline.storage.mapped import mapped_column, mapped_columns
from laserbatch.pipeline.storage.parquet import iter_parquet, parquet_files
from laserbatch.retrieval_pools.ids import rows_among

RECORD_VERSION = 4


def knowledge_schema(entity_id_type: pa.DataType) -> pa.Schema:
    """Arrow schema of knowledge files, whose `entity_id` keeps the type it has in the input table."""
    return pa.schema(
        [
            pa.field("entity_id", entity_id_type, nullable=False),
            pa.field("side", pa.string(), nullable=False),
            pa.field("framework", pa.string(), nullable=False),
            pa.field("template", pa.string(), nullable=False),  # name@version
            pa.field("text", pa.string(), nullable=False),
            pa.field("token_ids", pa.list_(pa.int32()), nullable=False),  # end token not included
            pa.field("token_sources", pa.list_(pa.uint8()), nullable=False),  # SOURCE_* of retrieval_pools.sources
            pa.field("fields_json", pa.string(), nullable=False),  # the parsed answer: {aspect: text}
            pa.field("fingerprint", pa.string(), nullable=False),
            pa.field("run_id", pa.string(), nullable=False),  # the run that generated it, not one that carried it over
            pa.field("model_id", pa.string(), nullable=False),
            pa.field("pool_version", pa.string()),  # null: there was no pool
            pa.field("pool_group", pa.string()),
            pa.field("decoding_json", pa.string(), nullable=False),  # verifier and its settings
            pa.field("num_prompt_tokens", pa.int32(), nullable=False),
            pa.field("num_history", pa.int32(), nullable=False),
            pa.field("num_history_dropped", pa.int32(), nullable=False),
            pa.field("num_tokens", pa.int32(), nullable=False),
            pa.field("num_steps", pa.int32(), nullable=False),
            pa.field("num_drafted", pa.int32(), nullable=False),
            pa.field("num_accepted", pa.int32(), nullable=False),
            pa.field("finish_reason", pa.string(), nullable=False),
            # the text answers an earlier prompt: a new one failed (quarantine) or is not due yet (postponed)
            pa.field("is_stale", pa.bool_(), nullable=False),
        ],
        metadata={"laserbatch.record": "knowledge", "laserbatch.version": str(RECORD_VERSION)},
    )


class PreviousKnowledge:
    """The records of the previous night by row, counted over all files. Texts and tokens stay on disk until needed.

    On the first night there is no folder, or no file in it. The ids and fingerprints of all records are in files of the
    folder `scratch`; None: in memory.
    """

    def __init__(self, folder: Path | None, scratch: Path | None = None) -> None:
        self._files, self._scratch = [] if folder is None else parquet_files(folder), scratch
        counts = [0]
        self._entity_ids, self._fingerprints = mapped_columns(self._batches(counts), scratch, [None, None])
        self._starts = np.cumsum(counts)  # rows at which files start, and the end of the last
        self.num_rows = len(self._entity_ids)

    def _batches(self, counts: list[int]) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Ids and fingerprints, file by file; the number of rows of each file is appended to `counts`."""
        for file in self._files:
            counts.append(0)
            for batch in iter_parquet(file, ["entity_id", "fingerprint"]):
                counts[-1] += batch.num_rows
                yield batch["entity_id"], batch["fingerprint"]

    def rows_of(self, entity_ids: pa.ChunkedArray) -> np.ndarray:
        """The row of each entity's record, int64[n]; -1 if it has none."""
        return rows_among(entity_ids, self._entity_ids)

    def fingerprints(self, rows: np.ndarray) -> pa.Array:
        """The fingerprints of the records in some rows; null for a row of -1."""
        return self._fingerprints.take(pa.array(rows, mask=rows < 0))

    def token_ids(self, rows: np.ndarray) -> "TokenIds":
        """The token ids of the texts in some rows; null for a row of -1."""
        unique, kind = np.unique(rows[rows >= 0]), pa.large_list(pa.int32())
        chunks = (batch.column(0) for batch in self._taken(unique, ["token_ids"]))
        places = pa.array(np.searchsorted(unique, rows), mask=rows < 0)
        return TokenIds(mapped_column(chunks, self._scratch, kind), places)

    def values(self, rows: np.ndarray, columns: list[str]) -> pa.Table:
        """Some columns of the records in some rows; no row may be -1."""
        unique = np.unique(rows)
        parts = [pa.Table.from_batches([batch]) for batch in self._taken(unique, columns)]
        table = pa.concat_tables(parts) if parts else knowledge_schema(pa.string()).empty_table().select(columns)
        return table.take(pa.array(np.searchsorted(unique, rows)))

    def whole_files(self, rows: np.ndarray, entity_id_type: pa.DataType) -> Iterator[tuple[Path, slice]]:
        """Files that tonight can take unchanged: of the current schema, with all records among `rows`, and none stale.

        `rows` ascend; each file comes with the slice of them that are its records.
        """
        current, bounds = knowledge_schema(entity_id_type), np.searchsorted(rows, self._starts).tolist()
        for file, num_rows, places in zip(self._files, np.diff(self._starts), pairwise(bounds), strict=True):
            if not 0 < num_rows == places[1] - places[0]:
                continue
            schema = pq.read_schema(file)
            is_current = schema.equals(current) and schema.metadata == current.metadata
            if is_current and not any(pc.any(batch[0]).as_py() for batch in iter_parquet(file, ["is_stale"])):
                yield file, slice(*places)

    def records(self, rows: np.ndarray, entity_id_type: pa.DataType, is_stale: bool) -> pa.RecordBatchReader:
        """The records in some rows, ascending, a few in memory at a time; all get the given `is_stale`."""
        schema = knowledge_schema(entity_id_type)
        names = [name for name in schema.names if name != "is_stale"]
        columns = (
            {name: batch[name] for name in names} | {"is_stale": pa.repeat(is_stale, len(batch))}
            for batch in self._taken(rows, names)
        )
        batches = (pa.record_batch(part).select(schema.names).cast(schema) for part in columns)
        return pa.RecordBatchReader.from_batches(schema, batches)

    def _taken(self, rows: np.ndarray, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The records in some rows, ascending; files without such rows are not read."""
        is_taken = np.zeros(self.num_rows, bool)
        is_taken[rows] = True
        for file, (start, stop) in zip(self._files, pairwise(self._starts.tolist()), strict=True):
            for batch in iter_parquet(file, columns) if is_taken[start:stop].any() else ():
                mask = is_taken[start : start + batch.num_rows]
                start += batch.num_rows
                if mask.any():  # `take` of a whole side fails if it has 2 GiB of text
                    yield batch if mask.all() else batch.filter(pa.array(mask))


@dataclass(frozen=True)
class TokenIds:
    """Token ids of texts as large lists of int32, and the place of each row's text; null if it has none."""

    texts: pa.Array
    places: pa.Array

    def take(self, rows: pa.Array) -> pa.Array:
        return self.texts.take(self.places.take(rows))
