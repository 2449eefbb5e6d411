"""Tables of a few users and items for tests of runs, and templates with short prompts."""

import datetime
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

TEMPLATES = {
    "brief_user": {"side": "user", "history": {"columns": [], "line": "- {rating}: {title}"}},
    "curt_user": {"side": "user", "history": {"columns": [], "line": "- {rating}: {title}"}, "request": "Be curt."},
    "brief_item": {"side": "item", "attributes": {"max_value_chars": 5000}},
}
TITLES = ("Harbour Lights", "The Pier", "Night Signal")


@dataclass
class World:
    """The tables in memory; `write` puts them where nights read them."""

    users: dict[str, dict] = field(default_factory=dict)
    items: dict[str, dict] = field(default_factory=dict)
    events: list[tuple[str, str, str, float]] = field(default_factory=list)  # user, item, day, rating

    def write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name, key, rows in (("users", "user_id", self.users), ("items", "item_id", self.items)):
            made = [{key: entity} | row | {"created_at": _noon(row["created_at"])} for entity, row in rows.items()]
            pq.write_table(pa.Table.from_pylist(made), folder / f"{name}.parquet")
        there = [event for event in self.events if event[0] in self.users and event[1] in self.items]
        rows = [
            {"user_id": user, "item_id": item, "timestamp": _noon(day), "rating": rating}
            for user, item, day, rating in there
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "interactions.parquet")


def _noon(day: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(f"{day}T12:00:00+00:00")


def first_world() -> World:
    """Four users and three items. u0 and u1 exist before any item; u2 and u3 rated i2. April is for judging."""
    world = World()
    for number in range(4):
        created_at = "2025-02-10" if number < 2 else "2025-02-25"
        world.users[f"u{number}"] = {"mood": ("calm", "loud")[number % 2], "created_at": created_at}
    for number, title in enumerate(TITLES):
        world.items[f"i{number}"] = {"title": title, "category": ["Radio", "Play"], "created_at": "2025-02-20"}
    for day in ("2025-02-26", "2025-02-27", "2025-04-01", "2025-04-02", "2025-04-03", "2025-04-04"):
        world.events += [("u0", "i0", day, 5.0), ("u0", "i1", day, 1.0), ("u1", "i1", day, 5.0), ("u1", "i0", day, 2.0)]
        world.events += [("u2", "i2", day, 4.0), ("u2", "i0", day, 1.0), ("u3", "i1", day, 4.0), ("u3", "i2", day, 1.0)]
    return world
