"""Users and items as objects, and their prompts: for code that needs a few of them, and to check nights against.

A night has no such objects: `pipeline/knowledge/questions.py` keeps the entities of a side in columns.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.histories import Histories, event_text
from laserbatch.pipeline.knowledge.prompts import (
    NO_TITLE,
    Event,
    RenderedPrompt,
    Shown,
    attribute_line,
    render_shown,
)
from laserbatch.pipeline.knowledge.templates import HistoryLines, PromptTemplate
from laserbatch.pipeline.knowledge.values import event_value, number_text, plain_text
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.tables.read import Tables, read_tables

ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class HistoryEvent:
    """One rated (or just seen) item."""

    item_id: str | int
    title: str
    attributes: dict[str, Any]  # of the item, without its title and None values
    rating: float | None
    event: str | None = None


@dataclass(frozen=True)
class Entity:
    """One user or item."""

    side: Side
    entity_id: str | int
    attributes: dict[str, Any]  # without None values and `created_at`, including an item's title
    history: tuple[HistoryEvent, ...] = ()  # oldest first; empty for items


def iter_entities(tables: Tables, side: Side, entity_ids: Iterable[str | int] | None = None) -> Iterator[Entity]:
    """The entities of a side in table order; only those in `entity_ids`, unless it is None."""
    table, key = tables.entities(side), f"{side}_id"
    rows = np.arange(table.num_rows)
    if entity_ids is not None:
        is_wanted = pc.is_in(table[key], value_set=pa.array(list(entity_ids), table[key].type))
        rows, table = rows[is_wanted.to_numpy()], table.filter(is_wanted)
    log_rows = {"row": lambda at: np.arange(at.start, at.stop)}
    histories = Histories(tables, log_rows) if side == "user" else None
    items: dict[int, tuple[str | int, str, dict[str, Any]]] = {}

    def event(place: int) -> HistoryEvent:
        row = int(histories.items[place])
        interaction = tables.interactions.slice(int(histories.columns["row"][place]), 1).to_pylist()[0]
        done, rating = interaction.get("event"), interaction.get("rating")
        if row not in items:
            values = tables.items.slice(row, 1).to_pylist()[0]
            title = values.pop("title")
            items[row] = values.pop("item_id"), "" if title is None else str(title), _known(values)
        return HistoryEvent(*items[row], None if rating is None else float(rating), done)

    for start in range(0, len(rows), ROWS_AT_ONCE):
        chunk, part = rows[start : start + ROWS_AT_ONCE], table.slice(start, ROWS_AT_ONCE)
        for row, values in zip(chunk.tolist(), part.to_pylist(), strict=True):
            places = () if histories is None else range(histories.starts[row], histories.starts[row + 1])
            yield Entity(side, values.pop(key), _known(values), tuple(map(event, places)))


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if name != "created_at" and value is not None and not (isinstance(value, float) and math.isnan(value))
    }


def world_entities(seed: int, num_users: int, num_items: int) -> tuple[list[Entity], list[Entity]]:
    """The users and items of a sample world, as known at the end of its last day."""
    with tempfile.TemporaryDirectory() as folder:
        write_sample_world(folder, num_users=num_users, num_items=num_items, future_days=0, seed=seed)
        tables = read_tables(folder, LAST_DATE)
        return list(iter_entities(tables, "user")), list(iter_entities(tables, "item"))


def render_prompt(template: PromptTemplate, entity: Entity, tokenizer, max_prompt_tokens: int) -> RenderedPrompt:
    """The prompt of one entity, by `render_shown`. Raises RowError, "no-title", for an item without a title."""
    return render_shown(template, shown_of(template, entity), tokenizer, max_prompt_tokens)


def shown_of(template: PromptTemplate, entity: Entity) -> Shown:
    """The parts of an entity that the template shows. Raises RowError, "no-title", for an item without a title."""
    if entity.side == "item" and not str(entity.attributes.get("title", "")).strip():
        raise RowError(NO_TITLE)
    columns = template.attributes
    lines = [attribute_line(name, entity.attributes[name], columns) for name in columns.shown(entity.attributes)]
    lines = [line for line in lines if line is not None]
    events = []
    if template.history is not None:
        newest = entity.history[max(0, len(entity.history) - template.history.max_events) :]
        events = [_shown_event(event, template.history) for event in newest]
    return Shown("\n".join(lines) if lines else None, events, len(entity.history))


def _shown_event(event: HistoryEvent, columns: HistoryLines) -> Event:
    values = [event_value(event.attributes[name], columns, name) for name in columns.shown(event.attributes)]
    values = [value for value in values if value is not None]
    attributes = columns.separator.join(values) if values else None
    label = None if event.rating is None else columns.ratings.get(event.rating) or number_text(event.rating)
    if done := event_text(event.event or "", columns.events):
        label = done if label is None else f"{done}{' ' if done == 'rated' else ', rated '}{label}"
    return plain_text(event.title, columns.max_value_chars), attributes, label
