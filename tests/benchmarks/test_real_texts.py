"""Real texts for CTR models: tables of public book lists, in which each list's last book comes after the date."""

import datetime

import pytest
from common import DEFAULT_DATA
from real_texts import AS_OF, goodreads

FOLDER = DEFAULT_DATA / "goodreads"


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is not there")
def test_the_last_book_of_each_reader_is_to_be_predicted_and_the_first_ones_are_not():
    tables, texts = goodreads(FOLDER, 50)
    log = tables.interactions.to_pylist()
    after = {event["user_id"] for event in log if event["timestamp"].date() > AS_OF}
    assert after == set(tables.users["user_id"].to_pylist())
    before = [event for event in log if event["timestamp"].date() <= AS_OF]
    assert len(before) > len(log) / 2
    assert max(event["timestamp"] for event in log).date() <= AS_OF + datetime.timedelta(13)
    assert set(texts) < set(tables.items["item_id"].to_pylist())
