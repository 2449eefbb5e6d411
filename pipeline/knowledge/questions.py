"""The data that a template shows of all entities of a side, in columns, and their fingerprints.

Each distinct value becomes text once, in the form that `prompts` shows; no entity is a Python object. The last two
parts of a fingerprint are digests of what is shown, not of the values, so that storing them otherwise changes nothing.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property, partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.knowledge.histories import Histories, event_text
from laserbatch.pipeline.knowledge.prompts import DIGEST_BYTES, Shown, attribute_line
from laserbatch.pipeline.knowledge.templates import Columns, HistoryLines, PromptTemplate
from laserbatch.pipeline.knowledge.values import event_value, number_text, plain_text, python_values
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.tables.columns import blank
from laserbatch.pipeline.tables.log import codes_of, only_chunk
from laserbatch.pipeline.tables.read import Tables

ROWS_AT_ONCE = 64 * 1024  # items with values that are Python objects at once
LABEL_COLUMNS = ("event", "rating")  # columns of interactions that label a line of history
SHOWN_SCHEMA = pa.schema([("attributes", pa.string()), ("history", pa.string()), ("num_events", pa.int32())])
_DIGEST = np.dtype(f"V{DIGEST_BYTES}")


class SideQuestions:
    """The data that prompts show of the entities of a side; rows are rows of its table."""

    def __init__(self, tables: Tables, side: Side, template: PromptTemplate, shared: str) -> None:
        self.entities, self.tables = tables.entities(side), tables
        self.side: Side = side
        self._template, self.shared = template, shared  # the latter: the joined parts of fingerprints that all share

    def fingerprints(self, start: int, stop: int) -> pa.Array:
        """The fingerprints of the entities in some rows, by `prompts.PARTS`; null for an item without a title."""
        part = self.entities.slice(start, stop - start)
        lines = self._attribute_lines(part).dictionary_encode("encode")
        shown = (_NOTHING if line is None else line.encode() for line in lines.dictionary.to_pylist())
        line_digests = _in_hex(shown).take(lines.indices)
        histories = self._history_digests(np.arange(start, start + part.num_rows))
        fingerprints = pc.binary_join_element_wise(self.shared, line_digests, histories, "-")
        if self.side == "user":
            return fingerprints
        return pc.if_else(blank(part["title"].combine_chunks()), pa.scalar(None, pa.string()), fingerprints)

    def num_events(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The number of events in the histories of the users in some rows, shown or not, int64[n]; 0 for items."""
        if self.side == "item":
            return np.zeros(self.entities.num_rows, np.int64)[rows]
        starts = self.histories.starts
        return starts[1:][rows] - starts[:-1][rows]

    def shown(self, rows: np.ndarray) -> pa.Table:
        """The data shown of the entities in some rows: `SHOWN_SCHEMA`, for `shown_of_row`."""
        part = self.entities.take(pa.array(rows))
        history, num_events = pa.nulls(len(rows), pa.string()), self.num_events(rows).astype(np.int32)
        if self._template.history is not None:
            places, starts = self.histories.chosen(rows, self._template.history)
            items = pa.array(self.histories.items[places])
            titles, attributes = (texts.take(items).to_pylist() for texts in self._events)
            labels = pa.array(self._labels.texts, pa.string()).take(pa.array(self.histories.columns["label"][places]))
            events = list(zip(titles, attributes, labels.to_pylist(), strict=True))
            bounds = pairwise(starts.tolist())
            history = pa.array([json.dumps(events[first:last], ensure_ascii=False) for first, last in bounds])
        columns = [self._attribute_lines(part).cast(pa.string()), history, pa.array(num_events)]
        return pa.table(columns, SHOWN_SCHEMA)

    def sampled(self, most: int) -> list[Shown]:
        """The data shown of at most `most` entities, spread evenly over the table."""
        num_rows = self.entities.num_rows
        rows = np.unique(np.linspace(0, num_rows - 1, min(num_rows, most)).astype(np.int64))
        return [shown_of_row(row) for row in self.shown(rows).to_pylist()]

    @property
    def _history_lines(self) -> HistoryLines:
        assert self._template.history is not None
        return self._template.history

    @cached_property
    def histories(self) -> Histories:
        """The histories of all users, with the columns `label` (numbers of `_labels`) and, if needed, `time`."""
        columns: dict[str, Callable[[slice], np.ndarray]] = {}
        if self._template.history is not None:
            columns["label"] = self._labels.numbers
            if self._template.history.needs_times:
                times = self.tables.interactions["timestamp"]
                columns["time"] = lambda at: times[at].cast(pa.int64()).to_numpy()
        return Histories(self.tables, columns)

    @cached_property
    def _labels(self) -> "_EventLabels":
        return _EventLabels(self.tables.interactions, self._history_lines)

    @cached_property
    def _events(self) -> tuple[pa.Array, pa.Array]:
        """The title, and the attributes or null, that a line of history shows of each item, large strings."""
        parts = zip(*map(self._event_texts, _slices(self.tables.items)), strict=True)
        titles, attributes = (pa.concat_arrays([text.cast(pa.large_string()) for text in texts]) for texts in parts)
        return titles, attributes

    def _event_texts(self, items: pa.Table) -> tuple[pa.Array, pa.Array]:
        columns, attributes = self._history_lines, [*self._event_attributes(items).values()]
        title = _mapped(items["title"], lambda value: plain_text(str(value), columns.max_value_chars))
        return pc.fill_null(title, ""), _joined(attributes, columns.separator, items.num_rows)

    def _event_attributes(self, items: pa.Table) -> dict[str, pa.Array]:
        columns, personal = self._history_lines, self.tables.personal.get("item", ())
        names = _shown_names(items, columns, ("item_id", "title"), personal)
        return {name: _mapped(items[name], partial(event_value, columns=columns, name=name)) for name in names}

    def item_texts(self, titles: Collection[str]) -> dict[str, dict[str, str]]:
        """The texts that histories show of items with some titles, as prompts have them: title -> column -> text."""
        is_requested = pc.is_in(self._events[0], value_set=pa.array(titles, pa.string()))
        item_titles = self._events[0].filter(is_requested).to_pylist()
        texts: dict[str, dict[str, str]] = {title: {} for title in item_titles}
        for name, shown in self._event_attributes(self.tables.items.filter(is_requested)).items():
            for title, text in zip(item_titles, shown.to_pylist(), strict=True):
                texts[title] |= {} if text is None else {name: text}
        return texts

    @cached_property
    def _event_digests(self) -> np.ndarray:
        """The digests of the title and attributes of each item, V8 (num_items,)."""
        digests = []
        for part in _slices(pa.table(dict(zip(("title", "rest"), self._events, strict=True)))):
            texts = zip(part["title"].to_pylist(), part["rest"].to_pylist(), strict=True)
            # A title has no line break.
            lines = (title if rest is None else f"{title}\n{rest}" for title, rest in texts)
            digests.append(np.frombuffer(_digests(line.encode() for line in lines), _DIGEST))
        return np.concatenate(digests)

    @cached_property
    def _label_digests(self) -> np.ndarray:
        """The digests of `_labels`, V8."""
        return np.frombuffer(_digests((label or "").encode() for label in self._labels.texts), _DIGEST)

    def _attribute_lines(self, part: pa.Table) -> pa.Array:
        columns, personal = self._template.attributes, self.tables.personal.get(self.side, ())
        names = _shown_names(part, columns, (f"{self.side}_id",), personal)
        lines = [_mapped(part[name], lambda value, name=name: attribute_line(name, value, columns)) for name in names]
        return _joined(lines, "\n", part.num_rows)

    def _history_digests(self, rows: np.ndarray) -> pa.Array:
        if self._template.history is None:
            return pa.repeat(_in_hex([b""])[0], len(rows))
        places, starts = self.histories.chosen(rows, self._template.history)
        shown = np.empty((len(places), 2), _DIGEST)
        shown[:, 0] = self._event_digests[self.histories.items[places]]
        shown[:, 1] = self._label_digests[self.histories.columns["label"][places]]
        data, bounds = shown.view(np.uint8).reshape(-1).data, (starts * 2 * DIGEST_BYTES).tolist()
        return _in_hex(data[first:last] for first, last in pairwise(bounds))


class _EventLabels:
    """The labels of events: what happened, the rating, or both."""

    def __init__(self, interactions: pa.Table, lines: HistoryLines) -> None:
        columns = (interactions[name] if name in interactions.column_names else None for name in LABEL_COLUMNS)
        self._columns, self._lines = tuple(columns), lines
        self._number_of = dict[str | None, int]()

    @property
    def texts(self) -> list[str | None]:
        """The distinct labels that `numbers` has met, by number; None: neither event nor rating is known."""
        return list(self._number_of)

    def numbers(self, at: slice) -> np.ndarray:
        """The numbers of the labels of a slice of the log, int32[n]; each distinct pair is looked at once."""
        events, ratings = (_encoded(column, at) for column in self._columns)
        num_ratings = len(ratings.dictionary)
        pairs = pc.add(pc.multiply(events.indices.cast(pa.int64()), num_ratings), ratings.indices).dictionary_encode()
        event, rating = (pa.array(part) for part in np.divmod(pairs.dictionary.to_numpy(), num_ratings))
        labels = self._labels(events.dictionary.take(event), ratings.dictionary.take(rating)).to_pylist()
        number_of = self._number_of
        numbers = np.array([number_of.setdefault(label, len(number_of)) for label in labels], np.int32)
        return numbers[pairs.indices.to_numpy()]

    def _labels(self, events: pa.Array, ratings: pa.Array) -> pa.Array:
        kind = {pa.null(): pa.float64(), pa.bool_(): pa.int8()}.get(ratings.type, ratings.type)
        rated = _mapped(ratings.cast(kind), lambda value: _rating_label(value, self._lines))
        event_texts = _mapped(events.cast(pa.string()), lambda event: event_text(event, self._lines.events) or None)
        between = pc.if_else(pc.equal(event_texts, "rated"), " ", ", rated ")
        both = pc.binary_join_element_wise(event_texts, between, rated, "")
        return pc.coalesce(both, event_texts, rated)


def _encoded(column: pa.ChunkedArray | None, at: slice) -> pa.DictionaryArray:
    """A slice of a column, or nulls, in distinct values; one of them is null where a value is."""
    if column is None:
        return pa.nulls(at.stop - at.start).dictionary_encode("encode")
    values = only_chunk(column)[at]
    if not pt.is_dictionary(values.type):
        return values.dictionary_encode("encode")
    codes, words = codes_of(values), values.dictionary
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.concat_arrays([words, pa.nulls(1, words.type)]))


def shown_of_row(row: dict) -> Shown:
    """A row of `SHOWN_SCHEMA` as the data from which a prompt is rendered."""
    events = [] if row["history"] is None else [tuple(event) for event in json.loads(row["history"])]
    return Shown(row["attributes"], events, row["num_events"])


_BETWEEN_PARTS = "\x1f"  # the unit separator, which no text of a list should have
_NOTHING = b"\xff"  # digested if no attribute is shown; no text has this byte


def _shown_names(table: pa.Table, columns: Columns, left_out: tuple[str, ...], personal: Collection[str]) -> list[str]:
    names = [name for name in table.column_names if name not in (*left_out, "created_at")]
    return columns.shown(dict.fromkeys(names), personal)


def _mapped(column: pa.ChunkedArray | pa.Array, show: Callable[[Any], str | None]) -> pa.Array:
    """The text of each value, made once for each distinct one; null if there is none."""
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pt.is_list(values.type):
        is_unfit = pc.fill_null(pc.match_substring(values.flatten(), _BETWEEN_PARTS), True)  # also a part that is null
        if not pc.any(is_unfit).as_py():  # lists, too, become text once for each distinct one
            joined = pc.binary_join(values, pa.scalar(_BETWEEN_PARTS, values.type.value_type))
            return _mapped(joined, lambda text: show(text.split(_BETWEEN_PARTS)))
    try:
        encoded = values.dictionary_encode()
    except pa.ArrowNotImplementedError:
        return pa.array([None if value is None else show(value) for value in python_values(values)], pa.string())
    shown = [None if value is None else show(value) for value in python_values(encoded.dictionary)]
    return pa.array(shown, pa.string()).take(encoded.indices)


def _rating_label(rating: float, lines: HistoryLines) -> str | None:
    text = None if math.isnan(rating) else number_text(rating)
    return text and (lines.ratings.get(float(text)) or text)


def _joined(texts: list[pa.Array], separator: str, num_rows: int) -> pa.Array:
    """The texts of each row joined, without nulls; null if all of them are. Large strings: may be more than 2 GiB."""
    if not texts:
        return pa.nulls(num_rows, pa.large_string())
    texts = [text.cast(pa.large_string()) for text in texts]
    is_any, end = pc.coalesce(*texts).is_valid(), pa.scalar(separator, pa.large_string())
    # If all texts of a row were null, Arrow would leave out the row itself.
    first = pc.if_else(is_any, texts[0], pa.scalar("", pa.large_string()))
    joined = pc.binary_join_element_wise(first, *texts[1:], end, null_handling="skip")
    return pc.if_else(is_any, joined, pa.scalar(None, pa.large_string()))


def _slices(table: pa.Table) -> Iterator[pa.Table]:
    """Parts of a table; one empty part if it has no rows."""
    return (table.slice(start, ROWS_AT_ONCE) for start in range(0, max(table.num_rows, 1), ROWS_AT_ONCE))


def _digests(parts: Iterable[bytes | memoryview]) -> bytes:
    """The digests of some data, one after another."""
    return b"".join(blake2b(data, digest_size=DIGEST_BYTES).digest() for data in parts)


def _in_hex(parts: Iterable[bytes | memoryview]) -> pa.Array:
    """The digests of some data as hexadecimal text."""
    digits = pa.py_buffer(_digests(parts).hex().encode())
    kind = pa.binary(2 * DIGEST_BYTES)
    return pa.Array.from_buffers(kind, digits.size // (2 * DIGEST_BYTES), [None, digits]).cast(pa.string())
