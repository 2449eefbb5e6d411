"""The input of the whole-night benchmark: the tables of each night, and the record of a run."""

import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from real_input import (
    NIGHTS,
    SETTINGS,
    date_after_share,
    describe,
    keep_part,
    most_frequent,
    record_of,
    write_config,
    write_goodreads,
)

from laserbatch.jobs.settings import load_settings
from laserbatch.pipeline.knowledge.templates import load_template


def test_the_second_night_brings_half_of_the_books_and_each_readers_last_one(tmp_path):
    (tmp_path / "goodreads").mkdir()
    histories = [["a", "b", "a", "x"], ["b", "a", "c", "y"], ["a", "b", "z"], ["c", "x"]]
    users = {"user_id": ["1", "2", "3", "4"], "history": histories}
    items = {"item_id": list("abcxyz"), "title": [f"Book {name}" for name in "abcxyz"]}
    for name, columns in (("users", users), ("items", items)):
        pq.write_table(pa.table(columns), tmp_path / "goodreads" / f"{name}.parquet")
    write_goodreads(tmp_path, tmp_path / "tables", num_items=4, num_users=2)
    read = {name: pq.read_table(tmp_path / "tables" / f"{name}.parquet") for name in ("users", "items", "interactions")}
    assert read["users"]["user_id"].to_pylist() == ["1", "2"]
    assert read["items"]["item_id"].to_pylist() == ["a", "b", "x", "y"]  # two of each night
    days = [time.date() for time in read["items"]["created_at"].to_pylist()]
    assert all(day < NIGHTS[0] for day in days[:2]) and days[2:] == [NIGHTS[1]] * 2
    rows = [(row["user_id"], row["item_id"], row["timestamp"].date()) for row in read["interactions"].to_pylist()]
    before = NIGHTS[0] - datetime.timedelta(days=1)
    assert rows == [
        ("1", "a", before), ("1", "b", NIGHTS[0]), ("2", "b", before), ("2", "a", NIGHTS[0]),
        ("1", "x", NIGHTS[1]), ("2", "y", NIGHTS[1]),
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="2 readers of 2 books among 4, not 3"):
        write_goodreads(tmp_path, tmp_path / "more", num_items=4, num_users=3)


def test_tables_are_cut_to_the_most_active_and_to_a_date_inside(tmp_path):
    times = [datetime.datetime(2025, 1, day, tzinfo=datetime.UTC) for day in range(1, 6)]
    interactions = {"user_id": [1, 1, 2, 1, 3], "item_id": ["a", "b", "a", "c", "a"], "timestamp": times}
    tables = {"users": {"user_id": [1, 2, 3]}, "items": {"item_id": list("abc")}, "interactions": interactions}
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    assert date_after_share(tmp_path, 0.6) == datetime.date(2025, 1, 4)
    keep_part(tmp_path, num_users=2, num_items=1)
    assert pq.read_table(tmp_path / "users.parquet").to_pydict() == {"user_id": [1, 2]}
    assert pq.read_table(tmp_path / "interactions.parquet")["item_id"].to_pylist() == ["a", "a"]
    assert most_frequent("bbaac", 2) == ["a", "b"]


@pytest.mark.parametrize("name", sorted(path.stem for path in SETTINGS.glob("*.yaml")))
def test_settings_have_options_and_templates_that_there_are(name, tmp_path):
    knowledge = load_settings(write_config(name, tmp_path, tmp_path)).knowledge
    for template in (knowledge.user_template, knowledge.item_template):
        assert load_template(template, knowledge.template_dir).name == template


def test_a_record_says_what_was_written_and_how_fast():
    stats = {"num_texts": 2, "num_steps": 10, "num_tokens": 30, "num_accepted": 20, "wall_s": 3.0}
    side = {"num_entities": 3, "num_generated": 2, "num_carried_over": 1, "num_quarantined": 0, "routes": {}}
    side |= {"quarantine_reasons": {}, "stats": stats | {"accepted_by_source": {}, "finish_reasons": {}}}
    manifest = {"sides": {"user": side}, "stages": {"generate": 4.0}, "pools_built": 1}
    record = record_of(manifest) | {"date": "2025-03-01", "wall_s": 9.0}
    of_users = record["sides"]["user"]
    assert (of_users["tokens_per_text"], of_users["tokens_per_step"], of_users["tokens_per_s"]) == (15.0, 3.0, 10.0)
    description = describe({"input": "goodreads", "nights": [record]})
    assert "user: 2 written, 1 carried over" in description and "10 tokens/s, 3.00 tokens/step" in description
    assert "CTR: not trained" in description
