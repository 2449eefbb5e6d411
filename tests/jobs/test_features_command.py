"""`laserbatch features`: joins to a log by time, and exports, from runs with planted features."""

import datetime
import json
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manifests import manifest_of
from night_world import run_here

from laserbatch.jobs.commands.features import _runs
from laserbatch.pipeline.encoding.schema import feature_schema
from laserbatch.pipeline.storage.figures import FeatureFigures, FeatureFile
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.storage.workspace import Workspace


def planted(
    workspace: Workspace,
    day: int,
    of_users: dict[str, int],
    encoder: str = "e",
    codebook: str = "c",
    previous: str | None = None,
) -> str:
    """Write a finished run of a day in March. `of_users`: user -> day of the run that wrote the text; item "i" is new.

    It builds on `previous`, or on the published run.
    """
    manifest = manifest_of(workspace.root / "runs", datetime.date(2025, 3, day))
    run = workspace.run(manifest.run_id)
    manifest.path, manifest.status = run.manifest_path, "success"
    manifest.origin.previous_run_id = previous or workspace.publication.run_id()
    for side, written in (("user", of_users), ("item", {"i": day})):
        schema = feature_schema(side, pa.string(), 2)
        rows = [
            [entity, [float(at), 0.5], at, at, f"2025-03-{at:02}{run.run_id[10:]}", str(at), at]
            for entity, at in written.items()
        ]
        table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
        files = [write_parquet(table[:1], run.features_folder(side) / "00000.parquet"),
                 write_parquet(table[1:], run.features_folder(side) / "00001.parquet")]  # fmt: skip
        names = [file.path.relative_to(run.root).as_posix() for file in files]
        parts = tuple(FeatureFile(name, file.num_rows, file.sha256) for name, file in zip(names, files, strict=True))
        manifest.features[side] = FeatureFigures(parts, 2, names[0], 1, 0, 0, encoder, codebook)
    manifest.save()
    run.finish()
    workspace.publication.publish(run.run_id)
    return run.run_id


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    workspace = Workspace.open(tmp_path / "workspace")
    planted(workspace, 1, {"a": 1, "b": 1}, encoder="another")
    planted(workspace, 3, {"a": 3, "b": 3})
    planted(workspace, 5, {"a": 5, "b": 3, "c": 5})
    return workspace


def run_features(workspace, capfd, *arguments, code=0) -> dict:
    done = run_here(capfd, "features", *map(str, arguments), "--workspace", str(workspace.root), "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_codes_of_a_run_on_another_branch_do_not_compare(workspace, tmp_path, capfd):
    before = workspace.publication.run_id()
    planted(workspace, 6, {"d": 6})
    planted(workspace, 7, {"e": 7}, previous=before)  # the same codebook, but with other added codes
    log = pa.table({"user_id": ["a", "d", "e"], "item_id": ["i"] * 3, "timestamp": [datetime.datetime(2025, 3, 9)] * 3})
    pq.write_table(log, tmp_path / "log.parquet")
    run_features(workspace, capfd, "asof", tmp_path / "log.parquet", tmp_path / "out.parquet")
    joined = pq.read_table(tmp_path / "out.parquet")
    assert joined["user_cluster_id"].to_pylist() == [5, None, 7]
    assert joined["user_vector"].null_count == 0


def test_a_row_is_joined_with_what_was_known_before_its_day(workspace, tmp_path, capfd):
    days = [3, 4, 5, 6, 6, 9]
    log = pa.table(
        {
            "user_id": pa.array(["a", "a", "a", "a", "nobody", "b"], pa.large_string()),
            "odd \u00fc": list("xyzuvw"),
            "timestamp": [datetime.datetime(2025, 3, day, 23, 59) for day in days],
            "item_id": ["i"] * 6,
        }
    )
    pq.write_table(log, tmp_path / "log.parquet")
    printed = run_features(workspace, capfd, "asof", tmp_path / "log.parquet", tmp_path / "out.parquet")
    assert printed["rows without features"] == {"users": 2, "items": 1}
    joined = pq.read_table(tmp_path / "out.parquet")
    assert joined.column_names[:4] == log.column_names
    assert joined["user_cluster_id"].to_pylist() == [None, 3, 3, 5, None, 3]
    assert joined["item_cluster_id"].to_pylist() == [None, 3, 3, 5, 5, 5]
    assert joined["item_residual_id"].to_pylist() == [None, 3, 3, 5, 5, 5]
    assert joined["user_vector"].to_pylist()[3] == [5.0, 0.5]
    assert joined.schema.field("user_vector").type == pa.list_(pa.float32(), 2)
    assert joined["user_valid_from"].to_pylist()[3] == datetime.datetime(2025, 3, 6, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"user_id": ["a"], "item_id": ["i"]}, "timestamp"),
        ({"user_id": ["a"], "item_id": ["i"], "timestamp": ["yesterday"]}, "timestamp"),
        ({"user_id": [1], "item_id": ["i"], "timestamp": [1]}, "log, column user_id: found ids of type int64, "),
        ({"user_id": ["a"], "item_id": ["i"], "timestamp": [1], "user_vector": [0]}, "user_vector"),
        ({"user_id": ["a"], "item_id": ["i"], "timestamp": [1], "clicked": [0]}, "b.parquet has the columns"),
        (
            {"user_id": ["A", None], "item_id": ["i"] * 2, "timestamp": [1741600000] * 2},
            "log, column user_id: none of 2 rows has an id that is in the features; found ids such as 'A', expected ids"
            " such as 'a', 'b', 'c'. Write",
        ),
        (
            {"user_id": ["a"] * 2, "item_id": pa.array([1, 2**63], pa.uint64()), "timestamp": [1] * 2},
            "log, row 1): the id is too large: 9223372036854775808; expected at most 9223372036854775807",
        ),
    ],
)
def test_a_log_that_cannot_be_joined_is_told_and_nothing_written(workspace, tmp_path, capfd, columns, named):
    log = tmp_path / "log"
    log.mkdir()
    pq.write_table(pa.table(columns), log / "a.parquet")
    if "clicked" in columns:
        pq.write_table(pa.table(columns).drop_columns("clicked"), log / "b.parquet")
    printed = run_features(workspace, capfd, "asof", log, tmp_path / "out.parquet", code=3)
    assert named in printed["error"]
    assert not (tmp_path / "out.parquet").exists()


def test_a_run_whose_folder_of_features_is_gone_is_named(workspace, tmp_path, capfd):
    folder = workspace.runs()[-1].features_folder("item")
    shutil.rmtree(folder)
    printed = run_features(workspace, capfd, "history", tmp_path / "history", code=3)
    assert f"{folder / '00000.parquet'} is missing; expected the 2 files of item features" in printed["error"]


def test_a_file_of_features_with_other_bytes_is_refused(workspace, tmp_path, capfd):
    path = workspace.runs()[-1].features_folder("user") / "00001.parquet"
    rows = pq.read_table(path)
    pq.write_table(rows.take(pa.array(range(len(rows))[::-1])), path)
    log = tmp_path / "log.parquet"
    pq.write_table(pa.table({"user_id": ["a"], "item_id": ["i"], "timestamp": [1]}), log)
    for name, *more in (("history",), ("export",), ("asof", log)):
        printed = run_features(workspace, capfd, name, *more, tmp_path / name, code=3)
        assert f"{path} is damaged or was changed" in printed["error"]


def test_a_side_without_a_text_has_no_versions(tmp_path, capfd):
    workspace = Workspace.open(tmp_path / "workspace")
    planted(workspace, 3, {})
    printed = run_features(workspace, capfd, "history", tmp_path / "history")
    assert (printed["users"]["versions"], printed["items"]["versions"]) == (0, 1)
    assert pq.read_table(tmp_path / "history/user.parquet").num_rows == 0
    times = pa.array([datetime.datetime(2025, 3, 7)])
    pq.write_table(pa.table({"user_id": ["a"], "item_id": ["i"], "timestamp": times}), tmp_path / "log.parquet")
    run_features(workspace, capfd, "asof", tmp_path / "log.parquet", tmp_path / "out.parquet")
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["user_vector"] is None and row["user_cluster_id"] is None and row["item_cluster_id"] == 3


def test_a_workspace_or_tables_are_never_replaced(workspace, tmp_path, capfd):
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "users.parquet").write_bytes(b"")
    last = workspace.runs()[-1].root
    for folder in (workspace.root, tmp_path, last, last / "features/user", tables):
        for name in ("export", "history"):
            printed = run_features(workspace, capfd, name, folder, "--overwrite", code=3)
            assert re.search(rf"{folder} would replace .*, part of a workspace or of tables", printed["error"])
    printed = run_features(workspace, capfd, "asof", tables, tables / "users.parquet", code=3)
    assert "users.parquet would replace" in printed["error"]
    done = run_here(capfd, "ctr", "train", str(last / "model"), "--workspace", str(workspace.root))
    assert done.returncode == 3 and "model would replace" in done.stderr.replace("\n", " ")
    run_features(workspace, capfd, "export", workspace.root / "exports/merlin")
    run_features(workspace, capfd, "export", workspace.root / "exports/merlin", "--overwrite")


def test_the_history_says_from_when_to_when(workspace, tmp_path, capfd):
    printed = run_features(workspace, capfd, "history", tmp_path / "history")
    assert printed["users"] == {"entities": 3, "versions": 4}
    users = pq.read_table(tmp_path / "history" / "user.parquet").to_pylist()
    spans = [(row["user_id"], row["valid_from"].day, row["valid_to"] and row["valid_to"].day) for row in users]
    assert spans == [("a", 4, 6), ("a", 6, None), ("b", 4, None), ("c", 6, None)]


def test_an_export_of_what_changed_names_who_went(workspace, tmp_path, capfd):
    first, *_, last = (run.run_id for run in workspace.runs()[1:])
    printed = run_features(workspace, capfd, "export", tmp_path / "new", "--since", first)
    assert printed["users"] == {"rows": 2, "gone": 0}
    assert pq.read_table(tmp_path / "new" / "user" / "features.parquet")["user_id"].to_pylist() == ["a", "c"]
    printed = run_features(workspace, capfd, "export", tmp_path / "old", "--since", last, "--run", first)
    assert printed["users"] == {"rows": 1, "gone": 1}
    assert pq.read_table(tmp_path / "old" / "gone_users.parquet")["user_id"].to_pylist() == ["c"]


def test_a_run_without_features_is_named_that_an_export_is_compared_with(workspace, tmp_path, capfd):
    run = workspace.runs()[1]
    manifest = run.load_manifest()
    del manifest.features["item"]
    manifest.save()
    error = run_features(workspace, capfd, "export", tmp_path / "new", "--since", run.run_id, code=3)["error"]
    assert f"{run.run_id}/features/item is missing; expected the features of items" in error


@pytest.mark.parametrize(("unit", "per_second"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_integers_of_a_log_count_the_unit_that_is_named_or_that_their_values_leave(
    workspace, tmp_path, capfd, unit, per_second
):
    moments = [int(datetime.datetime(2025, month, 4, tzinfo=datetime.UTC).timestamp()) for month in (2, 3)]
    times = [moment * per_second for moment in moments]
    pq.write_table(pa.table({"user_id": ["a"] * 2, "item_id": ["i"] * 2, "timestamp": times}), tmp_path / "log.parquet")
    arguments = ("asof", tmp_path / "log.parquet", tmp_path / "out.parquet")
    run_features(workspace, capfd, *arguments, "--unit", unit)
    assert pq.read_table(tmp_path / "out.parquet")["user_cluster_id"].to_pylist() == [None, 3]
    done = run_here(capfd, "features", *map(str, arguments), "--workspace", str(workspace.root))
    assert ("the integers are read as" in done.stderr) == (unit != "s")
    assert pq.read_table(tmp_path / "out.parquet")["user_cluster_id"].to_pylist() == [None, 3]
    if unit != "s":
        arguments += ("--unit", "s")
        done = run_here(capfd, "features", *map(str, arguments), "--workspace", str(workspace.root))
        assert done.returncode == 3
        assert f"column timestamp, row 0: found {times[0]}" in done.stderr and "--unit" in done.stderr


def test_of_two_runs_of_a_date_that_with_the_published_settings_counts(workspace):
    published, other = workspace.publication.run_id(), workspace.run("2025-03-05-99999999")
    shutil.copytree(workspace.run(published).root, other.root)
    other.success_path.unlink()
    other.finish()
    assert workspace.finished_runs()[-1].run_id == other.run_id
    assert _runs(None, workspace.root)[-1].run_id == published
