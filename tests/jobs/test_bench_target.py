"""ONCE's user task, written by a small real model that was trained on lists of interests, for books of real readers."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from night_world import run_here, write_config, write_here

from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages import publishing
from laserbatch.jobs.stages.night import open_run
from laserbatch.pipeline.storage.parquet import read_parquet

NUM_READERS, NUM_BOOKS = 6, 3  # fewer readers than FIRST_TEXTS; books of each reader
FINISHED = {  # the form of answers that the model was trained on
    "name": "finished_user", "version": 1, "framework": "once", "side": "user", "parser": "json",
    "fields": {"interests": "list"}, "instruction": "{A_user} {interacted} these {items}:",
    "attributes": {"columns": []}, "history": {"line_unrated": "({number}) {title}", "none": "(none yet)"},
    "request": "List the {user}'s interests as JSON.",
}  # fmt: skip


@pytest.fixture(scope="module")
def readers(shared_data, tmp_path_factory):
    """Tables of a few readers and the books that they finished, from a data set outside the project."""
    folder, source = tmp_path_factory.mktemp("readers"), shared_data / "goodreads"
    users = pq.read_table(source / "users.parquet").slice(0, NUM_READERS).to_pylist()
    titles = dict(zip(*pq.read_table(source / "items.parquet", columns=["item_id", "title"]), strict=True))
    titles = {item.as_py(): title.as_py() for item, title in titles.items()}
    rows = [(user["user_id"], item, 86_400 * day) for user in users
            for day, item in enumerate(user["history"][-NUM_BOOKS:], 20_000)]  # fmt: skip
    items = sorted({item for _, item, _ in rows})
    (folder / "tables").mkdir()
    tables = {
        "users": {"user_id": [user["user_id"] for user in users]},
        "items": {"item_id": items, "title": [titles[item] for item in items]},
        "interactions": dict(zip(("user_id", "item_id", "timestamp"), map(list, zip(*rows, strict=True)), strict=True)),
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / "tables" / f"{name}.parquet")
    (folder / "prompts").mkdir()
    (folder / "prompts" / "finished_user.yaml").write_text(yaml.safe_dump(FINISHED))
    return folder


def night(readers, model, template, capfd, monkeypatch, guided="auto"):
    """The records and the quarantined rows of users, written with a template."""
    write_here(monkeypatch)
    words = {"user": "reader", "item": "book", "items": "books", "interacted": "finished"}
    knowledge = {"template_dir": "prompts", "user_template": template, "item_template": "once_item", "words": words}
    write_config(readers, workspace=template, knowledge=knowledge, night={"train_ctr": False, "num_audited": 0},
                 decoding={"model": str(model), "max_new_tokens": 128, "guided": guided},
                 gates={"max_failed_share": 1.0})  # fmt: skip
    monkeypatch.setattr(publishing, "judge", lambda measured, limits: [])  # gates would hold bad texts back
    config = readers / "laserbatch.yaml"
    assert run_here(capfd, "nightly", "--date", "2025-01-01", "--config", str(config)).returncode == 0
    run = open_run(load_settings(config), None).run
    return read_parquet(run.knowledge_folder("user")).to_pylist(), run.read_quarantine("user").to_pylist()


@pytest.mark.slow
def test_in_the_form_that_it_was_trained_on_every_list_of_interests_is_parsed(
    readers, shared_models, capfd, monkeypatch
):
    parsed, refused = night(readers, shared_models / "bench-target", "finished_user", capfd, monkeypatch)
    assert len(parsed) > NUM_READERS / 2 and len(parsed) + len(refused) == NUM_READERS
    # All answers are lists. In those of a few readers an interest repeats, which the form cannot forbid.
    assert {row["reason"].split(":")[0] for row in refused} <= {"loops"}
    assert all(json.loads(row["text"])["interests"] for row in refused)
    assert all(json.loads(row["fields_json"])["interests"].strip() for row in parsed)


@pytest.mark.slow
def test_in_our_wording_what_is_no_list_is_refused_by_kind(readers, shared_models, capfd, monkeypatch):
    parsed, refused = night(readers, shared_models / "bench-target", "once_user", capfd, monkeypatch, guided="off")
    assert len(parsed) + len(refused) == NUM_READERS
    # With this prompt the model often ends its answer at once, and invents another reader and an answer about that one.
    assert not any("A reader finished" in row["text"] for row in (*parsed, *refused)), "a turn was invented"
    reasons = Counter(row["reason"].split(":")[0] for row in refused)
    assert set(reasons) <= {"unparsable", "missing-field", "wrong-type", "wrong-language", "loops", "repeats-prompt"}
    assert sum(bool(row["text"]) for row in refused) > len(refused) / 2
