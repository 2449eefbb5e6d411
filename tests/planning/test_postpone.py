"""Entities that failed with the same prompt stay in quarantine, and are retried after some days."""

import datetime

import numpy as np
import pyarrow as pa

from laserbatch.pipeline.planning import postpone
from laserbatch.pipeline.planning.postpone import DAYS_BETWEEN_TRIES, still_failing, unusable_texts
from laserbatch.pipeline.storage.parquet import write_parquet
from laserbatch.pipeline.storage.quarantine import QuarantineRow, quarantine_table
from laserbatch.pipeline.storage.run_folder import RunFolder

DATE = datetime.date(2025, 3, 1)


def quarantined(tmp_path, rows: list[QuarantineRow], kind: pa.DataType) -> RunFolder:
    run = RunFolder(tmp_path)
    write_parquet(quarantine_table(rows, kind), run.quarantine_path("user"))
    return run


def test_what_failed_without_a_text_is_always_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(postpone, "DAYS_BETWEEN_TRIES", 1 << 40)
    rows = [
        QuarantineRow.of(1, "user", "unparsable: no", "f1", "text"),
        QuarantineRow.of(2, "user", "abandoned: a worker died", "f2"),
        QuarantineRow.of(3, "user", "untitled: no title"),
        QuarantineRow.of(4, "user", "unparsable: the text is empty", "f4", ""),
        QuarantineRow.of(5, "user", "unparsable: the text is empty", "f5", " \n"),
    ]
    run = quarantined(tmp_path, rows, pa.int64())
    assert unusable_texts(run.read_quarantine("user"), DATE)["entity_id"].to_pylist() == [1]
    assert unusable_texts(RunFolder(tmp_path / "other").read_quarantine("user"), DATE).num_rows == 0
    assert unusable_texts(None, DATE) is None


def test_a_text_is_tried_again_once_a_week_and_not_all_on_one_night(tmp_path):
    rows = [QuarantineRow.of(f"user \ud800 {n}", "user", "loops: it did", "f", "text") for n in range(70)]
    quarantine = quarantined(tmp_path, rows, pa.string()).read_quarantine("user")
    days = [DATE + datetime.timedelta(days) for days in range(DAYS_BETWEEN_TRIES)]
    left = [unusable_texts(quarantine, day).num_rows for day in days]
    assert sum(70 - n for n in left) == 70 and min(left) > 45


def test_only_the_same_question_of_the_same_entity_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(postpone, "DAYS_BETWEEN_TRIES", 1 << 40)
    rows = [QuarantineRow.of(n, "user", "unparsable: no", f"f{n}", "text") for n in (5, 3)]
    unusable = unusable_texts(quarantined(tmp_path, rows, pa.int64()).read_quarantine("user"), DATE)
    is_failing = still_failing(unusable, pa.array([1, 3, 5, 7]), pa.array(["f3", "f3", "other", "f5"]))
    ids = [None if row < 0 else unusable["entity_id"][row].as_py() for row in is_failing.tolist()]
    assert ids == [None, 3, None, None]
    assert (still_failing(unusable, pa.array(["3"]), pa.array(["f3"])) == np.array([-1])).all()  # another type
