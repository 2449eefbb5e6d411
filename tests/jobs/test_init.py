"""`laserbatch init`: what it guesses of a stranger's tables, and what it says of the bundled model."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from laserbatch.jobs.commands.init import init
from laserbatch.jobs.settings import Settings, load_settings
from laserbatch.jobs.stages.inputs import needs_a_model
from laserbatch.pipeline.knowledge.histories import labels_of
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.tables.mapping import import_mapped, load_mapping
from laserbatch.pipeline.tables.read import read_tables


@pytest.fixture
def job_board(tmp_path):
    """Exports of a job board: integer ids, clicks of 0 and 1, times in milliseconds."""
    folder = tmp_path / "exports"
    folder.mkdir()
    pq.write_table(pa.table({"member_id": [7, 8], "city": ["Oslo", "Rome"]}), folder / "members.parquet")
    pq.write_table(pa.table({"job_id": [1, 2], "title": ["Cook", "Nurse"]}), folder / "jobs.parquet")
    clicks = {"member_id": [7, 8], "job_id": [2, 1], "clicked_at": [1_740_000_000_000] * 2, "clicked": [0, 1]}
    pq.write_table(pa.table(clicks), folder / "clicks.parquet")
    return folder


def run_init(capsys, tables, out) -> dict:
    init(tables=tables, out=out, overwrite=False, as_json=True)
    return json.loads(capsys.readouterr().out)


def test_a_job_board_is_guessed_with_its_types_and_clicks(job_board, tmp_path, capsys):
    said = run_init(capsys, job_board, tmp_path / "night.yaml")
    assert "decoding.model" in said["model"]
    mapping = yaml.safe_load((tmp_path / "mapping.yaml").read_text())
    assert mapping["items"]["id"] == "job_id"
    events = mapping["interactions"]
    assert events["timestamp"] == {"column": "clicked_at", "unit": "ms"} and events["rating"] == "clicked"
    settings = load_settings(tmp_path / "night.yaml")
    assert settings.ctr.label == "rating >= 1"
    words = settings.knowledge.words
    assert (words.user, words.item, words.items, words.collection) == ("applicant", "job", "jobs", "job board")
    assert "Seniority" in settings.knowledge.user_factors and "employer" in settings.knowledge.item_factors
    assert "    item: job  # guessed\n" in (tmp_path / "night.yaml").read_text()


def test_events_of_text_are_guessed_and_the_strongest_is_the_positive(tmp_path, capsys):
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "recipes.csv").write_text('recipe_id,name\n1,"Soup\nof peas"\n2,Bread\n')
    (folder / "log.csv").write_text("user_id,recipe_id,ts,event_type\n7,1,1740000000,view\n7,2,1740000001,save\n")
    (note,) = run_init(capsys, folder, tmp_path / "night.yaml")["notes"]
    assert "1 quoted field over several lines, first in column name, row 0" in note
    settings = load_settings(tmp_path / "night.yaml")
    assert settings.ctr.label == "event == 'save'"
    assert settings.knowledge.words.events == {"save": "saved", "view": "viewed"}  # a person may correct them
    assert (settings.knowledge.words.item, settings.knowledge.words.items) == ("recipe", "recipes")
    import_mapped(load_mapping(tmp_path / "mapping.yaml"), folder, tmp_path / "tables")
    tables = read_tables(tmp_path / "tables").interactions
    assert tables["event"].to_pylist() == ["view", "save"]
    assert labels_of(tables, {}).interacted == "saved or viewed"


@pytest.mark.parametrize(
    ("columns", "label"),
    [({}, "all"), ({"event": ["play", "play"]}, "all"), ({"event": ["view", "cart"]}, "event == 'cart'"),
     ({"event": ["auf", "ab"]}, "all"), ({"rating": [1, 1]}, "all"), ({"rating": [0, 1]}, "rating >= 1"),
     ({"rating": [3, 5], "event": ["view", "buy"]}, "rating >= 4")],
)  # fmt: skip
def test_what_is_positive_is_guessed_of_tables_in_the_schema(tmp_path, capsys, columns, label):
    folder = tmp_path / "tables"
    folder.mkdir()
    pq.write_table(pa.table({"user_id": [7]}), folder / "users.parquet")
    items = {"item_id": [1], "title": ["Blue"], "artist": ["Ay"]}
    pq.write_table(pa.table(items), folder / "items.parquet")
    events = {"user_id": [7, 7], "item_id": [1, 1], "timestamp": [1_740_000_000, 1_740_000_001]} | columns
    pq.write_table(pa.table(events), folder / "interactions.parquet")
    assert run_init(capsys, str(folder), tmp_path / "night.yaml")["num_faults"] == 0
    settings = load_settings(tmp_path / "night.yaml")
    assert settings.ctr.label == label
    assert settings.knowledge.words.user == "listener"  # by the column `artist`


def test_the_sample_world_is_asked_about_in_its_own_words(tmp_path, capsys):
    write_sample_world(tmp_path / "tables", num_users=20, num_items=20)
    run_init(capsys, str(tmp_path / "tables"), tmp_path / "night.yaml")
    knowledge = load_settings(tmp_path / "night.yaml").knowledge
    assert [knowledge.template(side) for side in SIDES] == [Settings().asked.template(side) for side in SIDES]


def test_german_names_semicolons_and_another_encoding_are_guessed(tmp_path, capsys):
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "kunden.csv").write_text("kunde;ort\nk1;Köln\n", encoding="cp1252")
    (folder / "artikel.csv").write_text("artikel_nr;bezeichnung\na1;Tee, grün\n", encoding="utf-8")
    (folder / "käufe.csv").write_text("kunde;artikel_nr;zeitstempel;bewertung\nk1;a1;01.03.2025 08:30;5\n")
    run_init(capsys, folder, tmp_path / "night.yaml")
    import_mapped(load_mapping(tmp_path / "mapping.yaml"), folder, tmp_path / "tables")
    tables = read_tables(tmp_path / "tables")
    assert tables.users.to_pylist() == [{"user_id": "k1", "ort": "Köln"}]
    assert tables.items["title"].to_pylist() == ["Tee, grün"]
    assert str(tables.interactions["timestamp"][0].as_py()) == "2025-03-01 08:30:00+00:00"
    assert tables.interactions["rating"].to_pylist() == [5.0]


def test_a_csv_with_a_header_alone_is_passed_over(job_board, tmp_path, capsys):
    (job_board / "users.csv").write_text("user_id,title\n")
    run_init(capsys, job_board, tmp_path / "night.yaml")
    assert "users.csv" not in (tmp_path / "mapping.yaml").read_text()


def test_the_bundled_model_knows_the_sample_world_alone(tmp_path, capsys):
    write_sample_world(tmp_path / "tables", num_users=5, num_items=20)
    said = run_init(capsys, tmp_path / "tables", tmp_path / "night.yaml")
    assert "model" not in said and said["next"].startswith("laserbatch try")
    items = pq.read_table(tmp_path / "tables" / "items.parquet")
    pq.write_table(items.rename_columns([*items.column_names[:-1], "posted"]), tmp_path / "tables" / "items.parquet")
    said = run_init(capsys, tmp_path / "tables", tmp_path / "other.yaml")
    assert "safetensors" in said["model"]
    tables = {"path": tmp_path / "tables"}
    assert needs_a_model(Settings(tables=tables))
    assert not needs_a_model(Settings(tables=tables, decoding={"model": "qwen"}))
