"""`laserbatch data`: output and exit codes."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from laserbatch.jobs.commands.data import app
from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.sample.world import write_sample_world

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
    (folder / "log.csv").write_text("user,item,time\nu1,i1,1740787200\n")
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
    arguments = ["import", exports, tmp_path / "out", "--mapping", exports / "mapping.yaml", "--json"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_interactions"] == 1
    assert "not empty" in str(run(*arguments).exception)
    (tmp_path / ".out.123-0.tmp").mkdir()
    (note,) = json.loads(run(*arguments, "--overwrite").stdout)["notes"]
    assert ".out.123-0.tmp was left by a command that was killed" in note


def test_nothing_but_tables_is_ever_replaced(run, tmp_path, exports):
    arguments = ["import", exports, "--mapping", exports / "mapping.yaml", "--overwrite"]
    before = sorted(tmp_path.rglob("*"))
    for out in (exports, tmp_path, exports / ".." / "exports"):
        assert "which is being imported" in str(run(*arguments, out).exception)
    (tmp_path / "link").symlink_to(exports)
    assert "which is being imported" in str(run(*arguments, tmp_path / "link").exception)
    assert "has items.csv, log.csv, mapping.yaml" in str(run("sample", exports, "--overwrite").exception)
    (tmp_path / "link").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_tables_that_a_mapping_reads_are_not_replaced_by_what_it_makes_of_them(run, tmp_path, exports):
    (exports / "mapping.yaml").write_text(MAPPING.replace("log.csv", "tables/interactions.parquet"))
    (exports / "tables").mkdir()
    pq.write_table(pa.table({"user": ["u"], "item": ["i1"], "time": [1]}), exports / "tables" / "interactions.parquet")
    arguments = ["import", exports, exports / "tables", "--mapping", exports / "mapping.yaml", "--overwrite"]
    assert "interactions.parquet, which is being imported" in str(run(*arguments).exception)


def test_a_database_that_a_mapping_asks_is_not_replaced_by_what_is_made_of_it(run, tmp_path, exports):
    (exports / "mapping.yaml").write_text(MAPPING.replace("files: log.csv", "query: SELECT 1, database: tables/log.db"))
    (exports / "tables").mkdir()
    (exports / "tables" / "log.db").touch()
    arguments = ["import", exports, exports / "tables", "--mapping", exports / "mapping.yaml", "--overwrite"]
    assert "log.db, which is being imported" in str(run(*arguments).exception)


def test_a_link_to_a_folder_of_tables_is_filled_where_it_points(run, tmp_path, exports):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    arguments = ["import", exports, tmp_path / "link", "--mapping", exports / "mapping.yaml", "--overwrite"]
    assert [run(*arguments).exit_code for _ in range(2)] == [0, 0]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "items.parquet").exists()


def test_a_failed_import_leaves_nothing(run, tmp_path, exports):
    (exports / "log.csv").write_text("user,item,time\nu1,i1,soon\n")
    result = run("import", exports, tmp_path / "out", "--mapping", exports / "mapping.yaml")
    assert isinstance(result.exception, TableError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exports"]


def test_imported_tables_with_faults_are_kept_and_end_with_3(run, tmp_path, exports):
    (exports / "log.csv").write_text("user,item,time\nu1,i2,1740787200\n")
    result = run("import", exports, tmp_path / "out", "--mapping", exports / "mapping.yaml", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["findings"][0]["value"] == "i2"
    assert (tmp_path / "out" / "users.parquet").exists()


def test_rows_that_an_import_leaves_out_are_said(run, tmp_path, exports):
    (exports / "mapping.yaml").write_text(MAPPING.replace("time}", "time, drop_unknown: true}"))
    (exports / "log.csv").write_text("user,item,time\nu1,i2,1740787200\nu1,i1,1740787200\n")
    result = run("import", exports, tmp_path / "out", "--mapping", exports / "mapping.yaml", "--json")
    assert json.loads(result.stdout)["rows left out"] == {"interactions of unknown item_id": 1}


def test_doubts_of_an_import_are_said(run, tmp_path, exports):
    (exports / "items.csv").write_text('id,title\ni1,"Heat\nthe film"\n')
    arguments = ["import", exports, tmp_path / "out", "--mapping", exports / "mapping.yaml", "--overwrite"]
    assert "1 quoted field over several lines" in json.loads(run(*arguments, "--json").stdout)["notes"][0]
    assert "1 quoted field over several lines" in run(*arguments).output


def test_check_goes_by_the_configuration_that_is_named(run, tmp_path):
    write_sample_world(tmp_path / "tables", num_users=20, num_items=20)
    config = tmp_path / "laserbatch.yaml"
    config.write_text("ctr: {label: rating >= 9}\n")
    result = run("check", tmp_path / "tables", "--config", config, "--json")
    assert result.exit_code == 0
    assert [finding["kind"] for finding in json.loads(result.stdout)["findings"]] == ["one-class"]
    config.write_text("knowledge: {user_template: kar_item}\n")
    assert "is for items; name one for users" in str(run("check", tmp_path / "tables", "--config", config).exception)


def test_check_without_a_folder_checks_the_configured_tables(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "tables.path" in str(run("check").exception)
    write_sample_world(tmp_path / "tables", num_users=20, num_items=20)
    (tmp_path / "laserbatch.yaml").write_text("tables: {path: tables}\n")
    outcome = json.loads(run("check", "--json").stdout)
    assert (outcome["path"], outcome["num_faults"], outcome["num_users"]) == (str(tmp_path / "tables"), 0, 20)


def test_check_counts_exact_copies_of_interactions(run, tmp_path):
    write_sample_world(tmp_path / "tables", num_users=20, num_items=20)
    path = tmp_path / "tables" / "interactions.parquet"
    whole = pq.read_table(path)
    pq.write_table(pa.concat_tables([whole, whole.slice(0, 3)]), path)
    outcome = json.loads(run("check", tmp_path / "tables", "--json").stdout)
    assert outcome["exact copies of interactions, left out by runs"] == 3
