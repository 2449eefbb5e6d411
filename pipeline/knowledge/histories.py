"""What users did with which items, joined from the tables."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.tables.read import Tables


class Histories:
    """Interactions by user row, those of unknown users and items left out.

    `starts` int64[num_users + 1] says where a user's events begin in `items` int32[n], rows of the item table, and
    `ratings` float64[n], NaN where there is none; oldest first.
    """

    def __init__(self, tables: Tables) -> None:
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

    def newest(self, user_rows: np.ndarray, max_events: int) -> tuple[np.ndarray, np.ndarray]:
        """Places of the newest events of some users: int64[m], one user's after another's, and int64[n + 1] starts."""
        stops = self.starts[user_rows + 1]
        first = np.maximum(self.starts[user_rows], stops - max_events)
        starts = np.concatenate([[0], np.cumsum(stops - first)])
        return np.repeat(first - starts[:-1], stops - first) + np.arange(starts[-1]), starts
