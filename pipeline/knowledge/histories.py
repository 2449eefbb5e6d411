"""The histories of users: their interactions with items, joined from the tables."""

import math
import re
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.knowledge.templates import HistoryLines, Labels, in_words
from laserbatch.pipeline.knowledge.values import plain_text
from laserbatch.pipeline.tables.read import Tables
from laserbatch.retrieval_pools.mapped import by_code

DAY_US = 86_400_000_000


# Words for common events in a sentence on what somebody did; other events are shown as they are written.
EVENT_WORDS = {
    "click": "clicked", "view": "viewed", "impression": "saw", "play": "played", "listen": "listened to",
    "watch": "watched", "read": "read", "like": "liked", "dislike": "disliked", "save": "saved", "share": "shared",
    "skip": "skipped", "search": "searched for", "apply": "applied for", "application": "applied for",
    "cart": "put into the cart", "addtocart": "put into the cart", "wishlist": "put on the wish list",
    "buy": "bought", "purchase": "bought", "order": "ordered", "transaction": "bought", "rate": "rated",
    "remove": "removed", "return": "returned", "bookmark": "bookmarked", "favorite": "marked as a favourite",
}  # fmt: skip
ROWS_AT_ONCE = 1024 * 1024  # interactions that are processed at once
MAX_KINDS_NAMED = 4  # a sentence names at most this many kinds of events


def event_text(event: str, words: Mapping[str, str]) -> str:
    """The words for an event: from the configuration, the usual ones, or the event as it is written."""
    plain = plain_text(event.replace("_", " "), 80)
    return words.get(event) or EVENT_WORDS.get(re.sub(r"[\W_]", "", event.lower()), plain)


def labels_of(interactions: pa.Table, words: Mapping[str, str]) -> Labels:
    """The labels of interactions: events if they differ, otherwise ratings, which are words if only 0 and 1 occur."""
    events = pc.unique(interactions["event"]).drop_null().to_pylist() if "event" in interactions.column_names else []
    phrases = list(dict.fromkeys(event_text(event, words) for event in sorted(events)))
    if len(phrases) > 1:
        return Labels(in_words(phrases, "or") if len(phrases) <= MAX_KINDS_NAMED else "picked", "words")
    picked = phrases[0] if phrases else "picked"
    if "rating" not in interactions.column_names:
        return Labels(picked, "none")
    least, most, is_click = math.inf, -math.inf, True
    for batch in interactions.select(["rating"]).to_batches(max_chunksize=ROWS_AT_ONCE):
        ratings = batch["rating"].cast(pa.float64(), safe=False).drop_null()
        if len(ratings):
            extremes = pc.min_max(ratings).as_py()
            least, most = min(least, extremes["min"]), max(most, extremes["max"])
            is_click = is_click and pc.all(pc.is_in(ratings, pa.array([0.0, 1.0]))).as_py()
    if least > most or (least >= 1 and 1 < most <= 5):
        return Labels()
    if most > 1 or not is_click:
        return Labels("rated")
    return Labels(picked, "none") if least == most else Labels(f"{picked} or passed over", "words", picked)


class Histories:
    """Interactions by user row, without those of unknown users and items.

    `starts`, int64[num_users + 1]: the place of each user's first event; the events of a user are in order of time.
    """

    def __init__(self, tables: Tables) -> None:
        self._interactions = tables.interactions
        codes, rows = tables.coded("user")
        self._item_codes, self._item_rows = tables.coded("item")
        self.starts, self._rows = by_code(lambda: self._known(codes, rows), tables.users.num_rows, tables.scratch)

    def _known(self, codes: np.ndarray, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Interactions between known users and items, a part at a time: the rows of their users, and their own rows."""
        for start in range(0, len(codes), ROWS_AT_ONCE):
            users = rows[codes[start : start + ROWS_AT_ONCE]]
            is_known = (users >= 0) & (self._item_rows[self._item_codes[start : start + ROWS_AT_ONCE]] >= 0)
            yield users[is_known], start + np.flatnonzero(is_known)

    def items(self, places: np.ndarray) -> np.ndarray:
        """The rows of the item table, int32[n], for the events at some places."""
        return self._item_rows[self._item_codes[self._rows[places]]]

    def values(self, column: str, places: np.ndarray) -> pa.Array:
        """A column of the interactions at some places; nulls if there is no such column."""
        if column not in self._interactions.column_names:
            return pa.nulls(len(places))
        values = self._interactions[column].take(pa.array(self._rows[places])).combine_chunks()
        return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values

    def newest(self, user_rows: np.ndarray, max_events: int) -> tuple[np.ndarray, np.ndarray]:
        """Places of the newest events of some users, int64[m], user by user, and int64[n + 1] starts of each user's."""
        stops = self.starts[user_rows + 1]
        first = np.maximum(self.starts[user_rows], stops - max_events)
        starts = np.concatenate([[0], np.cumsum(stops - first)])
        return np.repeat(first - starts[:-1], stops - first) + np.arange(starts[-1]), starts

    def chosen(self, user_rows: np.ndarray, columns: HistoryLines) -> tuple[np.ndarray, np.ndarray]:
        """Places of the events that a template shows for some users, and starts, as in `newest`.

        Events left out for their age or rank stay left out when new ones come, so that prompts change with these alone.
        """
        if columns.max_days is None and columns.half_life is None and not columns.deduplicate:
            return self.newest(user_rows, columns.max_events)
        places, starts = self.newest(user_rows, len(self._rows))
        users = np.repeat(np.arange(len(user_rows)), np.diff(starts))
        is_shown = np.ones(len(places), bool)
        times = self._interactions["timestamp"].take(pa.array(self._rows[places])).cast(pa.int64()).to_numpy()
        if columns.max_days is not None:
            newest = times[starts[1:][users] - 1]
            is_shown &= times > newest - columns.max_days * DAY_US
        if columns.deduplicate:
            keys = users.astype(np.int64) << 32 | self.items(places)
            _, newest_of = np.unique(keys[::-1], return_index=True)
            is_newest = np.zeros(len(places), bool)
            is_newest[len(places) - 1 - newest_of] = True
            is_shown &= is_newest
        if columns.half_life is not None:
            age = _ranks(users, is_shown)
            drawn = (times.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) / 2.0**24
            is_shown &= drawn < 0.5 ** (age / columns.half_life)
        is_shown &= _ranks(users, is_shown) < columns.max_events
        counts = np.bincount(users[is_shown], minlength=len(user_rows))
        return places[is_shown], np.concatenate([[0], np.cumsum(counts)])


def _ranks(users: np.ndarray, is_shown: np.ndarray) -> np.ndarray:
    """The number of newer events of the same user that are shown, for each event: int64[n]; users ascend."""
    newer = np.cumsum(is_shown[::-1])[::-1] - is_shown
    stops = np.searchsorted(users, users, side="right")
    return newer - np.append(newer + is_shown, 0)[stops]
