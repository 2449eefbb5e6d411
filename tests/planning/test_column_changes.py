"""Messages about columns that changed between the prompts of two nights."""

import json

import pytest

from laserbatch.pipeline.knowledge.templates import AttributeLines
from laserbatch.pipeline.planning.column_changes import (
    ANOTHER_ORDER,
    ITEM_ATTRIBUTES,
    attributes_of,
    changed_columns,
    changed_in_histories,
)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"a": "1"}, {"a": "1", "b": "2"}, {"b": "is new"}),
        ({"a": "1", "b": "2"}, {"a": "1"}, {"b": "is gone"}),
        ({"genre": "War"}, {"GENRE": "War"}, {"GENRE": "was called genre"}),
        ({"a": "1", "b": "1"}, {"c": "1"}, {"b": "is gone", "c": "was called a"}),
        ({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, {"b": "is gone", "c": "is new"}),
        ({"a": "Oslo"}, {"a": "Rome"}, {"a": "has other values"}),
        ({"a": "9.87654e+07"}, {"a": "98765400"}, {"a": "has the same values, written differently"}),
        ({"a": "yes"}, {"a": "True"}, {"a": "has the same values, written differently"}),
        ({"a": "War > Film"}, {"a": "Film, War"}, {"a": "has the same values, written differently"}),
        ({"a": "War|Film"}, {"a": "Film|War"}, {"a": "has the same values, written differently"}),
        ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {ANOTHER_ORDER: "are in another order"}),
        ({"a": "1"}, {"a": "1"}, {}),
    ],
)
def test_it_is_said_what_became_of_a_column(before, now, expected):
    changes = changed_columns([(before, now)] * 3)
    assert changes == {name: (what, 3) for name, what in expected.items()}


def test_the_most_frequent_change_comes_first_and_names_the_column():
    pairs = [({"a": "1", "b": "x"}, {"a": "1.0", "b": "x"}), ({"a": "1", "b": "x"}, {"a": "2", "b": "y"})]
    pairs += [({"a": "1"}, {"a": "3"})]
    assert changed_columns(pairs) == {"a": ("has other values", 3), "b": ("has other values", 1)}


def test_attributes_are_read_off_lines_by_the_template():
    lines = "- age: 25: or so\n- mood: calm"
    assert attributes_of(lines, AttributeLines(labels={"years": "age"})) == {"years": "25: or so", "mood": "calm"}
    quoted = AttributeLines(line='{{"{label}": "{value}"}} {label}')
    assert attributes_of('{"mood": "calm"} mood\nother', quoted) == {"mood": "calm"}
    assert attributes_of("calm", AttributeLines(line="{value}")) == attributes_of(None, AttributeLines()) == {}


def test_columns_of_items_are_named_that_histories_show_differently():
    def rated(events):
        return json.dumps([[*event, "5"] for event in events])

    def changes(before, now, **texts):
        pair = tuple(events if events is None else rated(events) for events in (before, now))
        columns = changed_in_histories([pair, pair], " | ", lambda titles: {title: texts for title in titles})
        return {name: num for name, (_, num) in columns.items()}

    before = [["Ran", "war | 1985"], ["Heat", "crime"]]
    assert changes(before, [["Heat", "crime"], ["Big", None]]) == changes(before, None) == changes(None, before) == {}
    assert changes(before, [["Ran", "war | 1986"]], genre="war", year="1986") == {"year": 2}
    assert changes(before, [["Heat", "crime | x | y"]], a="crime", tags="x | y") == {"tags": 2}
    assert changes(before, [["Ran", "war"]], genre="war") == {ITEM_ATTRIBUTES: 2}
    assert changes([["Ran", None]], [["Ran", "war"]], genre="war") == {"genre": 2}
