"""A sample of the input tables, as tables: some users, the items that they met, and the interactions between both.

Users are chosen by their ids alone, items by what these users did up to the date; interactions are streamed.
"""

import datetime
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.tables import part_columns, read, streamed

DAY_US = 86_400_000_000


@dataclass(frozen=True)
class SampleFigures:
    """Figures of a sample. `share_kept`: share of its users' interactions up to the date that are with its items."""

    num_users: int
    num_items: int
    num_interactions: int
    num_later: int  # interactions after the date
    share_kept: float


def day_of_share(tables: streamed.OpenTables, share: float) -> datetime.date:
    """The last day (UTC) by the end of which at most a share of all interactions had happened.

    Raises TableError if there is none, because the first day alone has a larger share.
    """
    counts: Counter[int] = Counter()
    for batch in tables.interactions.to_batches(["timestamp"]):
        times = batch["timestamp"].drop_null().cast(pa.int64()).to_numpy()
        days, numbers = np.unique(times // DAY_US, return_counts=True)
        counts.update(dict(zip(days.tolist(), numbers.tolist(), strict=True)))
    days = sorted(counts)
    done = np.cumsum([counts[day] for day in days])
    early = [day for day, num in zip(days, done.tolist(), strict=True) if num <= share * counts.total()]
    if not early:
        raise TableError(
            f"no day divides the interactions: more than {share:.0%} of them are on the first day, so too few later "
            "ones are left to judge with; give a --date that has later interactions"
        )
    return datetime.date(1970, 1, 1) + datetime.timedelta(days=early[-1])


def write_sample(
    tables: streamed.OpenTables, folder: Path, date: datetime.date, num_users: int, num_items: int
) -> SampleFigures:
    """Write users, items and interactions of a sample into a folder, with all of their columns.

    From the users known at the end of the date, it takes the `num_users` with the lowest SHA-256 of their ids; then the
    `num_items` items that these met most often up to then (if equal, the lower id); then all interactions between both,
    later ones too. The same tables and arguments give the same bytes. Raises TableError if no user or item is known.
    """
    cutoff = read.end_of_day(date)
    users, items = (part_columns.read_table(tables.interactions.folder, table, cutoff) for table in ("users", "items"))
    for name, known in (("user", users), ("item", items)):
        if not known.num_rows:
            raise TableError(
                f"no {name} of {tables.interactions.folder} is known at the end of {date}: every created_at is later; "
                "give a later --date, or correct created_at"
            )
    by_hash = sorted(users["user_id"].to_pylist(), key=lambda key: hashlib.sha256(str(key).encode()).digest())
    chosen_users = pa.array(by_hash[:num_users], users.schema.field("user_id").type)
    users = users.filter(pc.is_in(users["user_id"], value_set=chosen_users))
    met: Counter = Counter()

    def is_early(batch: pa.RecordBatch) -> pa.Array:
        return pc.fill_null(pc.less(batch["timestamp"], cutoff), False)

    for batch in _of(tables, {"user_id": chosen_users}, ["user_id", "item_id", "timestamp"]):
        for count in pc.value_counts(batch["item_id"].filter(is_early(batch))).to_pylist():
            met[count["values"]] += count["counts"]
    item_ids = set(items["item_id"].to_pylist())
    most_met = sorted((key for key in met if key in item_ids), key=lambda key: (-met[key], key))[:num_items]
    chosen_items = pa.array(most_met, items.schema.field("item_id").type)
    items = items.filter(pc.is_in(items["item_id"], value_set=chosen_items))

    write_parquet(users, folder / "users.parquet")
    write_parquet(items, folder / "items.parquet")
    num_early = 0

    def sampled_rows() -> Iterator[pa.RecordBatch]:
        nonlocal num_early
        for batch in _of(tables, {"user_id": chosen_users, "item_id": chosen_items}, tables.interactions.schema.names):
            num_early += is_early(batch).true_count
            yield batch

    schema = tables.interactions.plain_schema(tables.interactions.schema.names)
    written = write_parquet(sampled_rows(), folder / "interactions.parquet", schema)
    share = sum(met[key] for key in most_met) / met.total() if met else 0.0
    return SampleFigures(users.num_rows, items.num_rows, written.num_rows, written.num_rows - num_early, share)


def _of(tables: streamed.OpenTables, ids: dict[str, pa.Array], columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The interactions with some ids, in the order of their files."""
    for batch in tables.interactions.to_batches(columns):
        for name, chosen in ids.items():
            batch = batch.filter(pc.is_in(batch[name], value_set=chosen))
        if batch.num_rows:
            yield batch
