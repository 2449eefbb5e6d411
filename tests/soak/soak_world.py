"""The tables of a small shop in memory, and how they are written: types, files, order of rows."""

import datetime
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SIDES = ("user", "item")
TABLES = {"user": "users", "item": "items"}
NUMBER_TYPES = (pa.int64(), pa.int32(), pa.float64(), pa.float32(), pa.string(), pa.large_string())
WORD_TYPES = (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))
PATH_TYPES = (pa.list_(pa.string()), pa.large_list(pa.string()))
TIME_TYPES = (pa.timestamp("us", tz="UTC"), pa.timestamp("ns", tz="UTC"), pa.timestamp("ms"), pa.int64())
RATING_TYPES = (pa.float64(), pa.int64(), pa.float32())


@dataclass(frozen=True)
class Event:
    """A user's rating of an item. No two events have the same second of a day."""

    user: object
    item: object
    day: str
    second: int
    rating: int


@dataclass
class World:
    """Users, items and their interactions."""

    columns: dict[str, dict[str, pa.DataType]]  # by side: attribute -> its type in the file, in the file's column order
    rows: dict[str, dict[object, dict]]  # by side and id: attributes, and `created_at`, a day
    events: list[Event] = field(default_factory=list)
    time_type: pa.DataType = TIME_TYPES[0]
    rating_type: pa.DataType | None = RATING_TYPES[0]  # None: there is no such column
    num_files: int = 1  # of each table
    is_reversed: bool = False  # the order of the rows

    def known(self, side: str, date: str) -> dict[object, dict]:
        """The entities of a side that exist at the end of a day."""
        return {key: row for key, row in self.rows[side].items() if row["created_at"] <= date}

    def history(self, user: object, date: str) -> list[Event]:
        """The events of a user up to the end of a day, oldest first, with items that existed by then."""
        items = self.known("item", date)
        seen = [event for event in self.events if event.user == user and event.day <= date and event.item in items]
        return sorted(seen, key=lambda event: (event.day, event.second))

    def num_interactions(self, side: str, key: object, date: str) -> int:
        """The number of interactions of a user or an item up to the end of a day."""
        if side == "user":
            return len(self.history(key, date))
        users = self.known("user", date)
        return sum(event.item == key and event.day <= date and event.user in users for event in self.events)

    def left_behind(self) -> list[Event]:
        """The events whose user or item is in no table any more."""
        rows = self.rows
        return [event for event in self.events if event.user not in rows["user"] or event.item not in rows["item"]]

    def remove(self, side: str, key: object) -> tuple[dict, list[Event]]:
        """Remove an entity and its events; returns the arguments that `restore` takes."""
        removed = [event for event in self.events if getattr(event, side) == key]
        self.events = [event for event in self.events if getattr(event, side) != key]
        return self.rows[side].pop(key), removed

    def restore(self, side: str, key: object, row: dict, events: list[Event]) -> None:
        """Put an entity back, with those of its events whose user and item both exist."""
        self.rows[side][key] = row
        there = [event for event in events if event.user in self.rows["user"] and event.item in self.rows["item"]]
        self.events += there

    def write(self, folder: Path) -> None:
        """Write the three tables in place of the earlier ones."""
        folder.mkdir(exist_ok=True)
        for old in sorted(folder.rglob("*"), reverse=True):
            old.rmdir() if old.is_dir() else old.unlink()
        for side, name in TABLES.items():
            rows = list(self.rows[side].items())
            made = {f"{side}_id": pa.array([key for key, _ in rows])}
            for column, kind in self.columns[side].items():
                made[column] = _array([row.get(column) for _, row in rows], kind)
            made["created_at"] = self._times([(row["created_at"], 43_200) for _, row in rows])
            self._write(pa.table(made), folder / name)
        events = self.events
        made = {
            "user_id": pa.array([event.user for event in events]),
            "item_id": pa.array([event.item for event in events]),
            "timestamp": self._times([(event.day, event.second) for event in events]),
            "device": pa.array(["phone"] * len(events)),  # a column that nothing reads
        }
        if self.rating_type is not None:
            made["rating"] = _array([event.rating for event in events], self.rating_type)
        self._write(pa.table(made), folder / "interactions")

    def _times(self, moments: list[tuple[str, int]]) -> pa.Array:
        start = [datetime.datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp() for day, _ in moments]
        seconds = pa.array([int(at) + second for at, (_, second) in zip(start, moments, strict=True)], pa.int64())
        return seconds if pa.types.is_integer(self.time_type) else seconds.cast(pa.timestamp("s")).cast(self.time_type)

    def _write(self, table: pa.Table, path: Path) -> None:
        table = table.take(list(range(table.num_rows))[:: -1 if self.is_reversed else 1])
        if self.num_files == 1:
            pq.write_table(table, path.with_suffix(".parquet"))
            return
        path.mkdir()
        step = -(-table.num_rows // self.num_files)
        for number in range(self.num_files):
            pq.write_table(table.slice(number * step, step), path / f"part-{number}.parquet")


def _array(values: list, kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
        return pa.array([None if value is None else str(value) for value in values], pa.string()).cast(kind)
    return pa.array(values, kind)
