"""Entities as prompts see them: attributes, and for users the history of what they rated, joined from the tables."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.sides import SIDES, Side

if TYPE_CHECKING:
    from laserbatch.pipeline.tables.read import Tables

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class HistoryEvent:
    """One rated (or just seen) item."""

    item_id: str | int
    title: str
    attributes: dict[str, object]  # the item's, None values dropped, title not among them
    rating: float | None


@dataclass(frozen=True)
class Entity:
    """One user or item."""

    side: Side
    entity_id: str | int
    attributes: dict[str, object]  # None values dropped; an item's title is one of them, `created_at` is not
    history: tuple[HistoryEvent, ...] = ()  # oldest first; empty for items


def iter_entities(tables: "Tables", side: Side, entity_ids: Iterable[str | int] | None = None) -> Iterator[Entity]:
    """Entities of a side in table order.

    Parameters
    ----------
    tables : as `read_tables` gives them; interactions of items that are not there are passed over.
    entity_ids : only these; None means all.
    """
    table = tables.users if side == "user" else tables.items
    key = f"{side}_id"
    rows = np.arange(table.num_rows)
    if entity_ids is not None:
        wanted = pa.array(list(entity_ids), table[key].type)
        is_wanted = pc.is_in(table[key], value_set=wanted)
        rows, table = rows[is_wanted.to_numpy()], table.filter(is_wanted)
    histories = Histories(tables) if side == "user" else None
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        chunk, part = rows[start : start + _ROWS_AT_ONCE], table.slice(start, _ROWS_AT_ONCE)
        for row, values in zip(chunk.tolist(), part.to_pylist(), strict=True):
            entity_id = values.pop(key)
            history = () if histories is None else histories.of(row)
            yield Entity(side, entity_id, _known(values), history)


def _known(values: dict[str, object]) -> dict[str, object]:
    return {
        name: value
        for name, value in values.items()
        if name != "created_at" and value is not None and not (isinstance(value, float) and math.isnan(value))
    }


class Histories:
    """Interactions by user row, those of unknown users and items left out.

    `starts` int64[num_users + 1] says where a user's events begin in `items` int32[n], rows of the item table, and
    `ratings` float64[n], NaN where there is none; oldest first.
    """

    def __init__(self, tables: "Tables") -> None:
        self._table = tables.items
        self._values: dict[int, tuple[str | int, str, dict[str, object]]] = {}
        interactions = tables.interactions
        user, item = (tables.rows_of_interactions[side] for side in SIDES)
        order = np.flatnonzero((user >= 0) & (item >= 0))
        order |= user[order].astype(np.int64) << 32
        order.sort()  # by user, then by place: interactions come in order of time
        order &= 0xFFFFFFFF
        self.items = item[order]
        self.ratings = np.full(len(order), math.nan)
        if "rating" in interactions.column_names:
            self.ratings = pc.fill_null(interactions["rating"].cast(pa.float64()), math.nan).to_numpy()[order]
        counts = np.bincount(user[order], minlength=tables.users.num_rows)
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def of(self, user_row: int) -> tuple[HistoryEvent, ...]:
        """One user's events."""
        events = []
        for place in range(self.starts[user_row], self.starts[user_row + 1]):
            item_id, title, attributes = self._item_at(int(self.items[place]))
            rating = float(self.ratings[place])
            events.append(HistoryEvent(item_id, title, attributes, None if math.isnan(rating) else rating))
        return tuple(events)

    def newest(self, user_rows: np.ndarray, max_events: int) -> tuple[np.ndarray, np.ndarray]:
        """Places of the newest events of some users: int64[m], one user's after another's, and int64[n + 1] starts."""
        stops = self.starts[user_rows + 1]
        first = np.maximum(self.starts[user_rows], stops - max_events)
        starts = np.concatenate([[0], np.cumsum(stops - first)])
        return np.repeat(first - starts[:-1], stops - first) + np.arange(starts[-1]), starts

    def _item_at(self, row: int) -> tuple[str | int, str, dict[str, object]]:
        if row not in self._values:
            values = self._table.slice(row, 1).to_pylist()[0]
            item_id, title = values.pop("item_id"), values.pop("title")
            self._values[row] = (item_id, "" if title is None else str(title), _known(values))
        return self._values[row]
