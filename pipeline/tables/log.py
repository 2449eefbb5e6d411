"""Interactions as fixed-width arrays: appended batch by batch, sorted in place, then wrapped as a table.

The arrays lie in mapped files, so that a process's own memory grows only with the number of distinct ids. This module
does not know the files of the tables.

Functions that sort rows or find exact copies take arrays of equal length by column name: `timestamp` int64, `user_id`
and `item_id` codes that ascend with the ids, and other columns, (n,) or (n, k).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.tables.schema import ID_COLUMNS, REQUIRED_COLUMNS
from laserbatch.retrieval_pools.ids import IdCodes
from laserbatch.retrieval_pools.mapped import MappedFiles

NULL_TIME = np.iinfo(np.int64).max  # sorts last
ROWS_AT_ONCE = 256 * 1024
MAX_RANGES = 2**16
Rows = Mapping[str, np.ndarray]


class StoredLog:
    """Rows of interactions. `kinds`: column types; text other than ids has few distinct values, or none (type null)."""

    def __init__(self, kinds: Mapping[str, pa.DataType], max_rows: int, files: MappedFiles) -> None:
        self.num_rows, self._files, self._kinds = 0, files, kinds
        self._coded = {
            name: _Coded(kind, max_rows, files) for name, kind in kinds.items()
            if name in ID_COLUMNS.values() or pt.is_string(kind) or pt.is_null(kind)
        }  # fmt: skip
        self._fixed = {
            name: _Fixed(kind, max_rows, files, NULL_TIME if name == "timestamp" else 0)
            for name, kind in kinds.items() if name not in self._coded
        }  # fmt: skip

    def append(self, columns: Mapping[str, pa.Array]) -> None:
        """Add rows, with all columns in their types; words may be of type null."""
        at = slice(self.num_rows, self.num_rows + len(columns["timestamp"]))
        for name, values in columns.items():
            (self._coded | self._fixed)[name].write(at, values)
        self.num_rows = at.stop

    def see(self, column: str, ids: pa.Array) -> None:
        """Include the ids of rows that are not added in the result of `sort_ids`."""
        self._coded[column].codes_of(ids)

    def sort_ids(self) -> dict[str, pa.ChunkedArray]:
        """Renumber codes to ascend with the ids of rows. Returns all ids by column, also those only seen; null last."""
        return {name: self._coded[name].sort(self.num_rows, self._files) for name in ID_COLUMNS.values()}

    def dictionary(self, column: str) -> pa.Array:
        """The ids of the rows after `sort_ids`: a code is a place in it, and the next code means null."""
        return self._coded[column].dictionary

    def rows(self) -> dict[str, np.ndarray]:
        """The rows as arrays: codes for ids and words; numbers and times, each with an array `<name> is null`."""
        arrays = {name: column.codes for name, column in self._coded.items()}
        for name, column in self._fixed.items():
            arrays |= {name: column.values, f"{name} is null": column.is_null}
        return {name: array[: self.num_rows] for name, array in arrays.items()}

    def to_table(self, num_rows: int) -> pa.Table:
        """The first `num_rows` rows as a table, without copying them."""
        columns = {name: column.to_arrow(num_rows) for name, column in (self._coded | self._fixed).items()}
        nulls = {name: pa.nulls(num_rows, pa.string()) for name, kind in self._kinds.items() if pt.is_null(kind)}
        return pa.table({name: (columns | nulls)[name] for name in self._kinds})


class _Coded:
    """A column of ids or words: int32 codes, places in `dictionary`; null is -1, or after `sort` the next code."""

    def __init__(self, kind: pa.DataType, max_rows: int, files: MappedFiles) -> None:
        self.codes = files.empty((max_rows,), np.dtype(np.int32))
        self._ids, self._has_null = IdCodes(pa.string() if pt.is_null(kind) else kind), False
        self._sorted: pa.Array | None = None

    @property
    def dictionary(self) -> pa.Array:
        return self._ids.values() if self._sorted is None else self._sorted

    def codes_of(self, values: pa.Array) -> np.ndarray:
        self._has_null |= values.null_count > 0
        return self._ids.add(values.cast(self._ids.kind))

    def write(self, at: slice, values: pa.Array) -> None:
        self.codes[at] = self.codes_of(values)

    def sort(self, num_rows: int, files: MappedFiles) -> pa.ChunkedArray:
        ids, codes = self._ids.values(), self.codes[:num_rows]
        del self._ids
        order = pc.sort_indices(ids).to_numpy()
        ids = files.array(ids.take(pa.array(order)))
        occurs = np.zeros(len(ids) + 1, bool)
        for at in slices(num_rows):
            occurs[codes[at]] = True
        occurs = occurs[order]
        places = np.empty(len(ids) + 1, np.int32)
        places[order], places[-1] = np.cumsum(occurs, dtype=np.int32) - 1, np.count_nonzero(occurs)
        for at in slices(num_rows):
            codes[at] = places[codes[at]]  # code -1 takes the last place, that of null
        self._sorted = ids if occurs.all() else files.array(ids.filter(pa.array(occurs)))
        return pa.chunked_array([ids, pa.nulls(int(self._has_null), ids.type)])

    def to_arrow(self, num_rows: int) -> pa.Array:
        codes, words = self.codes[:num_rows], self.dictionary
        validity = _validity(num_rows, lambda at: (codes[at] >= 0) & (codes[at] < len(words)))
        kind = pa.dictionary(pa.int32(), words.type)
        return pa.DictionaryArray.from_buffers(kind, num_rows, [validity, pa.py_buffer(codes)], words)


class _Fixed:
    """A column of times or numbers, their bits as integers: (n,), or (n, k) for values of more than eight bytes."""

    def __init__(self, kind: pa.DataType, max_rows: int, files: MappedFiles, null_value: int) -> None:
        self._kind, self._null_value = kind, null_value
        width = max(kind.bit_width // 8, 1)
        dtype = np.dtype(np.int64 if pt.is_timestamp(kind) else f"u{min(width, 8)}")
        self.values = files.empty((max_rows,) if width <= 8 else (max_rows, width // 8), dtype)
        self.is_null = files.empty((max_rows,), np.dtype(bool))

    def write(self, at: slice, values: pa.Array) -> None:
        is_null = self.is_null[at] = values.is_null().to_numpy(zero_copy_only=False)
        if pt.is_boolean(self._kind):
            values = values.cast(pa.uint8())
        shape = (-1, *self.values.shape[1:])
        bits = np.frombuffer(values.buffers()[1] or b"", self.values.dtype).reshape(shape)
        bits = bits[values.offset : values.offset + len(values)]
        self.values[at] = np.where(is_null.reshape(-1, *[1] * (bits.ndim - 1)), self._null_value, bits)

    def to_arrow(self, num_rows: int) -> pa.Array:
        values, is_null = self.values[:num_rows], self.is_null[:num_rows]
        if pt.is_boolean(self._kind):
            return pa.array(values.view(bool), mask=is_null if is_null.any() else None)
        validity = _validity(num_rows, lambda at: ~is_null[at])
        return pa.Array.from_buffers(self._kind, num_rows, [validity, pa.py_buffer(values)])


def _validity(num_rows: int, is_valid: Callable[[slice], np.ndarray]) -> pa.Buffer | None:
    """Arrow's bitmap of the rows that are not null; None if no row is null."""
    bitmap, num_valid = [], 0
    for at in slices(num_rows):
        part = is_valid(at)
        bitmap.append(np.packbits(part, bitorder="little"))
        num_valid += np.count_nonzero(part)
    return None if num_valid == num_rows else pa.py_buffer(np.concatenate(bitmap))


def only_chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, without a copy if it has one chunk."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def codes_of(ids: pa.DictionaryArray) -> np.ndarray:
    """The codes of ids, int32[n]; null gets the code after the last id."""
    return (ids.indices.fill_null(len(ids.dictionary)) if ids.null_count else ids.indices).to_numpy()


def slices(num_rows: int) -> Iterator[slice]:
    """Slices of all rows, at most `ROWS_AT_ONCE` each."""
    return (slice(start, min(start + ROWS_AT_ONCE, num_rows)) for start in range(0, num_rows, ROWS_AT_ONCE))


def in_order(rows: Rows, files: MappedFiles) -> Iterator[Rows]:
    """Blocks of the rows in order of time, user and item; the sort is stable, and rows of one moment are in one block.

    A block is read from `rows` on demand, so that the rows of earlier blocks may be overwritten. Rows that are not in
    order of time are first moved to `files`, grouped by ranges of time.
    """
    times = rows["timestamp"]
    num_rows, stops = len(times), None
    if any(np.any(times[at.start + 1 : at.stop + 1] < times[at][: num_rows - at.start - 1]) for at in slices(num_rows)):
        rows, stops = _in_ranges(rows, files)
        times = rows["timestamp"]
    start = 0
    while start < num_rows:
        last = min(start + ROWS_AT_ONCE, num_rows) - 1
        # The end of the first range that ends after `last`; if times are sorted, the end of its moment.
        stop = int(np.searchsorted(times, times[last], "right") if stops is None else stops[stops > last][0])
        order = _order_within(*(rows[name][start:stop] for name in ("timestamp", *ID_COLUMNS.values())))
        yield {
            name: values[start:stop] if order is None else values[start:stop][order] for name, values in rows.items()
        }
        start = stop


def _in_ranges(rows: Rows, files: MappedFiles) -> tuple[Rows, np.ndarray]:
    """The rows grouped by ranges of time, in order of the ranges; and the end of each range."""
    times = rows["timestamp"]
    num_rows = len(times)
    num_ranges = min(-(-2 * num_rows // ROWS_AT_ONCE), MAX_RANGES)
    sample = np.sort(times[:: max(num_rows // (64 * num_ranges), 1)])
    bounds = np.unique(sample[np.arange(1, num_ranges) * len(sample) // num_ranges])
    counts = np.zeros(len(bounds) + 1, np.int64)
    for at in slices(num_rows):
        counts += np.bincount(np.searchsorted(bounds, times[at], "right"), minlength=len(counts))
    stops = np.cumsum(counts)
    ends = stops - counts  # end of the rows moved so far, for each range
    moved = {name: files.empty(values.shape, values.dtype) for name, values in rows.items()}
    for at in slices(num_rows):
        range_of = np.searchsorted(bounds, times[at], "right").astype(np.uint16)
        order, num_of = np.argsort(range_of, kind="stable"), np.bincount(range_of, minlength=len(counts))
        places = np.arange(len(order)) + np.repeat(ends - np.cumsum(num_of) + num_of, num_of)
        ends += num_of
        for name, values in rows.items():
            moved[name][places] = values[at][order]
    return moved, stops


def _beside(is_alike: np.ndarray) -> np.ndarray:
    """Places of rows that are like a neighbour; `is_alike`, bool[n - 1], compares each row with the next."""
    return np.flatnonzero(np.append(is_alike, False) | np.append(False, is_alike))


def _order_within(times: np.ndarray, user: np.ndarray, item: np.ndarray) -> np.ndarray | None:
    """The stable order of some rows by time, user, item: int64[n]; None if they are in order already."""
    order = None
    if np.any(times[1:] < times[:-1]):
        order = np.argsort(times, kind="stable")
        times = times[order]
    places = _beside(times[1:] == times[:-1])
    rows = places if order is None else order[places]
    order_of_alike = _sorted_within(times[places], user[rows], item[rows])
    if order is None and np.all(order_of_alike[1:] > order_of_alike[:-1]):
        return None
    order = np.arange(len(times)) if order is None else order
    order[places] = rows[order_of_alike]
    return order


def alike(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Find the sorted rows that have the same time, user and item as a neighbour.

    Returns two int64[n]: their places, ascending, and the number of the run of alike rows that each is in.
    """
    required = (rows[name] for name in REQUIRED_COLUMNS["interactions"])
    is_alike = np.logical_and.reduce([values[1:] == values[:-1] for values in required])
    places = _beside(is_alike)
    return places, np.concatenate([[0], np.cumsum(~is_alike)])[places]


def exact_copies(rows: Rows) -> np.ndarray:
    """Whether each of the sorted rows is equal to an earlier one in every column: bool[n]."""
    is_copy = np.zeros(len(rows["timestamp"]), bool)
    places, run_of = alike(rows)
    # Rows of one moment, user and item are next to each other, but those of one rating and event need not be.
    others = [values[places] for name, values in rows.items() if name not in REQUIRED_COLUMNS["interactions"]]
    is_copy[places] = equal_to_earlier([run_of, *(column for values in others for column in np.atleast_2d(values.T))])
    return is_copy


def equal_to_earlier(keys: Sequence[np.ndarray]) -> np.ndarray:
    """Whether each row is equal to an earlier one in all keys, each (n,): bool[n]."""
    order, is_equal = np.lexsort(keys), np.zeros(len(keys[0]), bool)
    is_equal[order[1:]] = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
    return is_equal


def _sorted_within(times: np.ndarray, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """The order by time, user, item of rows that are in order of time already: int64[n]."""
    if not len(times):
        return np.zeros(0, np.int64)
    num_users, num_items = int(user.max()) + 1, int(item.max()) + 1
    moment = np.concatenate([[0], np.cumsum(times[1:] != times[:-1])])
    at_once = np.iinfo(np.int64).max // (num_users * num_items)  # number of moments for which keys fit into int64
    order = np.empty(len(times), np.int64)
    starts = np.searchsorted(moment, np.arange(0, moment[-1] + 1, at_once)).tolist()
    for start, stop in pairwise([*starts, len(times)]):
        part = slice(start, stop)
        key = ((moment[part] - moment[start]) * num_users + user[part]) * num_items + item[part]
        order[part] = start + np.argsort(key, kind="stable")
    return order
