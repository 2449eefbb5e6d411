"""The order of interactions in time, ids as codes of their distinct values, and exact copies among rows in order."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.tables.schema import ID_COLUMNS

ROWS_AT_ONCE = 1024 * 1024


def coded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Ids as codes, int32, of their distinct values, which ascend: what is sorted by code is sorted by id."""
    codes = np.arange(len(column), dtype=np.int32)
    # Arrow's grouping looks words up twice as fast as its dictionaries do.
    groups = pa.table({"id": column, "row": codes}).group_by("id", use_threads=False).aggregate([("row", "list")])
    del column
    ids, rows_of = groups["id"].combine_chunks(), groups["row_list"].combine_chunks()
    order = pc.sort_indices(ids)  # a null comes last
    places = np.empty(len(ids), np.int32)
    places[order.to_numpy()] = np.arange(len(ids), dtype=np.int32)
    codes[rows_of.flatten().to_numpy()] = np.repeat(places, rows_of.value_lengths().to_numpy())
    distinct = ids.take(order).drop_null()
    codes = pa.array(codes, mask=codes == len(distinct) if ids.null_count else None)
    return pa.DictionaryArray.from_arrays(codes, distinct)


def only_chunk(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, which is not copied where it is one already."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def codes_of(ids: pa.DictionaryArray) -> np.ndarray:
    """int32[n], one more than there are for null."""
    return (ids.indices.fill_null(len(ids.dictionary)) if ids.null_count else ids.indices).to_numpy()


def by_time(interactions: pa.Table) -> pa.Table:
    """Sorted by time, user, item, nulls last. What comes sorted, as logs do but within a second, is not copied."""
    order = time_order(interactions)
    if np.all(order[1:] > order[:-1]):
        return interactions
    names, columns = interactions.column_names, interactions.columns
    del interactions
    for number in range(len(columns)):  # one at a time, and what it was is let go
        columns[number] = columns[number].take(pa.array(order))
        pa.default_memory_pool().release_unused()
    return pa.table(columns, names)


def time_order(interactions: pa.Table) -> np.ndarray:
    """The order of rows by time, user, item, nulls last: int32 or int64 (n,)."""
    times = _times(interactions)
    user, item = (codes_of(only_chunk(interactions[f"{side}_id"])) for side in SIDES)
    order = np.arange(len(times), dtype=np.int32 if len(times) < 2**31 else np.int64)
    if np.any(times[1:] < times[:-1]):
        order[:] = np.argsort(times, kind="stable")
        times = times[order]
    stop = 0
    while stop < len(times):  # some at a time, none of which has the time of one that follows
        start, last = stop, times[min(stop + ROWS_AT_ONCE, len(times)) - 1]
        stop = int(np.searchsorted(times, last, side="right"))
        moments = times[start:stop]
        is_alike = np.zeros(len(moments), bool)
        is_alike[:-1] = moments[1:] == moments[:-1]
        is_alike[1:] |= is_alike[:-1].copy()
        places = np.flatnonzero(is_alike)
        rows = order[start:stop][places]
        order[start:stop][places] = rows[_sorted_within(moments[places], user[rows], item[rows])]
    return order


def _times(interactions: pa.Table) -> np.ndarray:
    """int64[n]; the largest for null."""
    times = only_chunk(interactions["timestamp"]).cast(pa.int64())
    return (times.fill_null(np.iinfo(np.int64).max) if times.null_count else times).to_numpy()


def exact_copies(interactions: pa.Table) -> np.ndarray:
    """Which rows are equal to an earlier one in every column, bool[n], of rows in order of time, user, item."""
    is_copy = np.zeros(interactions.num_rows, bool)
    if interactions.num_rows < 2:
        return is_copy
    times = _times(interactions)
    is_alike = times[1:] == times[:-1]
    for side in SIDES:
        codes = codes_of(only_chunk(interactions[f"{side}_id"]))
        is_alike &= codes[1:] == codes[:-1]
    others = [name for name in interactions.column_names if name not in ("timestamp", *ID_COLUMNS.values())]
    if not others or not is_alike.any():
        is_copy[1:] = is_alike
        return is_copy
    # Rows of one moment, user and item are next to each other, but those of one rating and event need not be.
    run = np.concatenate([[0], np.cumsum(~is_alike)])
    rows = np.flatnonzero(np.append(is_alike, False) | np.append(False, is_alike))
    keys = [run[rows]]
    for name in others:
        values = interactions[name].take(pa.array(rows)).combine_chunks()
        values = values.dictionary_decode() if pt.is_dictionary(values.type) else values
        if pt.is_nested(values.type):
            values = pa.array(map(repr, values.to_pylist()))
        keys.append(values.dictionary_encode(null_encoding="encode").indices.to_numpy())
    _, firsts = np.unique(np.stack(keys, axis=1), axis=0, return_index=True)  # the first of equal ones
    is_copy[np.delete(rows, firsts)] = True
    return is_copy


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
