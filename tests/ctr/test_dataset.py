"""The data of a row from before its time, against slow, obvious counts; and logs in several files."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from ctr_world import AS_OF
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.ctr.dataset import LOG_SCALE, PRIOR_ROWS, build_dataset, rows_before
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.log import Log, read_log
from laserbatch.ctr.settings import CtrSettings

PRIOR = 0.3


def log_of(rows):
    columns = list(zip(*rows, strict=True))
    kinds = (np.int32, np.int32, np.int64, np.float32)
    return Log(*(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))


def slow_row(log, user, item, time_us, max_history):
    """Counts, rates and history of one row, by a scan over all interactions."""
    before = [row for row in range(len(log.users)) if log.times_us[row] < time_us]
    past = []
    for of_log, number in ((log.users, user), (log.items, item)):
        labels = [log.labels[row] for row in before if of_log[row] == number]
        rate = (sum(labels) + PRIOR_ROWS * PRIOR) / (len(labels) + PRIOR_ROWS)
        past += [np.log1p(len(labels)) / LOG_SCALE, (rate - PRIOR) * LOG_SCALE]
    liked = [log.items[row] for row in before if log.users[row] == user and log.labels[row]][-max_history:]
    return [*past, np.log1p(len(liked)) / LOG_SCALE], liked


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 6), st.integers(0, 1)), min_size=1, max_size=40
)


@given(ROWS, ROWS, st.integers(1, 4))
def test_rows_see_what_was_before_their_moment_and_nothing_else(rows, questions, max_history):
    log = log_of(sorted(rows, key=lambda row: row[2]))
    pairs, world = log_of(questions), SimpleNamespace(users=None, items=None)
    for users, items, times_us in ((log.users, log.items, log.times_us), (pairs.users, pairs.items, pairs.times_us)):
        history = rows_before(world, {"user": [], "item": []}, log, users, items, times_us, max_history, PRIOR)
        for row in range(len(users)):
            past, liked = slow_row(log, users[row], items[row], times_us[row], max_history)
            assert np.allclose(history.past[row], past, atol=1e-6)
            assert history.liked[history.starts[row] : history.ends[row]].tolist() == liked


def test_a_log_in_files_of_any_order_gives_the_same_rows(world, tmp_path):
    shuffled = world.interactions.take(np.random.default_rng(0).permutation(world.interactions.num_rows))
    for part in range(3):
        pq.write_table(shuffled.slice(part * 3000, 3000), tmp_path / f"{part}.parquet", row_group_size=500)
    files = type("Tables", (), {"users": world.users, "items": world.items, "interactions": ds.dataset(tmp_path)})
    of_memory, of_files = (build_dataset(tables, AS_OF, CtrSettings()) for tables in (world, files))
    for name in ("users", "items", "times_us", "labels", "past", "liked", "starts", "ends"):
        assert np.array_equal(getattr(of_memory, name), getattr(of_files, name)), name


@pytest.mark.parametrize(
    ("interactions", "message"),
    [
        ({"user_id": ["u0"], "item_id": ["i0"], "timestamp": pa.array([0], pa.timestamp("s"))}, "no column 'rating'"),
        (
            {"user_id": ["u0"], "item_id": ["i0"], "timestamp": pa.array([None], pa.timestamp("s")), "rating": [1.0]},
            "column timestamp: found null",
        ),
        (
            {"user_id": ["u0"], "item_id": ["i0"], "timestamp": pa.array([0], pa.timestamp("s")), "rating": ["good"]},
            "does not fit the column rating, which is of type string; .* as in `rating == 'TEXT'`",
        ),
        (
            {"user_id": ["7"], "item_id": ["i0"], "timestamp": pa.array([0], pa.timestamp("s")), "rating": [1.0]},
            "none of 1 labelled interactions has a user and an item of the tables; .*first: 'u0', 'i0'",
        ),
    ],
)
def test_interactions_that_cannot_be_read_are_named(world, interactions, message):
    tables = type("Tables", (), {"users": world.users, "items": world.items, "interactions": pa.table(interactions)})
    with pytest.raises(CtrError, match=message):
        read_log(tables, "rating >= 4")


@pytest.mark.parametrize("last", ["u0", None])
def test_tables_of_entities_without_distinct_ids_are_refused(world, last):
    users = pa.table({"user_id": ["u0", "u1", last]})
    tables = type("Tables", (), {"users": users, "items": world.items, "interactions": world.interactions})
    with pytest.raises(CtrError, match=f"the users table has the id {last!r} in row 2"):
        read_log(tables, "rating >= 4")
