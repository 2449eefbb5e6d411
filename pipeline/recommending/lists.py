"""Lists of items on disk, a row a user, and as readers want them; those of the night before, which draft tonight's."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.recommending.codes import ItemCodes
from laserbatch.pipeline.storage.run_folder import RunFolder


def lists_schema(user_type: pa.DataType, item_type: pa.DataType) -> pa.Schema:
    """Of the files of `knowledge/user/`, one row a user."""
    return pa.schema(
        [
            pa.field("entity_id", user_type, nullable=False),
            pa.field("items", pa.list_(item_type), nullable=False),  # the best first
            pa.field("scores", pa.list_(pa.float64()), nullable=False),  # log probabilities; of popular ones counts
            pa.field("route", pa.string(), nullable=False),  # "history" or "popular"
            pa.field("last_item", item_type),  # of the history; null: there is none
            pa.field("fingerprint", pa.string(), nullable=False),
            pa.field("run_id", pa.string(), nullable=False),  # that made it, not that carried it over
            pa.field("model_id", pa.string(), nullable=False),
            pa.field("is_stale", pa.bool_(), nullable=False),
        ]
    )


def flat_lists(run: RunFolder, schema: pa.Schema) -> pa.RecordBatchReader:
    """All lists of a run as readers want them: `user_id`, `rank` from 1, `item_id`, `score`."""
    flat = pa.schema(
        [
            pa.field("user_id", schema.field("entity_id").type, nullable=False),
            pa.field("rank", pa.int32(), nullable=False),
            pa.field("item_id", schema.field("items").type.value_type, nullable=False),
            pa.field("score", pa.float64(), nullable=False),
        ]
    )

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in run.iter_knowledge("user", ["entity_id", "items", "scores"]):
            counts = pc.list_value_length(batch["items"]).to_numpy()
            users = batch["entity_id"].take(pa.array(np.repeat(np.arange(len(counts)), counts)))
            ranks = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + 1
            columns = [users, pa.array(ranks, pa.int32()), batch["items"].flatten(), batch["scores"].flatten()]
            yield pa.record_batch(columns, schema=flat)

    return pa.RecordBatchReader.from_batches(flat, batches())


@dataclass(frozen=True)
class ListsBefore:
    """Last night's lists: of each user, and together of those with the same last item."""

    of_users: dict[object, list[tuple[int, ...]]]
    of_items: dict[int, list[tuple[int, ...]]]

    @classmethod
    def of(cls, previous: pa.Table | None, catalogue: ItemCodes) -> "ListsBefore":
        of_users, counted = {}, {}
        paths = map(tuple, catalogue.codes.tolist())
        rows = dict(zip(catalogue.item_ids.to_pylist(), paths, strict=True))
        number = {item: place for place, item in enumerate(rows)}
        for row in [] if previous is None else previous.select(["entity_id", "items", "last_item"]).to_pylist():
            listed = [rows[item] for item in row["items"] if item in rows]
            of_users[row["entity_id"]] = listed
            if row["last_item"] in number:
                counted.setdefault(number[row["last_item"]], Counter()).update(listed)
        return cls(of_users, {item: [path for path, _ in count.most_common()] for item, count in counted.items()})

    def of_user(self, user_id: object, last_item: int) -> list[tuple[int, ...]]:
        return list(dict.fromkeys([*self.of_users.get(user_id, ()), *self.of_items.get(last_item, ())]))
