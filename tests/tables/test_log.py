"""The log, read and sorted in blocks of rows: equal to the obvious reader, and in bounded memory."""

import math
import subprocess
import sys
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sound_world import DAY_1, DAY_1_S, write_world

from laserbatch.pipeline.tables import log
from laserbatch.pipeline.tables.read import find_exact_copies, read_tables

BLOCK_ROWS = 8
MAX_BYTES_A_ROW = 8  # of the process's private memory; a row in its file has 26
USERS, ITEMS = ["ü1", "u2", "a user of a long name", "u3"], [3, -7, 2**62]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*USERS, "left", None]),
        st.sampled_from([*ITEMS, 4, None]),
        st.sampled_from([None, *range(DAY_1_S, DAY_1_S + 4), DAY_1_S + 86_400]),
        st.sampled_from([None, "view", "buy"]),
        st.sampled_from([None, 0, 1, 2]),
    ),
    max_size=30,
)
SCHEMA = pa.schema(
    [("user_id", pa.string()), ("item_id", pa.int64()), ("timestamp", pa.int64()), ("event", pa.string()),
     ("rating", pa.int64())]
)  # fmt: skip
RATINGS = {  # rating types of a table's files, in turn; None: no ratings
    "numbers": [pa.float64(), pa.int16()], "few": [pa.int8(), None], "none": [None],
    "decimals": [pa.decimal128(38, 2)], "truths": [pa.bool_()],
}  # fmt: skip


def written(path, events: list[tuple], rating: pa.DataType | None) -> pa.Table:
    """Write a file of the log; ratings of 2 are NaN in float columns."""
    table = pa.Table.from_arrays([pa.array(values, field.type) for values, field in zip(
        zip(*events, strict=True) if events else [[]] * 5, SCHEMA, strict=True
    )], schema=SCHEMA)  # fmt: skip
    ratings = table["rating"].to_pylist()
    table = table.drop_columns("rating")
    if rating == pa.float64():
        table = table.append_column(
            "rating", pa.array([math.nan if value == 2 else value for value in ratings], rating)
        )
    elif rating is not None:
        table = table.append_column("rating", pa.array(ratings, pa.int64()).cast(rating))
    pq.write_table(table, path)
    return table


def read_plainly(files: list[pa.Table], is_cut: bool, keep_duplicates: bool) -> tuple[list[dict], list[bool]]:
    """The rows of `read_tables` in its order, and for each row of the files whether it copies an earlier one."""
    events = [event for file in files for event in file.to_pylist()]
    for event in events:
        rating = event.get("rating")
        event["rating"] = None if rating != rating else rating
    is_copy = [event in events[:row] for row, event in enumerate(events)]
    left = [
        event for event, is_left_out in zip(events, is_copy, strict=True)
        if (keep_duplicates or not is_left_out) and not (is_cut and not _is_known(event))
    ]  # fmt: skip
    return sorted(
        left, key=lambda event: [_sortable(event[name]) for name in ("timestamp", "user_id", "item_id")]
    ), is_copy


def _is_known(event: dict) -> bool:
    return _is_before(event["timestamp"]) and event["user_id"] in USERS and event["item_id"] in ITEMS


def _is_before(time: int | None) -> bool:
    return time is not None and time < DAY_1_S + 86_400


def _sortable(value: str | int | None) -> tuple:
    return (True,) if value is None else (False, value.encode() if isinstance(value, str) else value)


@pytest.mark.parametrize("ratings", RATINGS)
@given(
    kinds=st.sampled_from([(True, False), (True, True), (False, False)]),
    of_files=st.lists(EVENTS, min_size=1, max_size=3),
    is_sorted=st.booleans(),
    is_mapped=st.booleans(),
)
def test_the_log_is_read_as_the_obvious_reader_reads_it(
    tmp_path_factory, ratings, kinds, of_files, is_sorted, is_mapped
):
    is_cut, keep_duplicates = kinds
    users, items = pa.table({"user_id": USERS}), pa.table({"item_id": ITEMS, "title": ["t"] * 3})
    path = write_world(tmp_path_factory.mktemp("world"), users=users, items=items, interactions=None)
    (path / "interactions").mkdir()
    files = []
    for number, events in enumerate(of_files):
        events = sorted(events, key=lambda event: event[2] or 0) if is_sorted else events
        rating = RATINGS[ratings][number % len(RATINGS[ratings])]
        files.append(written(path / "interactions" / f"{number}.parquet", events, rating))
    with patch.object(log, "ROWS_AT_ONCE", BLOCK_ROWS):
        tables = read_tables(path, DAY_1.date() if is_cut else None, path if is_mapped else None, keep_duplicates)
        copies = find_exact_copies(path)
    expected, is_copy = read_plainly(files, is_cut, keep_duplicates)
    read = tables.interactions
    for event in (rows := read.to_pylist()):
        event["timestamp"] = event["timestamp"] and int(event["timestamp"].timestamp())
    assert rows == [{name: event.get(name) for name in read.column_names} for event in expected]
    assert copies.tolist() == is_copy
    times = [time for file in files for time in file["timestamp"].to_pylist()]
    num_copies = sum(copy for copy, time in zip(is_copy, times, strict=True) if _is_before(time) or not is_cut)
    assert tables.num_copies == (0 if keep_duplicates else num_copies)
    for name in ("user_id", "item_id"):
        ids = read[name].chunk(0).dictionary.to_pylist()
        assert ids == sorted(set(ids), key=_sortable)
        all_ids = {event for file in files for event in file[name].to_pylist()}
        assert tables.logged_ids[name].to_pylist() == sorted(all_ids, key=_sortable)
    read.validate(full=True)


READ = """
import datetime, sys, threading
from pathlib import Path
from laserbatch.pipeline.tables.check import check_tables
from laserbatch.pipeline.tables.read import read_tables

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

def read(path):
    tables = read_tables(path, datetime.date(2025, 3, 1), Path(path))
    assert not any(not finding.is_warning for finding in check_tables(path, logged_ids=tables.logged_ids))
    return tables.interactions.num_rows

read(sys.argv[1])
before, most, has_ended = own_bytes(), [0], threading.Event()
def watch():
    while not has_ended.wait(0.005):
        most[0] = max(most[0], own_bytes())
watcher = threading.Thread(target=watch)
watcher.start()
num_rows = [read(path) for path in sys.argv[2:]]
has_ended.set()
watcher.join()
print((most[0] - before) / min(num_rows))
"""


def test_a_log_hardly_grows_the_process_that_reads_it(tmp_path):
    """Its memory is in mapped files, which the kernel may reclaim."""
    rng = np.random.default_rng(0)
    logs = (("small", 1_000_000, False), ("sorted", 4_000_000, True), ("large", 4_000_000, False))
    for name, num_rows, is_sorted in logs:
        times = DAY_1_S - rng.integers(10**7, size=num_rows)
        users, items = rng.integers(1000, size=(2, num_rows))
        log = {"user_id": users, "item_id": items, "timestamp": np.sort(times) if is_sorted else times}
        log["rating"] = rng.integers(1, 6, num_rows).astype(float)
        write_world(
            tmp_path / name, users=pa.table({"user_id": np.arange(1000)}), interactions=pa.table(log),
            items=pa.table({"item_id": np.arange(1000), "title": ["t"] * 1000}),
        )  # fmt: skip
    command = [sys.executable, "-c", READ, *(tmp_path / name for name, *_ in logs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < MAX_BYTES_A_ROW, done.stdout
