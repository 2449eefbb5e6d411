"""What is said of columns that changed between two nights' prompts."""

import json

import pytest

from laserbatch.pipeline.knowledge.templates import AttributeLines
from laserbatch.pipeline.planning.column_changes import ANOTHER_ORDER, attributes_of, changed_columns, changed_items


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"a": "1"}, {"a": "1", "b": "2"}, {"b": "is new"}),
        ({"a": "1", "b": "2"}, {"a": "1"}, {"b": "is gone"}),
        ({"genre": "War"}, {"GENRE": "War"}, {"GENRE": "was called genre"}),
        ({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, {"b": "is gone", "c": "is new"}),
        ({"a": "Oslo"}, {"a": "Rome"}, {"a": "has other values"}),
        ({"a": "9.87654e+07"}, {"a": "98765400"}, {"a": "has the same values, written differently"}),
        ({"a": "yes"}, {"a": "True"}, {"a": "has the same values, written differently"}),
        ({"a": "War > Film"}, {"a": "Film, War"}, {"a": "has the same values, written differently"}),
        ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {ANOTHER_ORDER: "stand in another order"}),
        ({"a": "1"}, {"a": "1"}, {}),
    ],
)
def test_it_is_said_what_became_of_a_column(before, now, expected):
    found = changed_columns([(before, now)] * 3)
    assert found == {name: (what, 3) for name, what in expected.items()}


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


def test_histories_are_compared_by_the_items_that_both_show():
    before = json.dumps([["Ran", "war", "5"], ["Heat", "crime", "1"]])
    newer, other = json.dumps([["Heat", "crime", "2"], ["Big", "x", "1"]]), json.dumps([["Heat", "crime | new", "1"]])
    assert changed_items([(before, newer), (before, None), (None, newer)]) == 0
    assert changed_items([(before, other), (before, newer)]) == 1
