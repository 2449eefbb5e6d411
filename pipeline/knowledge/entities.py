"""Entities as prompts see them: attributes, and for users the history of what they rated, joined from the tables."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.sides import Side

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


def iter_entities(
    tables: "Tables", side: Side, entity_ids: Iterable[str | int] | None = None, with_history: bool = True
) -> Iterator[Entity]:
    """Entities of a side in table order.

    Parameters
    ----------
    tables : as `read_tables` gives them; interactions of items that are not there are passed over.
    entity_ids : only these; None means all.
    with_history : False leaves users' histories empty, for who does not need them.
    """
    table = tables.users if side == "user" else tables.items
    key = f"{side}_id"
    rows = np.arange(table.num_rows)
    if entity_ids is not None:
        wanted = pa.array(list(entity_ids), table[key].type)
        is_wanted = pc.is_in(table[key], value_set=wanted)
        rows, table = rows[is_wanted.to_numpy()], table.filter(is_wanted)
    histories = _Histories(tables) if side == "user" and with_history else None
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


class _Histories:
    """Interactions by user row, built once: two index arrays over the interactions, nothing copied."""

    def __init__(self, tables: "Tables") -> None:
        self._items = tables.items
        self._events: dict[int, tuple[str | int, str, dict[str, object]]] = {}
        interactions = tables.interactions
        user = _rows_of(interactions["user_id"], tables.users["user_id"])
        item = _rows_of(interactions["item_id"], tables.items["item_id"])
        known = np.flatnonzero((user >= 0) & (item >= 0))
        order = known[np.argsort(user[known], kind="stable")]  # interactions come in order of time
        self._item = item[order]
        self._rating = None
        if "rating" in interactions.column_names:
            rating = interactions["rating"].cast(pa.float64()).combine_chunks()
            self._rating = pc.fill_null(rating, math.nan).to_numpy(zero_copy_only=False)[order]
        self._starts = np.searchsorted(user[order], np.arange(tables.users.num_rows + 1))

    def of(self, user_row: int) -> tuple[HistoryEvent, ...]:
        events = []
        for place in range(self._starts[user_row], self._starts[user_row + 1]):
            item_id, title, attributes = self._item_at(int(self._item[place]))
            rating = math.nan if self._rating is None else float(self._rating[place])
            events.append(HistoryEvent(item_id, title, attributes, None if math.isnan(rating) else rating))
        return tuple(events)

    def _item_at(self, row: int) -> tuple[str | int, str, dict[str, object]]:
        if row not in self._events:
            values = self._items.slice(row, 1).to_pylist()[0]
            item_id, title = values.pop("item_id"), values.pop("title")
            self._events[row] = (item_id, "" if title is None else str(title), _known(values))
        return self._events[row]


def _rows_of(ids: pa.ChunkedArray, among: pa.ChunkedArray) -> np.ndarray:
    """Row of each id in a column, int64[n]; -1 where it is not there."""
    found = pc.index_in(ids, value_set=among.combine_chunks())
    return pc.fill_null(found, -1).to_numpy().astype(np.int64)
