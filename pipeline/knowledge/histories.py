"""The histories of users: their interactions with items, joined from the tables."""

import math
import re
from collections.abc import Callable, Iterator, Mapping

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
    """The words for an event: from the configuration, the usual ones, or the event as it is written; "" if blank."""
    plain = plain_text(event.replace("_", " "), 80)
    return words.get(event) or EVENT_WORDS.get(re.sub(r"[\W_]", "", event.lower()), plain)


def labels_of(interactions: pa.Table, words: Mapping[str, str]) -> Labels:
    """The labels of interactions: events if they differ, otherwise ratings, which are words if only 0 and 1 occur."""
    events = pc.unique(interactions["event"]).drop_null().to_pylist() if "event" in interactions.column_names else []
    phrases = list(dict.fromkeys(filter(None, (event_text(event, words) for event in sorted(events)))))
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
    """Interactions by user row, without those of unknown users and items; the events of a user are in order of time.

    `starts`, int64[num_users + 1]: place of each user's first event. `items`, int32[n]: the row of each event's item
    in the table of items, by place. `columns`: further arrays by place; each is given as a function that returns its
    values for a slice of the log.
    """

    def __init__(self, tables: Tables, columns: Mapping[str, Callable[[slice], np.ndarray]] | None = None) -> None:
        (codes, rows), (item_codes, item_rows) = tables.coded("user"), tables.coded("item")
        columns = columns or {}

        def parts() -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
            for start in range(0, max(len(codes), 1), ROWS_AT_ONCE):
                at = slice(start, min(start + ROWS_AT_ONCE, len(codes)))
                users, items = rows[codes[at]], item_rows[item_codes[at]]
                is_known = (users >= 0) & (items >= 0)
                part = [users, items, *(values(at) for values in columns.values())]
                users, *others = part if is_known.all() else (values[is_known] for values in part)
                yield users, others

        num_users, folder = tables.users.num_rows, tables.scratch.folder
        self.starts, (self.items, *others) = by_code(parts(), num_users, len(codes), folder)
        self.columns = dict(zip(columns, others, strict=True))

    def newest(self, user_rows: np.ndarray, max_events: int) -> tuple[np.ndarray, np.ndarray]:
        """Places of the newest events of some users, int64[m], user by user, and int64[n + 1] starts of each user's."""
        stops = self.starts[user_rows + 1]
        first = np.maximum(self.starts[user_rows], stops - max_events)
        starts = np.concatenate([[0], np.cumsum(stops - first)])
        return np.repeat(first - starts[:-1], stops - first) + np.arange(starts[-1]), starts

    def chosen(self, user_rows: np.ndarray, columns: HistoryLines) -> tuple[np.ndarray, np.ndarray]:
        """Places of the events that a template shows for some users, and starts, as in `newest`.

        Events left out for their age or rank stay left out when new ones come, so that prompts change with these alone.
        If the template `needs_times`, `columns` must have `time`: int64, microseconds.
        """
        if not columns.needs_times and not columns.deduplicate:
            return self.newest(user_rows, columns.max_events)
        places, starts = self.newest(user_rows, len(self.items))
        users = np.repeat(np.arange(len(user_rows)), np.diff(starts))
        is_shown = np.ones(len(places), bool)
        times = self.columns["time"][places] if columns.needs_times else places
        if columns.max_days is not None:
            newest = times[starts[1:][users] - 1]
            is_shown &= times > newest - columns.max_days * DAY_US
        if columns.deduplicate:
            keys = users.astype(np.int64) << 32 | self.items[places]
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
    return newer - np.append(newer + is_shown, 0)[np.searchsorted(users, users, side="right")]
