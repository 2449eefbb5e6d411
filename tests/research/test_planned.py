"""The choice of earlier lists to carry over, and their drafts, against plain loops."""

import datetime
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from laserbatch.research.recommending.codes import ItemCodes
from laserbatch.research.recommending.planned import (
    carried_lists,
    due_lists,
    list_fingerprints,
    listed_drafts,
    stale_lists,
    without_had,
)

CODES = np.array([[n // 9, n // 3 % 3, n % 3] for n in range(20)], np.int32)
ITEMS = ItemCodes(pa.array([f"i{n}" for n in range(20)]), CODES, (3, 3, 3))


@pytest.fixture
def before():
    """Lists of thirty users, in chunks like those of files. i20 and i21 are no longer in the catalogue."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "entity_id": f"u{user}",
            "items": [f"i{n}" for n in rng.permutation(22 if user % 5 == 0 else 20)[:4]],
            "last_item": f"i{rng.integers(22)}" if user % 7 else None,
            "fingerprint": f"f{user % 4}",
            "is_stale": user % 6 == 0,
        }
        for user in range(30)
    ]
    return rows, pa.concat_tables([pa.Table.from_pylist(rows[:11]), pa.Table.from_pylist(rows[11:])])


def test_a_list_stays_where_it_follows_from_the_same_and_has_only_what_is_there(before):
    rows, table = before
    users = [f"u{n}" for n in range(25, -5, -1)]
    fingerprints = [f"f{n % 3}" for n in range(30)]
    carried = carried_lists(table, pa.array(users), pa.array(fingerprints), ITEMS)
    known = {row["entity_id"]: (place, row) for place, row in enumerate(rows)}
    for user, fingerprint, place in zip(users, fingerprints, carried.tolist(), strict=True):
        old, row = known.get(user, (-1, None))
        stays = row is not None and row["fingerprint"] == fingerprint and not row["is_stale"]
        stays = stays and not {"i20", "i21"} & set(row["items"])
        assert place == (old if stays else -1), user
    stale = stale_lists(table, pa.array(["u3", "u5", "nobody"]), ITEMS).to_pylist()
    sound = [row for row in (rows[3], rows[5]) if not {"i20", "i21"} & set(row["items"])]
    assert stale == [row | {"is_stale": True} for row in sound]


def test_a_stale_list_has_nothing_that_its_user_has_had_since():
    columns = {"entity_id": ["a", "b", "c"], "items": [["i1", "i2", "i3"], ["i4"], ["i5"]]}
    table = pa.table(columns | {"scores": [[-1.0, -2.0, -3.0], [-1.0], [-1.0]], "route": ["history"] * 3})
    histories = [np.array([5]), np.array([2, 7]), np.array([4, 4])]  # of users c, a and b
    remaining = without_had(pa.concat_tables([table, table.slice(0, 0)]), pa.array(["c", "a", "b"]), histories, ITEMS)
    assert remaining.schema == table.schema and remaining["items"].to_pylist() == [["i1", "i3"], [], []]
    assert remaining["scores"].to_pylist() == [[-1.0, -3.0], [], []]


def test_drafts_are_the_own_list_and_what_most_have_who_ended_alike(before):
    rows, table = before
    users, last = ["u4", "u5", "new"], np.array([3, 11, 3])
    drafts = listed_drafts(table, pa.array(users), last, ITEMS, 9).to_pylist()
    known = {row["entity_id"]: row["items"] for row in rows}
    for user, item, drafted in zip(users, last.tolist(), drafts, strict=True):
        alike = Counter(item_id for row in rows if row["last_item"] == f"i{item}" for item_id in row["items"])
        names = [*known.get(user, []), *sorted(alike, key=lambda name: (-alike[name], int(name[1:])))]
        numbers = [int(name[1:]) for name in dict.fromkeys(names) if int(name[1:]) < 20]
        assert drafted == numbers[:9]
    assert listed_drafts(table, pa.array(users), last, ITEMS, 0).to_pylist() == [[], [], []]


def test_a_fingerprint_is_of_the_history_of_the_model_and_of_what_most_have():
    histories = [np.array([1, 2]), np.array([2, 1]), np.array([], np.int64)]
    first = list_fingerprints(ITEMS, histories, "model 10", np.array([5])).to_pylist()
    assert len(set(first)) == 3
    assert list_fingerprints(ITEMS, histories, "model 10", np.array([6])).to_pylist()[:2] == first[:2]
    assert list_fingerprints(ITEMS, histories, "model 10", np.array([6])).to_pylist()[2] != first[2]
    assert not set(list_fingerprints(ITEMS, histories, "model 20", np.array([5])).to_pylist()) & set(first)


def test_within_a_week_each_list_of_before_an_item_came_is_due_once():
    prints = [f"{n:x}" * 32 for n in range(16)] * 2
    table = pa.table({"fingerprint": prints, "run_id": ["old"] * 16 + ["new"] * 16})
    days = [datetime.date(2025, 3, 1) + datetime.timedelta(days=n) for n in range(7)]
    due = np.array([due_lists(table, day, lambda run_id: run_id == "old") for day in days])
    assert due[:, :16].sum(0).tolist() == [1] * 16 and due[:, :16].any(1).all() and not due[:, 16:].any()
