"""Features by time: each row of a log gets the newest older version, or none."""

import datetime
import tempfile

import numpy as np
import pyarrow as pa
import pytest

from laserbatch.pipeline.encoding.schema import days_valid, feature_schema, moments, vector_column
from laserbatch.pipeline.encoding.versions import feature_versions, read_versions
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.parquet import write_parquet

DIM = 3


def write_features(path, rows, id_type=pa.string()):
    """Write features from rows (id, run id, first number of the vector)."""
    rows = sorted(rows)
    schema = feature_schema("user", id_type, DIM)
    vectors = np.array([[value, 0, 0] for _, _, value in rows], np.float32)
    columns = {
        "user_id": [row[0] for row in rows],
        "vector": vector_column(vectors),
        "cluster_id": [int(value) % 5 for _, _, value in rows],
        "residual_id": [0] * len(rows),
        "run_id": [row[1] for row in rows],
        "fingerprint": ["f"] * len(rows),
        "valid_from": moments(days_valid(pa.array([row[1] for row in rows], pa.string()))),
    }
    write_parquet(pa.table([pa.array(columns[name]) for name in schema.names], schema=schema), path)
    return path


def day(text: str) -> int:
    return (datetime.date.fromisoformat(text) - datetime.date(1970, 1, 1)).days


def test_every_row_gets_the_newest_version_that_is_older(tmp_path):
    """Nights of random dates, each of which rewrites some texts and carries the others over, against a plain search."""
    rng = np.random.default_rng(0)
    dates = sorted(rng.choice(60, 12, replace=False))
    runs = [f"{datetime.date(2025, 1, 1) + datetime.timedelta(int(offset))}-aa" for offset in dates]
    current, files, known = {}, {}, {}
    for number, run in enumerate(runs):
        for user in rng.choice(20, 6, replace=False):
            current[f"u{user:02}"] = (run, float(number))
            known[f"u{user:02}", run] = float(number)
        files[run] = write_features(tmp_path / f"{run}.parquet", [(user, *values) for user, values in current.items()])
    collected = runs[4]  # its versions are found in later runs, if they were carried over
    del files[collected]
    users = [f"u{number:02}" for number in rng.integers(0, 22, 500)]
    days = day("2025-01-01") + rng.integers(-3, 70, 500)
    with tempfile.TemporaryFile() as scratch:
        versions = read_versions(files, "user", scratch)
        columns = versions.columns(versions.of(pa.array(users), days))
    in_files = {(user, run) for (user, run) in known if run != collected}
    for path in (runs[5],):  # carried over by the next night, unless that wrote a new text
        in_files |= {(user, collected) for (user, run) in known if run == collected and (user, path) not in known}
    for user, at, vector, run, valid_from in zip(
        users, days, columns[0].to_pylist(), *map(pa.Array.to_pylist, columns[3:]), strict=True
    ):
        older = [other for (owner, other) in in_files if owner == user and day(other[:10]) < at]
        assert run == max(older, default=None)
        assert (vector is None) == (run is None)
        if run is not None:
            assert vector[0] == known[user, run]
            assert valid_from.date() == datetime.date.fromisoformat(run[:10]) + datetime.timedelta(1)


def test_a_version_holds_until_the_next_and_of_one_day_the_later_runs(tmp_path):
    files = {
        "2025-01-01-aa": write_features(tmp_path / "1", [("a", "2025-01-01-aa", 1.0), ("b", "2025-01-01-aa", 2.0)]),
        "2025-01-05-aa": write_features(tmp_path / "2", [("a", "2025-01-05-aa", 3.0), ("b", "2025-01-01-aa", 2.0)]),
        "2025-01-05-bb": write_features(tmp_path / "3", [("a", "2025-01-05-bb", 4.0)]),
    }
    with tempfile.TemporaryFile() as scratch:
        versions = read_versions(files, "user", scratch)
        assert versions.run_ids.to_pylist() == ["2025-01-01-aa", "2025-01-05-bb", "2025-01-01-aa"]
        assert [str(end) for end in moments(versions.valid_to())] == ["2025-01-06 00:00:00+00:00", "None", "None"]
        assert versions.vectors[versions.rows][:, 0].tolist() == [1.0, 4.0, 2.0]


def test_a_version_holds_until_its_entity_leaves_the_tables_also_if_it_comes_back(tmp_path):
    a, b, again = ("a", "2025-01-01-aa", 1.0), ("b", "2025-01-01-aa", 2.0), ("b", "2025-01-07-aa", 3.0)
    held = {"2025-01-01-aa": [a, b], "2025-01-03-aa": [a, b], "2025-01-05-aa": [a], "2025-01-07-aa": [again]}
    files = {run: write_features(tmp_path / run, rows) for run, rows in held.items()}
    with tempfile.TemporaryFile() as scratch:
        ends = [str(end)[:10] for end in moments(read_versions(files, "user", scratch).valid_to())]
    assert ends == ["2025-01-08", "2025-01-06", "None"]


def test_ids_of_another_type_are_named(tmp_path):
    files = {"2025-01-01-aa": write_features(tmp_path / "1", [("a", "2025-01-01-aa", 1.0)])}
    with tempfile.TemporaryFile() as scratch, pytest.raises(WorkspaceError, match="int64, but the features"):
        read_versions(files, "user", scratch).of(pa.array([1]), np.array([20_000]))


def test_runs_without_features_of_plain_texts_name_the_option_that_makes_them():
    for of_plain, advice in ((False, r"Run `laserbatch nightly` first"), (True, r"plain texts .*compare_with_plain")):
        with pytest.raises(WorkspaceError, match=advice), feature_versions([], of_plain):
            pass
