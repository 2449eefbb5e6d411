"""Features of published runs in tables of Delta Lake and Iceberg: whole or not at all, once, and as readers expect."""

import datetime
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from destinations import bucket  # noqa: F401 (fixture)
from manifests import manifest_of

from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.inputs import require_delivery
from laserbatch.jobs.stages.publishing import deliver, forget_delivered, remove_delivered
from laserbatch.pipeline.encoding.schema import feature_schema, moments
from laserbatch.pipeline.errors import ConfigError, WorkspaceError
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage import lake
from laserbatch.pipeline.storage.delivery import deliveries
from laserbatch.pipeline.storage.lake import LakeTables
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace

OLD, NEW = "2025-03-01-aaaaaaaa", "2025-03-02-aaaaaaaa"
KILLED = 9
KILL = f"""
import os, sys
from pathlib import Path
from laserbatch.pipeline.storage import lake
from laserbatch.pipeline.storage.run_folder import RunFolder

def killed(path, read=lake.iter_parquet):
    for batch in read(path):
        yield batch.slice(0, 2)
        if path.parent.name == sys.argv[3]:
            os._exit({KILLED})
        yield batch.slice(2)

if sys.argv[1].startswith("iceberg"):
    import folder_catalog

lake.iter_parquet = killed
lake.LakeTables.at(sys.argv[1]).deliver(RunFolder(Path(sys.argv[2])))
"""


def features(run_id: str, side: Side, dim: int = 4, num_rows: int = 5, id_type: pa.DataType | None = None) -> pa.Table:
    """A feature table; each run has other vectors."""
    id_type = id_type or (pa.string() if side == "user" else pa.int64())
    vectors = np.random.default_rng(int(run_id[8:10])).normal(size=num_rows * dim).astype(np.float32)
    ids = pa.array(range(num_rows)).cast(id_type)
    columns = [
        ids,
        pa.FixedSizeListArray.from_arrays(pa.array(vectors), dim),
        *[pa.array([0] * num_rows, pa.int32())] * 2,
    ]
    columns += [pa.array([run_id] * num_rows), pa.array(["f"] * num_rows), moments(np.full(num_rows, 20000, np.int32))]
    return pa.table(columns, schema=feature_schema(side, id_type, dim))


def write_features(run: RunFolder, side: Side, table: pa.Table) -> None:
    """Features of a run in two files, or one where there are no rows."""
    folder = run.features_folder(side)
    for number, start in enumerate(range(0, max(1, table.num_rows), 3)):
        write_parquet(table.slice(start, 3), folder / f"{number:05}.parquet")


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    opened = Workspace.open(tmp_path / "here")
    for run_id in (OLD, NEW):
        run = opened.run(run_id)
        for side in SIDES:
            write_features(run, side, features(run_id, side))
        manifest_of(run.manifest_path, datetime.date.fromisoformat(run.date)).save()
        run.finish()
    opened.publication.publish(OLD)
    return opened


KINDS = ["delta on a disk", "delta on s3", "iceberg", "iceberg of sqlite"]
# Delta Lake's library alone handles the store of its tables; tests of removed runs check each call to it.
not_on_s3 = pytest.mark.parametrize("place", [kind for kind in KINDS if kind != "delta on s3"], indirect=True)


@pytest.fixture(params=KINDS)
def place(request, tmp_path, monkeypatch) -> str:
    """A URI at which there are no tables yet."""
    if request.param.startswith("delta"):
        pytest.importorskip("deltalake")
        if request.param == "delta on a disk":
            return f"delta:file://{tmp_path}/lake"
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        return f"delta:{request.getfixturevalue('bucket')}/{tmp_path.name}"
    pytest.importorskip("pyiceberg")
    import folder_catalog  # noqa: F401
    from pyiceberg.utils.config import Config

    options = {"TYPE": "in-memory", "WAREHOUSE": f"{tmp_path}/lake"}
    if request.param == "iceberg of sqlite":
        if find_spec("sqlalchemy") is None:
            pytest.skip("pyiceberg's catalogue in SQLite needs SQLAlchemy, `pip install 'pyiceberg[sql-sqlite]'`")
        options = {"TYPE": "sql", "URI": f"sqlite:///{tmp_path}/catalog.db", "WAREHOUSE": f"file://{tmp_path}/lake"}
    for name, value in options.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__HERE__{name}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # pyiceberg reads it at import
    return "iceberg://here/ctr"


def there(place: str, side: Side) -> pa.Table:
    """All rows of a side's table."""
    table = LakeTables.at(place)._table(side)
    schema = table.schema()
    if schema is None:
        return pa.table({})
    plain = pa.schema([field.with_type(lake._plain(field.type)) for field in schema])
    rows = (pa.Table.from_batches([batch]).cast(plain) for batch in table.rows(schema.names))
    return pa.concat_tables([plain.empty_table(), *rows])


def seen(place: str, workspace: Workspace) -> str:
    """The run that readers take, after a check that both tables have each of its rows once."""
    run_id = LakeTables.at(place).published()["run_id"]
    for side in SIDES:
        rows = there(place, side)
        rows = rows.filter(pc.equal(rows[lake.RUN], run_id)).drop_columns([lake.RUN, lake.NUMBER]).sort_by(f"{side}_id")
        assert rows.to_pylist() == read_parquet(workspace.run(run_id).features_path(side)).to_pylist()
    return run_id


def num_rows(place: str) -> dict[str, int]:
    return {side: there(place, side).num_rows for side in SIDES}


def test_each_run_is_there_once_however_often_it_is_delivered(workspace, place):
    deliver(workspace, place)
    deliver(workspace, place)
    assert seen(place, workspace) == OLD and num_rows(place) == {"user": 5, "item": 5}
    workspace.publication.publish(NEW)
    deliver(workspace, f"{place}/")
    deliver(workspace, place)
    assert seen(place, workspace) == NEW and num_rows(place) == {"user": 10, "item": 10}
    assert deliveries(workspace.root)[place]["run_id"] == NEW
    workspace.publication.roll_back()
    deliver(workspace, place)
    assert seen(place, workspace) == OLD and num_rows(place) == {"user": 10, "item": 10}
    assert set(there(place, "user")[lake.NUMBER].to_pylist()) == {2, 3}
    remove_delivered(workspace, place, [NEW])
    assert LakeTables.at(place).runs() == [OLD] and seen(place, workspace) == OLD
    LakeTables.at(place)._table("item").opened().delete("item_id < 2")  # by hand
    deliver(workspace, place)
    assert seen(place, workspace) == OLD and num_rows(place) == {"user": 5, "item": 5}


@pytest.mark.parametrize(
    ("place", "side"),
    [("delta on a disk", "item"), *((kind, "user") for kind in ("delta on a disk", "iceberg", "iceberg of sqlite"))],
    indirect=["place"],
)
def test_a_killed_delivery_shows_readers_the_run_before_and_is_completed(workspace, place, side):
    run = workspace.run(NEW)
    deliver(workspace, place)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", KILL, place, str(run.root), side]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == KILLED, done.stderr
    assert seen(place, workspace) == OLD
    assert num_rows(place) == {"user": 5, "item": 5 if side == "item" else 10}
    workspace.publication.publish(NEW)
    deliver(workspace, place)
    assert seen(place, workspace) == NEW and num_rows(place) == {"user": 10, "item": 10}


@not_on_s3
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dim": 6}, "vectors of the table item_features have 4 numbers, but .* have 6.*delete the table"),
        ({"id_type": pa.string()}, "item_id: found int64, expected string.*delete the table item_features there"),
    ],
)
def test_other_columns_are_refused_and_nothing_is_written(workspace, place, other, message):
    deliver(workspace, place)
    for side in SIDES:
        write_features(workspace.run(NEW), side, features(NEW, side, **other))
    workspace.publication.publish(NEW)
    with pytest.raises(WorkspaceError, match=f"{NEW} is published here, but not delivered to .*{message}"):
        deliver(workspace, place)
    assert seen(place, workspace) == OLD and num_rows(place) == {"user": 5, "item": 5}


@not_on_s3
def test_who_is_forgotten_here_is_forgotten_there(workspace, place, capfd):
    for run_id in (OLD, NEW):
        workspace.publication.publish(run_id)
        deliver(workspace, place)
    write_features(workspace.run(OLD), "user", features(OLD, "user").slice(1))
    assert forget_delivered(workspace, place) == {OLD: "sent again", NEW: "as it was"}
    assert "still hold removed rows" in capfd.readouterr().err
    assert num_rows(place) == {"user": 9, "item": 10} and seen(place, workspace) == NEW
    workspace.run(OLD).root.rename(workspace.root / "elsewhere")
    assert forget_delivered(workspace, place) == {NEW: "as it was", OLD: "removed"}
    assert LakeTables.at(place).runs() == [NEW]


@not_on_s3
def test_tables_that_cannot_be_seen_any_more_are_no_tables_without_a_person(workspace, place):
    assert forget_delivered(workspace, place) == {}, "nothing was delivered yet"
    LakeTables.at(place).remove([OLD, NEW])
    workspace.publication.publish(OLD)
    deliver(workspace, place)
    LakeTables.at(place).remove([OLD])
    with pytest.raises(WorkspaceError, match=f"found no table with rows, but {OLD} was delivered there"):
        forget_delivered(workspace, place)


@not_on_s3
def test_a_side_without_rows_is_delivered_only_where_no_earlier_run_would_be_shown(workspace, place):
    for run_id in (OLD, NEW):
        shutil.rmtree(workspace.run(run_id).features_folder("user"))
        write_features(workspace.run(run_id), "user", features(run_id, "user", num_rows=0))
        workspace.publication.publish(run_id)
        deliver(workspace, place)
    assert LakeTables.at(place).published() == {"run_id": NEW} and num_rows(place) == {"user": 0, "item": 10}
    shutil.rmtree(workspace.run(NEW).features_folder("item"))
    write_features(workspace.run(NEW), "item", features(NEW, "item", num_rows=0))
    with pytest.raises(
        WorkspaceError, match=r"item/00000.parquet has no rows, so the table item_features .* would still show"
    ):
        deliver(workspace, place)


def test_a_run_without_features_and_lists_of_an_extension_are_not_delivered(workspace, place, capfd):
    shutil.rmtree(workspace.run(OLD).features_folder("item"))
    with pytest.raises(WorkspaceError, match=r"item is missing.*nightly --date 2025-03-01 --force"):
        deliver(workspace, place)
    lists = Workspace.open(workspace.root / "recommendations")
    run = lists.run(OLD)
    run.root.mkdir(parents=True)
    run.manifest_path.write_text("{}")
    run.finish()
    lists.publication.publish(OLD)
    deliver(lists, f"{place}/recommendations")
    assert "takes only features" in capfd.readouterr().err and LakeTables.at(f"{place}/recommendations").runs() == []


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("iceberg://prod", "found iceberg://prod, expected iceberg://CATALOG/NAMESPACE"),
        ("delta:/data://", "found delta:/data://, expected delta:s3://bucket/prefix"),
        ("delta:s3://b/p#1", "found delta:s3://b/p#1, expected"),
    ],
)
def test_a_place_of_another_form_is_refused_before_the_night(uri, message):
    with pytest.raises(ConfigError, match=message):
        require_delivery(Settings(deliver_to=uri))


def test_what_is_not_installed_or_configured_is_named(workspace, monkeypatch):
    pytest.importorskip("pyiceberg")
    with pytest.raises(WorkspaceError, match=r"iceberg://nowhere/ctr: .*PYICEBERG_CATALOG__"):
        deliver(workspace, "iceberg://nowhere/ctr")
    monkeypatch.setattr(lake, "find_spec", lambda name: None)
    for uri, extra in {"delta:s3://b/p": "delta", "iceberg://prod/ctr": "iceberg"}.items():
        with pytest.raises(ConfigError, match=rf"pip install 'laserbatch\[{extra}\]'"):
            require_delivery(Settings(deliver_to=uri))
