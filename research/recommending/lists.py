"""Files of lists of items: planned rows, one row per user, and flat rows for readers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.storage.damage import unless_damaged
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.research.recommending.beams import BeamResult
from laserbatch.research.recommending.codes import ItemCodes

LISTS_NAME = "lists.parquet"  # the file in a run that readers use
CATALOGUE_PATH = "plan/catalogue.parquet"  # the file in a run with `item_id` and `codes` of the items to list


def write_catalogue(catalogue: ItemCodes, path: Path) -> None:
    table = {"item_id": catalogue.item_ids, "codes": pa.array(catalogue.codes.tolist(), pa.list_(pa.int32()))}
    write_parquet(pa.table(table), path)


def read_catalogue(path: Path, sizes: tuple[int, ...]) -> ItemCodes:
    """Read a catalogue that `write_catalogue` wrote, in the same order."""
    table = read_parquet(path)
    codes = table["codes"].combine_chunks().flatten().to_numpy().reshape(-1, len(sizes))
    return ItemCodes(table["item_id"].combine_chunks(), codes, sizes)


def has_new_items(catalogue: ItemCodes, runs: Path, run_id: str) -> bool:
    """Whether a catalogue has items that a run's catalogue lacks; True if the run's is gone or damaged."""
    path = runs / run_id / CATALOGUE_PATH
    table = unless_damaged(partial(read_parquet, path, ["item_id"])) if path.exists() else None
    listed_ids = catalogue.item_ids[:0] if table is None else table["item_id"].combine_chunks()
    return not pc.all(pc.is_in(catalogue.item_ids, value_set=listed_ids)).as_py()


@dataclass(frozen=True)
class ListRow:
    """A user who gets a list; `history`, oldest first, and `drafts`, likely items, are catalogue rows, int64[n]."""

    user_id: str | int
    history: np.ndarray
    drafts: np.ndarray
    fingerprint: str

    @classmethod
    def of_table(cls, table: pa.Table) -> "list[ListRow]":
        """The rows of a shard's planned table."""
        histories, drafts = (
            [np.asarray(row.values, np.int64) for row in table[name].combine_chunks()] for name in ("history", "drafts")
        )
        ids, fingerprints = (table[name].to_pylist() for name in ("entity_id", "fingerprint"))
        return [cls(*row) for row in zip(ids, histories, drafts, fingerprints, strict=True)]


def lists_schema(user_type: pa.DataType, item_type: pa.DataType) -> pa.Schema:
    """The schema of the files of `knowledge/user/`, one row per user."""
    return pa.schema(
        [
            pa.field("entity_id", user_type, nullable=False),
            pa.field("items", pa.list_(item_type), nullable=False),  # the best first
            pa.field("scores", pa.list_(pa.float64()), nullable=False),  # log probabilities; counts for popular items
            pa.field("route", pa.string(), nullable=False),  # "history" or "popular"
            pa.field("last_item", item_type),  # last item of the history; null without a history
            pa.field("fingerprint", pa.string(), nullable=False),
            pa.field("run_id", pa.string(), nullable=False),  # the run that made the list; carrying over keeps it
            pa.field("model_id", pa.string(), nullable=False),
            pa.field("is_stale", pa.bool_(), nullable=False),
        ]
    )


def flat_lists(run: RunFolder, schema: pa.Schema) -> pa.RecordBatchReader:
    """All lists of a run as flat rows for readers: `user_id`, `rank` from 1, `item_id`, `score`."""
    user_type, item_type = schema.field("entity_id").type, schema.field("items").type.value_type
    types = {"user_id": user_type, "rank": pa.int32(), "item_id": item_type, "score": pa.float64()}
    flat = pa.schema([pa.field(name, of_type, nullable=False) for name, of_type in types.items()])

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in run.iter_knowledge("user", ["entity_id", "items", "scores"]):
            counts = pc.list_value_length(batch["items"]).to_numpy()
            users = batch["entity_id"].take(pa.array(np.repeat(np.arange(len(counts)), counts)))
            ranks = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + 1
            columns = [users, pa.array(ranks, pa.int32()), batch["items"].flatten(), batch["scores"].flatten()]
            yield pa.record_batch(columns, schema=flat)

    return pa.RecordBatchReader.from_batches(flat, batches())


def lists_table(
    rows: Sequence[tuple[ListRow, BeamResult]], item_ids: pa.Array, schema: pa.Schema, run_id: str, model_id: str
) -> pa.Table:
    last_items = item_ids.take(pa.array([row.history[-1] for row, _ in rows], pa.int64()))
    columns = {
        "entity_id": [row.user_id for row, _ in rows],
        "items": [item_ids.take(pa.array(result.rows)).to_pylist() for _, result in rows],
        "scores": [result.scores.tolist() for _, result in rows],
        "route": ["history"] * len(rows), "last_item": last_items.to_pylist(),
        "fingerprint": [row.fingerprint for row, _ in rows],
        "run_id": [run_id] * len(rows), "model_id": [model_id] * len(rows), "is_stale": [False] * len(rows),
    }  # fmt: skip
    return pa.table(columns, schema=schema)
