"""Plans the new lists of users; drafts come from earlier lists of the user and of users with the same last item."""

import datetime
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.research.recommending.codes import ItemCodes
from laserbatch.retrieval_pools.ids import rows_among

DAYS = 7  # new items can enter every list within this many days


def list_fingerprints(
    catalogue: ItemCodes, histories: Sequence[np.ndarray], request: str, popular: np.ndarray
) -> pa.Array:
    """The fingerprint of each user's list: a hash of the `request` to the model, and of the history or, if that is
    empty, of the `popular` items. Histories are rows of the catalogue."""

    def of(kind: bytes, rows: np.ndarray) -> str:
        return hashlib.blake2b(request.encode() + kind + catalogue.codes[rows].tobytes(), digest_size=16).hexdigest()

    of_popular = of(b" popular ", popular)
    return pa.array([of(b" history ", history) if len(history) else of_popular for history in histories], pa.string())


def carried_lists(previous: pa.Table, user_ids: pa.Array, fingerprints: pa.Array, catalogue: ItemCodes) -> np.ndarray:
    """For each user, the row of the earlier list that is carried over: int64[num_users], -1 if none is.

    A list is carried over if its fingerprint is the same and all of its items are still in the catalogue.
    """
    rows = rows_among(user_ids, previous["entity_id"])
    places = pa.array(rows, mask=rows < 0)
    before, is_stale = (previous[name].combine_chunks().take(places) for name in ("fingerprint", "is_stale"))
    same = pc.and_not(pc.equal(before, fingerprints), is_stale)
    stays = (rows >= 0) & pc.fill_null(same, False).to_numpy(zero_copy_only=False)
    stays[stays] = ~_has_gone(previous, catalogue)[rows[stays]]
    return np.where(stays, rows, -1)


def due_lists(previous: pa.Table, date: datetime.date, has_grown: Callable[[str], bool]) -> np.ndarray:
    """Whether each earlier list is made again on a date, so that new items can enter it: bool[num_lists].

    A list is due on one day of the week, which depends on its fingerprint, if the catalogue `has_grown` since its run.
    """
    digits = pc.utf8_slice_codeunits(previous["fingerprint"], 0, 1).to_pylist()
    is_day = np.array([int(digit, 16) % DAYS == date.toordinal() % DAYS for digit in digits], bool)
    grown = [run_id for run_id in pc.unique(previous["run_id"]).to_pylist() if has_grown(run_id)]
    made_before = pc.is_in(previous["run_id"], value_set=pa.array(grown, pa.string()))
    return is_day & made_before.to_numpy()


def stale_lists(previous: pa.Table, user_ids: pa.Array, catalogue: ItemCodes) -> pa.Table:
    """The earlier lists of some users, marked as stale; a list with an item that left the catalogue is dropped."""
    rows = rows_among(user_ids, previous["entity_id"])
    rows = rows[rows >= 0]
    rows = rows[~_has_gone(previous, catalogue)[rows]]
    stale = previous.take(pa.array(rows))
    place = stale.schema.get_field_index("is_stale")
    return stale.set_column(place, stale.schema.field(place), pa.repeat(True, len(rows)))


def without_had(lists: pa.Table, user_ids: pa.Array, histories: Sequence[np.ndarray], catalogue: ItemCodes) -> pa.Table:
    """Remove items that users had since from their earlier lists; `histories` of `user_ids` are catalogue rows."""
    users = rows_among(lists["entity_id"], user_ids)
    items, scores = [], []
    for user, listed, of_each in zip(users.tolist(), lists["items"], lists["scores"].to_pylist(), strict=True):
        had = np.isin(rows_among(listed.values, catalogue.item_ids), histories[user])
        items.append(listed.values.filter(pa.array(~had)).to_pylist())
        scores.append([score for score, is_had in zip(of_each, had.tolist(), strict=True) if not is_had])
    for name, values in (("items", items), ("scores", scores)):
        place = lists.schema.get_field_index(name)
        lists = lists.set_column(place, lists.schema.field(place), pa.array(values, lists.schema.field(place).type))
    return lists


def _has_gone(previous: pa.Table, catalogue: ItemCodes) -> np.ndarray:
    lists = previous["items"].combine_chunks()
    is_gone = pc.invert(pc.is_in(lists.flatten(), value_set=catalogue.item_ids)).to_numpy(zero_copy_only=False)
    ends = np.cumsum(pc.list_value_length(lists).to_numpy())
    return np.diff(np.append(0, np.cumsum(is_gone))[np.append(0, ends)]) > 0


def listed_drafts(
    previous: pa.Table, user_ids: pa.Array, last_items: np.ndarray, catalogue: ItemCodes, most: int
) -> pa.Array:
    """At most `most` likely items of each user, the most likely first, as lists of rows of the catalogue.

    First come the items of the user's earlier list, then the most frequent items in earlier lists of users with the
    same last item. `last_items` int64[num_users] are the rows of the histories' last items.
    """
    if most == 0:
        return pa.array([[]] * len(user_ids), pa.list_(pa.int32()))
    lists = previous["items"].combine_chunks()
    items = rows_among(lists.flatten(), catalogue.item_ids)
    starts = np.append(0, np.cumsum(pc.list_value_length(lists).to_numpy()))
    groups = _lists_by_last_item(previous, last_items, catalogue, items, np.diff(starts))
    drafts, nobody = [], np.empty(0, np.int64)
    for row, last in zip(rows_among(user_ids, previous["entity_id"]).tolist(), last_items.tolist(), strict=True):
        listed = items[starts[row] : starts[row + 1]] if row >= 0 else nobody
        both = dict.fromkeys([*listed.tolist(), *groups.get(last, nobody)[:most].tolist()])
        both.pop(-1, None)
        drafts.append(list(both)[:most])
    return pa.array(drafts, pa.list_(pa.int32()))


def _lists_by_last_item(
    previous: pa.Table, last_items: np.ndarray, catalogue: ItemCodes, items: np.ndarray, lengths: np.ndarray
) -> dict[int, np.ndarray]:
    """By last item, the items of earlier lists of users with this last item, the most frequent first."""
    last = np.repeat(rows_among(previous["last_item"], catalogue.item_ids), lengths)
    is_wanted = np.isin(last, last_items) & (items >= 0)
    keys, counts = np.unique(last[is_wanted] * len(catalogue) + items[is_wanted], return_counts=True)
    last, items = np.divmod(keys, len(catalogue))
    order = np.lexsort((-counts, last))
    begins = np.flatnonzero(np.diff(last[order], prepend=-1))
    return dict(zip(last[order][begins].tolist(), np.split(items[order], begins[1:]), strict=True)) if len(keys) else {}
