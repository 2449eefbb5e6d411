"""The inputs of a run: checked before anything is written, recorded, and unchanged when the run is continued."""

import datetime
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from transformers import AddedToken, AutoTokenizer

from laserbatch.jobs.events import read_events
from laserbatch.jobs.log_age import log_age
from laserbatch.jobs.report.page import render_page
from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages.attempt import recorded
from laserbatch.jobs.stages.inputs import _content_sha256, check_inputs
from laserbatch.jobs.stages.night import open_night
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL
from laserbatch.pipeline.errors import ConfigError, TableError, WorkspaceError
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.storage.atomic import sha256_file
from laserbatch.pipeline.tables.mapping import import_mapped
from laserbatch.pipeline.tables.read import read_tables
from laserbatch.pipeline.tables.settings import ImportMapping
from laserbatch.retrieval_pools.errors import PoolError

DATE = datetime.date(2025, 3, 1)


@pytest.fixture
def world(tmp_path):
    """Tables, and a configuration with vectors of items, in one folder."""
    write_sample_world(tmp_path / "tables", num_users=20, num_items=24)
    config = "workspace: workspace\ntables: {path: tables}\nrouting: {item_embeddings: item.parquet}\n"
    (tmp_path / "laserbatch.yaml").write_text(config)
    item_ids = read_tables(tmp_path / "tables", as_of=DATE).items["item_id"].to_pylist()
    write_vectors(tmp_path, [*item_ids, "nobody", "nothing"])
    return tmp_path


def write_vectors(folder, ids, value=0.5):
    table = pa.table({"item_id": ids, "vector": list(np.full((len(ids), 4), value, np.float32))})
    pq.write_table(table, folder / "item.parquet")


def opened(world):
    return open_night(load_settings(world / "laserbatch.yaml"), DATE)


def test_embeddings_are_recorded_with_checksum_and_ids_that_are_of_nobody(world):
    manifest = opened(world).manifest
    recorded = manifest.origin.inputs
    assert list(recorded) == ["users", "items", "interactions", "item_embeddings"]
    assert recorded["item_embeddings"] == {
        "path": "item.parquet",
        "num_rows": pq.read_metadata(world / "item.parquet").num_rows,
        "sha256": sha256_file(world / "item.parquet"),
        "num_unknown_ids": 2,
    }
    assert "num_unknown_ids: 2" in render_page(manifest)


def test_a_night_of_a_database_records_the_queries_and_goes_on_without_the_database(tmp_path):
    write_sample_world(tmp_path / "world", num_users=20, num_items=24)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        for table in ("items", "interactions"):
            rows = pq.read_table(tmp_path / "world" / f"{table}.parquet")
            rows = pa.table({name: rows[name].cast(pa.string()) for name in ("item_id", "title", "user_id", "timestamp")
                             if name in rows.column_names})  # fmt: skip
            database.execute(f"CREATE TABLE {table} ({', '.join(rows.column_names)})")
            marks = ", ".join("?" * rows.num_columns)
            database.executemany(f"INSERT INTO {table} VALUES ({marks})", zip(*rows.to_pydict().values(), strict=True))
        database.commit()
    mapping = {
        "database": "shop.db",
        "items": {"query": "SELECT * FROM items", "id": "item_id", "title": "title"},
        "interactions": {"query": "SELECT * FROM interactions", "user_id": "user_id", "item_id": "item_id",
                         "timestamp": {"column": "timestamp", "unit": "iso"}},
    }  # fmt: skip
    import_mapped(ImportMapping.model_validate(mapping), tmp_path, tmp_path / "tables")
    (tmp_path / "laserbatch.yaml").write_text("workspace: workspace\ntables: {path: tables}\n")
    night = opened(tmp_path)
    recorded = night.manifest.origin.inputs["items"]
    assert (recorded["database"], recorded["num_rows"]) == ("shop.db", 24)
    assert recorded["query_sha256"] in render_page(night.manifest)
    (tmp_path / "shop.db").unlink()
    assert opened(tmp_path).run.run_id == night.run.run_id


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("instruction: |-\n  Describe it.\n  [%] And more.", r"mine\.yaml, line 8: instruction has \[%\], a control"),
        ('instruction: "It \\u2603"', r"mine\.yaml, line 6: instruction has ☃, a control token of the model"),
        ("instruction: A\nattributes: {labels: {mood: <think>}}", r"line 7: attributes\.labels\.mood has <think>, a"),
        ("instruction: A\nattributes: {labels: {<think>: a}}", r"line 7: attributes\.labels has <think>, a control"),
    ],
)
def test_control_tokens_of_the_model_itself_are_refused_in_templates_by_file_and_line(world, body, message):
    (world / "prompts").mkdir()
    head = "name: mine\nversion: 1\nframework: mine\nside: item\nparser: free\n"
    (world / "prompts" / "mine.yaml").write_text(head + body + "\n")
    shutil.copytree(SAMPLE_MODEL, world / "model")
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    tokenizer.add_tokens([AddedToken("☃", special=True), AddedToken("[%]"), AddedToken("<think>")])
    tokenizer.save_pretrained(world / "model")
    config = "workspace: workspace\ntables: {path: tables}\nknowledge: {template_dir: prompts, item_template: mine}\n"
    (world / "laserbatch.yaml").write_text(config + "decoding: {model: model}\n")
    with pytest.raises(ConfigError, match=message):
        opened(world)
    assert not (world / "workspace" / "runs").exists()


def test_control_tokens_in_words_are_refused_by_key(world):
    path = world / "laserbatch.yaml"
    path.write_text(path.read_text() + "knowledge: {words: {events: {view: 'saw <|end|>'}}}\n")
    with pytest.raises(ConfigError, match=r"knowledge\.words\.events\.view has <\|end\|>, a control token"):
        opened(world)


def test_a_run_does_not_go_on_with_other_embeddings(world):
    opened(world)
    opened(world)
    write_vectors(world, ["i1"], 0.25)
    with pytest.raises(WorkspaceError, match=r"started from other inputs \(item_embeddings changed since\)"):
        opened(world)


TEMPLATE = "name: mine\nversion: 1\nframework: kar\nside: item\nparser: free\ninstruction: Describe.\nattributes: "


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ("{columns: [title, categry]}", r"mine, attributes: the items table has no attribute 'categry'.*'category'\?$"),
        ("{exclude: [creatr]}", "'creatr'"),
        ("{labels: {eras: age}}", "'eras'"),
        ("{labels: {eras: age}, optional: [eras]}", None),
        ("{columns: [title, era]}", None),
    ],
)
def test_a_column_that_a_template_names_and_no_table_has_is_refused(world, attributes, message):
    (world / "mine.yaml").write_text(TEMPLATE + attributes)
    config = world / "mine.config.yaml"
    config.write_text((world / "laserbatch.yaml").read_text() + "knowledge: {item_template: mine, template_dir: .}\n")
    settings = load_settings(config)
    if message is None:
        assert check_inputs(settings.tables.path, settings) == []
        return
    with pytest.raises(ConfigError, match=message):
        check_inputs(settings.tables.path, settings)


def test_a_path_that_no_table_has_is_refused(world):
    path, settings = world / "tables", load_settings(world / "laserbatch.yaml")
    for paths, message in ((["category", "region"], None), (["categry"], "knowledge.paths.*'categry'.*'category'")):
        with_paths = settings.model_copy(update={"knowledge": settings.knowledge.model_copy(update={"paths": paths})})
        if message is None:
            assert check_inputs(path, with_paths) == []
            continue
        with pytest.raises(ConfigError, match=message):
            check_inputs(path, with_paths)


def test_a_night_says_the_warnings_and_opens(world, capsys):
    items = pq.read_table(world / "tables" / "items.parquet")
    titles = pa.array(["", None, *items["title"].to_pylist()[2:]])
    items = items.set_column(items.column_names.index("title"), "title", titles)
    pq.write_table(items, world / "tables" / "items.parquet")
    with pytest.raises(TableError, match=r"items\.title .* the title is empty"):
        opened(world)  # more than a 20th of the titles
    with (world / "laserbatch.yaml").open("a") as config:
        config.write("gates: {max_failed_share: 0.1}\n")
    log = pq.read_table(world / "tables" / "interactions.parquet")
    pq.write_table(pa.concat_tables([log.slice(0, 2), log]), world / "tables" / "interactions.parquet")
    assert opened(world).manifest.origin.inputs["interactions"]["num_copies"] == 2
    assert "warning: items.title (items.parquet, 2 rows, first row 0): the title is empty" in capsys.readouterr().err


def test_wrong_embeddings_fail_before_anything_is_written(world):
    write_vectors(world, ["a", "b"], np.nan)
    with pytest.raises(PoolError, match=r"routing.item_embeddings: .*item.parquet, column vector, row 0"):
        opened(world)
    assert not (world / "workspace").exists()


def test_what_is_known_has_one_checksum_however_it_was_read():
    """Unused dictionary values, chunks and empty selections do not change the checksum."""
    whole = pa.table({"user_id": pa.array(["a", "b", "c"]).dictionary_encode(), "rating": [1.0, 2.0, 3.0]})
    rest = whole.filter(pa.array([True, False, True]))
    alone = pa.table({"user_id": pa.array(["a", "c"]).dictionary_encode(), "rating": [1.0, 3.0]})
    assert _content_sha256(rest) == _content_sha256(alone) != _content_sha256(whole)
    assert _content_sha256(pa.concat_tables([whole[:1], whole[1:]])) == _content_sha256(whole)
    assert _content_sha256(whole.filter(pa.array([False] * 3))) == _content_sha256(alone[:0])


def test_a_date_before_all_that_interactions_are_about_opens(world):
    """Entities that were created after all of their interactions."""
    for side in ("user", "item"):
        path = world / f"tables/{side}s.parquet"
        table = pq.read_table(path)
        place = table.column_names.index("created_at")
        times = pa.array([datetime.datetime(2030, 1, 1)] * (table.num_rows - 1) + [None], table.schema.types[place])
        pq.write_table(table.set_column(place, "created_at", times), path)
    ids = {
        side: pq.read_table(world / f"tables/{side}s.parquet")[f"{side}_id"][-1].as_py() for side in ("user", "item")
    }
    path = world / "tables/interactions.parquet"
    table = pq.read_table(path)
    pq.write_table(table.filter(pc.not_equal(table["user_id"], ids["user"])), path)
    assert opened(world).tables.interactions.num_rows == 0


@pytest.mark.parametrize(
    ("ages", "message"),
    [
        ([2, 3, 4, 5], None),
        ([3, 4, 5, 9], "3 days before; days with interactions are usually 1 day apart"),
        ([14, 21, 28], None),
        ([15, 22, 29], "15 days before; days with interactions are usually 7 days apart"),
        ([1500, 1501, 1502], "1,500 days before"),
        ([700], None),  # too few days to know the usual gap
        ([], None),
    ],
)
def test_a_log_whose_newest_interaction_is_older_than_twice_the_usual_gap_is_said(ages, message):
    moments = [datetime.datetime(2025, 3, 1, 23, 59) - datetime.timedelta(days=age) for age in ages for _ in range(2)]
    times = pa.chunked_array([moments[:3], [*moments[3:], None]], pa.timestamp("us", "UTC"))
    age = log_age(times, DATE)
    assert (age is not None and age.is_stale) == (message is not None) and (message or "") in str(age)


def test_a_night_says_that_the_log_has_stopped_and_opens(world, capsys):
    newest = pc.max(pq.read_table(world / "tables" / "interactions.parquet")["timestamp"]).as_py().date()
    assert open_night(load_settings(world / "laserbatch.yaml"), newest).date == newest
    assert "the newest interaction" not in capsys.readouterr().err
    late = newest + datetime.timedelta(days=205)
    night = open_night(load_settings(world / "laserbatch.yaml"), late)
    output = capsys.readouterr().err
    assert night.manifest.origin.inputs["interactions"]["age"]["age_days"] == 205
    with recorded(night.manifest):
        events = read_events(night.run.events_path)
    assert events[-1] | {"newest": str(newest), "age_days": 205, "is_stale": True} == events[-1]
    assert f"WARNING: {world}/tables: the newest interaction known on {late} is from {newest}, 205 days" in output
