"""Interactions in order of time, some rows at a time, and exact copies among rows in order.

Rows are arrays of equal length, by the names of their columns: `timestamp` int64, `user_id` and `item_id` codes that
ascend as the ids do, and others, (n,) or (n, k).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.tables.schema import ID_COLUMNS, REQUIRED_COLUMNS
from laserbatch.retrieval_pools.mapped import MappedFiles

ROWS_AT_ONCE = 256 * 1024
MAX_RANGES = 2**16
Rows = Mapping[str, np.ndarray]


def only_chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, which is not copied where it is one already."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def codes_of(ids: pa.DictionaryArray) -> np.ndarray:
    """int32[n], one more than there are for null."""
    return (ids.indices.fill_null(len(ids.dictionary)) if ids.null_count else ids.indices).to_numpy()


def slices(num_rows: int) -> Iterator[slice]:
    """All rows, so many at once."""
    return (slice(start, min(start + ROWS_AT_ONCE, num_rows)) for start in range(0, num_rows, ROWS_AT_ONCE))


def in_order(rows: Rows, files: MappedFiles) -> Iterator[Rows]:
    """The rows by time, user, item, those of a moment in one block; equal ones as they came.

    A block is read from `rows` when it is asked for, so those before it may be written over. Rows that do not come in
    order of time are moved to `files` first, those of a range of times next to each other.
    """
    times = rows["timestamp"]
    num_rows, stops = len(times), None
    if any(np.any(times[at.start + 1 : at.stop + 1] < times[at][: num_rows - at.start - 1]) for at in slices(num_rows)):
        rows, stops = _in_ranges(rows, files)
        times = rows["timestamp"]
    start = 0
    while start < num_rows:
        last = min(start + ROWS_AT_ONCE, num_rows) - 1
        # The first range that ends there; in sorted times the end of a moment.
        stop = int(np.searchsorted(times, times[last], "right") if stops is None else stops[stops > last][0])
        order = _order_within(*(rows[name][start:stop] for name in ("timestamp", *ID_COLUMNS.values())))
        yield {
            name: values[start:stop] if order is None else values[start:stop][order] for name, values in rows.items()
        }
        start = stop


def _in_ranges(rows: Rows, files: MappedFiles) -> tuple[Rows, np.ndarray]:
    """The rows with those of a range of times next to each other, in order of ranges; and where each range ends."""
    times = rows["timestamp"]
    num_rows = len(times)
    num_ranges = min(-(-2 * num_rows // ROWS_AT_ONCE), MAX_RANGES)
    sample = np.sort(times[:: max(num_rows // (64 * num_ranges), 1)])
    bounds = np.unique(sample[np.arange(1, num_ranges) * len(sample) // num_ranges])
    counts = np.zeros(len(bounds) + 1, np.int64)
    for at in slices(num_rows):
        counts += np.bincount(np.searchsorted(bounds, times[at], "right"), minlength=len(counts))
    stops = np.cumsum(counts)
    ends = stops - counts  # of what is there of each range
    moved = {name: files.empty(values.shape, values.dtype) for name, values in rows.items()}
    for at in slices(num_rows):
        range_of = np.searchsorted(bounds, times[at], "right").astype(np.uint16)
        order, num_of = np.argsort(range_of, kind="stable"), np.bincount(range_of, minlength=len(counts))
        places = np.arange(len(order)) + np.repeat(ends - np.cumsum(num_of) + num_of, num_of)
        ends += num_of
        for name, values in rows.items():
            moved[name][places] = values[at][order]
    return moved, stops


def _order_within(times: np.ndarray, user: np.ndarray, item: np.ndarray) -> np.ndarray | None:
    """The order of some rows by time, user, item, equal ones as they come, int64[n]; None: as they are."""
    order = None
    if np.any(times[1:] < times[:-1]):
        order = np.argsort(times, kind="stable")
        times = times[order]
    is_next_alike = times[1:] == times[:-1]
    places = np.flatnonzero(np.append(is_next_alike, False) | np.append(False, is_next_alike))
    rows = places if order is None else order[places]
    order_of_alike = _sorted_within(times[places], user[rows], item[rows])
    if order is None and np.all(order_of_alike[1:] > order_of_alike[:-1]):
        return None
    order = np.arange(len(times)) if order is None else order
    order[places] = rows[order_of_alike]
    return order


def alike(rows: Rows) -> np.ndarray:
    """Whether each of the rows in order but the first has the time, user and item of the one before: bool[n - 1]."""
    required = (rows[name] for name in REQUIRED_COLUMNS["interactions"])
    return np.logical_and.reduce([values[1:] == values[:-1] for values in required])


def exact_copies(rows: Rows) -> np.ndarray:
    """Which of the rows in order are equal to an earlier one in every column: bool[n]."""
    is_copy = np.zeros(len(rows["timestamp"]), bool)
    is_alike = alike(rows)
    others = [values for name, values in rows.items() if name not in REQUIRED_COLUMNS["interactions"]]
    if not others or not is_alike.any():
        is_copy[1:] = is_alike
        return is_copy
    # Rows of one moment, user and item are next to each other, but those of one rating and event need not be.
    places = np.flatnonzero(np.append(is_alike, False) | np.append(False, is_alike))
    run_of = np.concatenate([[0], np.cumsum(~is_alike)])[places]
    is_copy[places] = equal_to_earlier(
        [run_of, *(column for values in others for column in np.atleast_2d(values[places].T))]
    )
    return is_copy


def equal_to_earlier(keys: Sequence[np.ndarray]) -> np.ndarray:
    """Which rows are equal to an earlier one in all keys, each (n,): bool[n]."""
    order, is_equal = np.lexsort(keys), np.zeros(len(keys[0]), bool)
    is_equal[order[1:]] = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
    return is_equal


def _sorted_within(times: np.ndarray, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """The order by time, user, item of rows that come in order of time; int64[n]."""
    if not len(times):
        return np.zeros(0, np.int64)
    num_users, num_items = int(user.max()) + 1, int(item.max()) + 1
    moment = np.concatenate([[0], np.cumsum(times[1:] != times[:-1])])
    at_once = np.iinfo(np.int64).max // (num_users * num_items)  # moments that one number tells from each other
    order = np.empty(len(times), np.int64)
    starts = np.searchsorted(moment, np.arange(0, moment[-1] + 1, at_once)).tolist()
    for start, stop in pairwise([*starts, len(times)]):
        part = slice(start, stop)
        key = ((moment[part] - moment[start]) * num_users + user[part]) * num_items + item[part]
        order[part] = start + np.argsort(key, kind="stable")
    return order
