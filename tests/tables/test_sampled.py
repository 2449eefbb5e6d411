"""Samples of tables: later data do not change who is in them, and only rare items are lost from a user's history."""

import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.tables.sampled import day_of_share, write_sample
from laserbatch.pipeline.tables.streamed import open_tables

DATE = datetime.date(2025, 3, 1)
DAY_S = 86_400
END_S = 1_740_873_600  # the end of the date


def tables(folder, later=()):
    """Ten users and six items; user n met items 0 to n % 6 before the date. Ids are integers."""
    folder.mkdir()
    users = {"user_id": list(range(10)), "created_at": [END_S - 9 * DAY_S] * 9 + [END_S + 1]}
    pq.write_table(pa.table(users), folder / "users.parquet")
    pq.write_table(pa.table({"item_id": list(range(6)), "title": list("abcdef")}), folder / "items.parquet")
    rows = [(user, item, END_S - 1 - user * DAY_S) for user in range(9) for item in range(user % 6 + 1)]
    rows += later
    columns = dict(zip(("user_id", "item_id", "timestamp"), map(list, zip(*rows, strict=True)), strict=True))
    columns["clicked"] = [True] * len(rows)
    pq.write_table(pa.table(columns), folder / "interactions.parquet")
    return open_tables(folder)


def sampled(opened, folder, num_users=4, num_items=3):
    folder.mkdir()
    figures = write_sample(opened, folder, DATE, num_users, num_items)
    return figures, {name: pq.read_table(folder / f"{name}.parquet") for name in ("users", "items", "interactions")}


def test_who_is_in_a_sample_does_not_depend_on_what_came_after_the_date(tmp_path):
    later = [(user, 5, END_S + 60) for user in (0, 2, 9)] + [(user, 0, END_S) for user in range(9)]
    figures, before = sampled(tables(tmp_path / "a"), tmp_path / "of-a")
    with_later, after = sampled(tables(tmp_path / "b", later), tmp_path / "of-b")
    assert before["users"].equals(after["users"]) and before["items"].equals(after["items"])
    assert after["users"].num_rows == 4 and 9 not in after["users"]["user_id"].to_pylist()  # it is newer than that
    assert after["items"]["item_id"].to_pylist() == [0, 1, 2]  # the most frequent items; among equals the lowest ids
    assert figures.num_later == 0 and with_later.num_later == 4 and with_later.share_kept == figures.share_kept
    assert after["interactions"].num_rows == with_later.num_interactions == figures.num_interactions + 4
    assert after["interactions"].column_names == ["user_id", "item_id", "timestamp", "clicked"]


def test_copies_of_an_interaction_count_once_wherever_a_sample_is_counted(tmp_path):
    tables(tmp_path / "a")
    path = tmp_path / "a" / "interactions.parquet"
    rows = pq.read_table(path)
    rows = pa.concat_tables([rows, *[rows.slice(0, 1)] * 30])  # copies of the newest interaction of user 0 and item 0
    pq.write_table(rows.append_column("row", pa.array(range(rows.num_rows))), path)
    figures, sample = sampled(open_tables(tmp_path / "a"), tmp_path / "out", 99, 2)
    assert sample["items"]["item_id"].to_pylist() == [0, 1]
    assert (figures.num_later, figures.share_kept) == (0, 16 / 27)
    assert day_of_share(open_tables(tmp_path / "a"), 0.8) == DATE - datetime.timedelta(days=3)


def test_a_sample_larger_than_the_tables_is_all_that_is_known_on_the_date(tmp_path):
    figures, sample = sampled(tables(tmp_path / "a"), tmp_path / "out", 99, 99)
    assert (figures.num_users, figures.num_items, figures.share_kept) == (9, 6, 1.0)
    assert sample["interactions"].num_rows == sum(user % 6 + 1 for user in range(9))


def test_tables_of_which_nobody_is_known_on_the_date_are_refused(tmp_path):
    opened = tables(tmp_path / "a")
    with pytest.raises(
        TableError, match=r"no user of .* is known at the end of 2025-02-0\d: every created_at is later"
    ):
        write_sample(opened, tmp_path / "out", DATE - datetime.timedelta(days=20), 4, 3)


def test_the_default_day_leaves_a_share_of_the_interactions_to_judge_by(tmp_path):
    opened = tables(tmp_path / "a")  # the last day has 1 of 27 interactions, the day before 2, then 3, ...
    assert day_of_share(opened, 0.8) == DATE - datetime.timedelta(days=3)
    with pytest.raises(TableError, match="more than 1% of them are on the first day"):
        day_of_share(opened, 0.01)
