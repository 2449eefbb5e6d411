"""`laserbatch data`: what it prints, and how it ends."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from jobs.data import app
from pipeline.errors import TableError

MAPPING = """
items: {files: items.csv, id: id, title: title}
interactions: {files: log.csv, user_id: user, item_id: item, timestamp: time}
"""


@pytest.fixture
def run():
    def invoke(*arguments: object):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def exports(tmp_path):
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "items.csv").write_text("id,title\ni1,Heat\n")
    (folder / "log.csv").write_text("user,item,time\nu1,i1,5\n")
    (folder / "mapping.yaml").write_text(MAPPING)
    return folder


def test_check_of_sound_tables_ends_with_0(run, tmp_path):
    assert run("sample", tmp_path / "world", "--num-users", 20, "--num-items", 20, "--days", 5).exit_code == 0
    result = run("check", tmp_path / "world", "--json")
    assert result.exit_code == 0
    outcome = json.loads(result.stdout)
    assert (outcome["num_faults"], outcome["num_users"], outcome["findings"]) == (0, 20, [])


def test_check_lists_faults_and_ends_with_3(run, tmp_path):
    pq.write_table(pa.table({"user_id": ["u1", "u1"]}), tmp_path / "users.parquet")
    result = run("check", tmp_path, "--json")
    assert result.exit_code == 3
    findings = json.loads(result.stdout)["findings"]
    assert [(f["kind"], f["table"]) for f in findings] == [
        ("duplicate-id", "users"),
        ("missing-table", "items"),
        ("missing-table", "interactions"),
    ]
    assert run("check", tmp_path).exit_code == 3
    assert run("check", tmp_path / "none").exit_code == 3


def test_import_makes_tables_and_does_not_overwrite_unasked(run, tmp_path, exports):
    arguments = ["import", "table", exports, tmp_path / "out", "--mapping", exports / "mapping.yaml", "--json"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_interactions"] == 1
    assert "not empty" in str(run(*arguments).exception)
    assert run(*arguments, "--overwrite").exit_code == 0


def test_a_failed_import_leaves_nothing(run, tmp_path, exports):
    (exports / "log.csv").write_text("user,item,time\nu1,i1,soon\n")
    result = run("import", "table", exports, tmp_path / "out", "--mapping", exports / "mapping.yaml")
    assert isinstance(result.exception, TableError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exports"]


def test_imported_tables_with_faults_are_kept_and_end_with_3(run, tmp_path, exports):
    (exports / "log.csv").write_text("user,item,time\nu1,i2,5\n")
    result = run("import", "table", exports, tmp_path / "out", "--mapping", exports / "mapping.yaml", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["findings"][0]["value"] == "i2"
    assert (tmp_path / "out" / "users.parquet").exists()


def test_a_mapping_goes_with_the_format_table_alone(run, tmp_path, exports):
    assert run("import", "table", exports, tmp_path / "out").exit_code == 2
    assert (
        run("import", "movielens-1m", exports, tmp_path / "out", "--mapping", exports / "mapping.yaml").exit_code == 2
    )


@pytest.mark.parametrize("command", ["check", "import", "sample"])
def test_help_has_an_example(run, command):
    assert "Example: laserbatch data" in run(command, "--help").output
