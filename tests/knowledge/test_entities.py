import datetime
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from entities import iter_entities

from laserbatch.pipeline.knowledge import histories
from laserbatch.pipeline.tables.read import Tables
from laserbatch.retrieval_pools import mapped
from laserbatch.retrieval_pools.mapped import MappedFiles

DAY = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)


def make_tables(kind: pa.DataType, with_rating: bool = True) -> Tables:
    def key(numbers: list[int]) -> pa.Array:
        return pa.array([str(n) if pa.types.is_string(kind) else n for n in numbers], kind)

    interactions = {"user_id": key([2, 1, 2, 9, 1]), "item_id": key([10, 11, 11, 10, 99])}
    interactions["timestamp"] = pa.array(
        [DAY + datetime.timedelta(hours=h) for h in range(5)], pa.timestamp("us", "UTC")
    )
    if with_rating:
        interactions["rating"] = pa.array([5, 4, None, 1, 2], pa.int32())
    return Tables(
        users=pa.table({"user_id": key([1, 2, 3]), "age": [30.0, None, float("nan")], "created_at": [DAY] * 3}),
        items=pa.table({"item_id": key([10, 11]), "title": ["A", "B"], "category": [["x", "y"], None]}),
        interactions=pa.table(interactions),
    )


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_histories_are_oldest_first_and_ids_keep_their_type(kind):
    first, second, third = iter_entities(make_tables(kind), "user")
    assert [event.title for event in second.history] == ["A", "B"]
    assert [event.rating for event in second.history] == [5.0, None]
    assert [event.title for event in first.history] == ["B"]  # there is no item 99
    assert third.history == ()
    assert (first.entity_id, second.history[0].item_id) == (("1", "10") if pa.types.is_string(kind) else (1, 10))


def test_histories_are_the_same_whatever_is_put_in_order_at_once(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    log = pa.table({"user_id": rng.integers(12, size=200), "item_id": rng.integers(9, size=200)})
    users, items = (pa.table({f"{side}_id": rng.permutation(n)}) for side, n in (("user", 11), ("item", 8)))
    tables = Tables(users, items, log, scratch=MappedFiles(tmp_path))
    expected = [[] for _ in range(len(users))]
    rows = {user_id: row for row, user_id in enumerate(users["user_id"].to_pylist())}
    for place, event in enumerate(log.to_pylist()):
        if event["user_id"] in rows and event["item_id"] in items["item_id"].to_pylist():
            expected[rows[event["user_id"]]].append(place)
    for rows_at_once in (1, 7, 1000):
        monkeypatch.setattr(histories, "ROWS_AT_ONCE", rows_at_once)
        monkeypatch.setattr(mapped, "ROWS_AT_ONCE", 3 * rows_at_once)
        made = histories.Histories(tables, {"row": lambda at: np.arange(at.start, at.stop)})
        places, starts = made.newest(np.arange(11), 1000)
        events = made.columns["row"][places].tolist()
        assert [events[start:stop] for start, stop in pairwise(starts.tolist())] == expected


def test_missing_values_and_created_at_are_dropped():
    first, second, third = iter_entities(make_tables(pa.int64()), "user")
    assert (first.attributes, second.attributes, third.attributes) == ({"age": 30.0}, {}, {})
    assert first.history[0].attributes == {}
    assert second.history[0].attributes == {"category": ["x", "y"]}


def test_items_carry_their_title_among_the_attributes():
    items = list(iter_entities(make_tables(pa.int64()), "item"))
    assert items[0].attributes == {"title": "A", "category": ["x", "y"]}
    assert all(item.history == () for item in items)


def test_only_the_asked_for():
    assert [user.entity_id for user in iter_entities(make_tables(pa.int64()), "user", [3, 1, 77])] == [1, 3]


def test_more_than_2_gib_of_attributes_are_never_gathered():
    tables = make_tables(pa.int64())
    text = pa.array(["x" * 2**26])  # one memory for all rows
    users = pa.table(
        {"user_id": pa.chunked_array([[number] for number in range(33)]), "bio": pa.chunked_array([text] * 33)}
    )
    (entity,) = iter_entities(Tables(users, tables.items, tables.interactions), "user", [2])
    assert len(entity.attributes["bio"]) == 2**26 and len(entity.history) == 2


def test_tables_without_ratings():
    assert next(iter_entities(make_tables(pa.int64(), with_rating=False), "user")).history[0].rating is None
