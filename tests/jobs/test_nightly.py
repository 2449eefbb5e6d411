"""Whole nights with the bundled model: their results, what they skip, and how they survive a kill.

The first night is run by an installed wheel, its texts are written by Ray's workers, and it is killed.
"""

import datetime
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from night_world import FIRST_DATE, SECOND_DATE, command_here, make_world, run_here, start, write_config, write_here

from laserbatch.jobs.commands.nightly import nightly
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.index.store import PoolStore

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pipeline", "retrieval_pools", "ctr", "jobs", "configs", "models")
# Packages of extras other than the encoder's, pandas, which only tests use, and our own editable installation.
OF_EXTRAS = {"openai", "deltalake", "pyiceberg", "duckdb", "peft", "compressed_tensors", "torchao", "gguf",
             "pandas", "laserbatch", "__editable__"}  # fmt: skip
SHIPPED = {"num_clusters": 4, "encoder": None}  # the shipped encoder; nights of other tests use a small one
# The budget is chosen, by a step cost that depends on neither this machine nor the batch size.
CHOSEN = {"max_draft_tokens": None, "min_acceptance": None, "step_cost": "cost.yaml"}
COST = """
name: invented
steps: [{batch_size: 1, num_tokens: 1, seconds: 0.01}, {batch_size: 1, num_tokens: 65, seconds: 0.02}]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The `bin` of an environment with our wheel, and foreign packages named like our folders.

    Our requirements are linked from this environment, without our own package, so that nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("installed")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"  # as pip calls it, but in one process
    subprocess.run([sys.executable, "-c", build], check=True, capture_output=True, cwd=folder / "source")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python]
    install = ["install", "--no-deps", "--no-compile"]  # compiled files would have other times than those set below
    subprocess.run([*pip, *install, *folder.glob("*.whl")], check=True)
    (site,) = folder.glob("venv/lib/*/site-packages")
    (site / "others.pth").write_text(str(_required_packages(folder / "others")))
    for name in ("jobs", "models"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("OWNER = 'somebody'\n")
    for package in ("pipeline", "retrieval_pools"):
        for cache in (ROOT / package).rglob("__pycache__/*.nb[ci]"):  # otherwise numba compiles all of it again
            shutil.copy(cache, _made(site / "laserbatch" / cache.relative_to(ROOT).parent))
        for path in (ROOT / package).rglob("*.py"):
            os.utime(site / "laserbatch" / path.relative_to(ROOT), ns=(path.stat().st_mtime_ns,) * 2)
    return python.parent


def _required_packages(folder: Path) -> Path:
    """Links to the installed packages, except those that only an extra requires: a night must not need them."""
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if re.split(r"[-.]", path.name.lower())[0] not in OF_EXTRAS:
            (_made(folder) / path.name).symlink_to(path)
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def two_nights(installed, tmp_path_factory) -> Path:
    """A workspace after two nights with chosen budgets, the second with its CTR comparison.

    The first was killed after it had finished a shard, and then continued in this process by the same command.
    `first.json` has the shards and their times of writing, before and after; `first.txt` is the output.
    """
    folder = make_world(tmp_path_factory.mktemp("nights"), num_users=10, num_items=12)
    (folder / "cost.yaml").write_text(COST)
    config = write_config(folder, decoding=CHOSEN, encoding=SHIPPED)
    command = ("nightly", "--config", str(config), "--date", FIRST_DATE)
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("PYTHONPATH", raising=False)
        finished = _shards_before_a_kill(folder, start(*command, laserbatch=[installed / "laserbatch"]))
        write_here(patched)
        with redirect_stderr(io.StringIO()) as output:
            first = command_here(*command)
    assert first == 0, output.getvalue()
    (folder / "first.txt").write_text(output.getvalue())
    (folder / "first.json").write_text(json.dumps([finished, {name: _written(Path(name)) for name in finished}]))
    night = {"shard_size": 8, "train_ctr": True}
    config = write_config(folder, "second.yaml", night=night, decoding=CHOSEN, encoding=SHIPPED)
    with redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patched:
        write_here(patched)
        nightly(
            config, None, SECOND_DATE, force=False, redo=False, publish=False, dry_run=False, ray_address=None,
            notify_url=None, as_json=True,
        )  # fmt: skip
    (folder / "second.json").write_text(printed.getvalue())
    return folder


def _shards_before_a_kill(folder: Path, night: subprocess.Popen) -> dict[str, int]:
    """Kill a night after its first shard; returns the finished shards, with their times of writing."""
    deadline = time.monotonic() + 240
    shards = lambda: sorted(folder.glob("workspace/runs/*/shards/*/0*.json"))  # noqa: E731
    while not shards() and night.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert night.poll() is None, night.communicate()[1]
    os.killpg(night.pid, signal.SIGKILL)
    night.communicate()
    return {str(path): _written(path) for path in shards()}


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


def test_a_wheel_holds_every_file_and_leaves_others_packages_alone(installed, two_nights):
    (wheel,) = installed.parents[1].glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {f"laserbatch/{name}/py.typed" for name in FOLDERS} <= packaged  # otherwise type checkers ignore the package
    there = {path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()}
    assert packaged == {
        f"laserbatch/{path.relative_to(ROOT)}" for path in there if "__pycache__" not in path.parts
    }  # fmt: skip
    code = "import jobs, models, laserbatch.jobs as ours; print(jobs.OWNER, models.OWNER, ours.__file__)"
    command = [installed / "python", "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=installed, env={}).stdout.split()
    assert printed[:2] == ["somebody"] * 2 and Path(printed[2]).is_relative_to(installed.parent)
    manifest = runs(two_nights)[-1].load_manifest()
    assert manifest.status == "success" and manifest.generation.workers.num_workers >= 1


def runs(folder: Path):
    return Workspace.open(folder / "workspace", create=False).runs()


def texts(run_folder) -> dict[str, dict[object, str]]:
    tables = {side: read_parquet(run_folder.knowledge_folder(side)) for side in SIDES}
    return {
        side: dict(zip(table["entity_id"].to_pylist(), table["text"].to_pylist(), strict=True))
        for side, table in tables.items()
    }


def test_the_second_night_carries_over_the_unchanged_and_drafts_the_rest_from_the_first(two_nights):
    first, second = runs(two_nights)
    manifest = second.load_manifest()
    for side in SIDES:
        num_carried_over = manifest.generation.sides[side].num_carried_over
        assert num_carried_over > 0
        table = read_parquet(second.knowledge_folder(side))
        origins = pc.value_counts(table["run_id"].combine_chunks()).to_pylist()
        assert {entry["values"]: entry["counts"] for entry in origins}[first.run_id] == num_carried_over
    new = read_parquet(second.knowledge_folder("user")).filter(pc.field("run_id") == second.run_id)
    assert new.num_rows > 0
    assert set(new["pool_version"].to_pylist()) == {first.run_id}
    paces = [night.load_manifest().generation.sides["user"].stats.acceptance_length for night in (first, second)]
    assert paces[1] > paces[0]


def test_each_night_chose_its_budgets_by_what_steps_cost(two_nights):
    for night in runs(two_nights):
        manifest = night.load_manifest()
        for side in SIDES:
            budget, stats = manifest.generation.budgets[side], manifest.generation.sides[side].stats
            assert manifest.generation.sides[side].budget == budget
            assert budget.forecast.step_cost == "invented"
            assert 0 < stats.num_drafted <= budget.max_draft_tokens * stats.num_steps


def test_the_last_night_is_published_with_its_pools_and_report(two_nights):
    workspace = Workspace.open(two_nights / "workspace", create=False)
    second = runs(two_nights)[1]
    assert workspace.publication.run().run_id == second.run_id
    assert PoolStore(workspace.pools_folder).current_version() == second.run_id
    assert "<html" in second.report_path.read_text(encoding="utf-8")
    assert second.load_manifest().judgement.ctr.rows


def test_the_summary_is_json(two_nights):
    summary = json.loads((two_nights / "second.json").read_text())
    assert summary["users"]["num_carried_over"] > 0
    assert {row["variant"] for row in summary["ctr"]["rows"] if row["auc"] > 0} == {"none", "relaxed"}
    assert not [key for key in _keys(summary) if not key.isidentifier()]


def _keys(data: object) -> list[str]:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [*(data if isinstance(data, dict) else ()), *(key for value in inner for key in _keys(value))]


def test_texts_depend_neither_on_shards_nor_on_workers_nor_on_the_future(two_nights, tmp_path, capfd, monkeypatch):
    """The same nights without a kill: other numbers of workers, other shards and batches, and another future."""
    write_here(monkeypatch)
    shutil.copytree(two_nights / "tables", tmp_path / "tables")
    table = pq.read_table(tmp_path / "tables" / "interactions.parquet")
    cut = pa.scalar(_midnight_after(SECOND_DATE), table.schema.field("timestamp").type)
    is_future = pc.greater_equal(table["timestamp"], cut)
    assert pc.any(is_future).as_py()
    flipped = pc.if_else(is_future, pc.subtract(6.0, pc.cast(table["rating"], pa.float64())), table["rating"])
    flipped = pc.cast(flipped, table.schema.field("rating").type)
    changed = table.set_column(table.column_names.index("rating"), "rating", flipped)
    pq.write_table(changed, tmp_path / "tables" / "interactions.parquet")
    (tmp_path / "cost.yaml").write_text(COST)
    config = write_config(
        tmp_path,
        night={"shard_size": 13, "train_ctr": False},
        decoding=CHOSEN | {"batch_size": 5},
        encoding=SHIPPED,
    )
    for date in (FIRST_DATE, SECOND_DATE):
        night = run_here(capfd, "nightly", "--config", str(config), "--date", date)
        assert night.returncode == 0, night.stderr
    for here, there in zip(runs(two_nights), runs(tmp_path), strict=True):
        assert texts(here) == texts(there)
        for side in SIDES:
            features = [pq.read_table(night.features_path(side)) for night in (here, there)]
            vectors = [dict(zip(*_columns(f, side), strict=True)) for f in features]
            assert vectors[0] == vectors[1]


def _columns(features, side):
    return features[f"{side}_id"].to_pylist(), [tuple(vector) for vector in features["vector"].to_pylist()]


def _midnight_after(date: str):
    day = datetime.date.fromisoformat(date) + datetime.timedelta(days=1)
    return datetime.datetime.combine(day, datetime.time(), datetime.UTC)


def test_a_killed_night_is_finished_by_the_same_command(two_nights):
    """The test above compares its texts with those of a night that was not killed."""
    before, after = json.loads((two_nights / "first.json").read_text())
    assert before, "no shard was finished before the kill"
    assert before == after
    output = (two_nights / "first.txt").read_text()
    assert "continuing run" in output
    # no output of libraries that were loaded
    assert "torchao" not in output and "pytree" not in output
    assert len(runs(two_nights)) == 2


def test_two_nights_at_once_are_refused(two_nights, capfd):
    with Workspace.open(two_nights / "workspace").lock():
        second = run_here(capfd, "nightly", "--config", str(two_nights / "laserbatch.yaml"), "--date", SECOND_DATE)
    assert second.returncode == 5
    assert "in use by pid" in second.stderr
