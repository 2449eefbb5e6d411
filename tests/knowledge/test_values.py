"""Values in prompts look the same for all storage types, and differ if the values differ."""

import datetime
import time
import unicodedata
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.pipeline.knowledge.questions import SideQuestions, shown_of_row
from laserbatch.pipeline.knowledge.templates import AttributeLines, KnowledgeSettings, PromptTemplate, load_template
from laserbatch.pipeline.knowledge.values import num_longer, number_text, value_text
from laserbatch.pipeline.tables.read import Tables

TEMPLATE = PromptTemplate.model_validate(
    {"name": "u", "version": 1, "framework": "f", "side": "user", "parser": "free", "instruction": "Explain.",
     "history": {"line": "{title}|{attributes}|{rating}"}}
).with_columns(["path"])  # fmt: skip
COLUMNS = TEMPLATE.attributes
NO_EVENTS = pa.table({name: pa.array([], pa.int64()) for name in ("user_id", "item_id", "timestamp")})


def texts_of(values: pa.Array, name: str = "x") -> list[str | None]:
    """The values of a column of users, as shown in prompts."""
    users = pa.table({"user_id": range(len(values)), name: values})
    tables = Tables(
        users, pa.table({"item_id": pa.array([], pa.int64()), "title": pa.array([], pa.string())}), NO_EVENTS
    )
    template = TEMPLATE.model_copy(update={"history": None})
    shown = SideQuestions(tables, "user", template, "").shown(np.arange(len(values))).to_pylist()
    return [lines and lines.removeprefix(f"- {name}: ") for lines in (shown_of_row(row).attributes for row in shown)]


def times(unit: str, zone: str | None = None) -> pa.Array:
    noon, midnight = datetime.datetime(2025, 3, 1, 12, 5), datetime.datetime(2025, 3, 2)
    return pa.array([noon, midnight], pa.timestamp(unit)).cast(pa.timestamp(unit, zone))


NUMBERS = ["98765432", "3", "0", None]
AS_STORED = [
    (pa.array([98765432, 3, 0, None], pa.int64()), NUMBERS),
    (pa.array([98765432, 3, 0, None], pa.uint32()), NUMBERS),
    (pa.array([98765432.0, 3.0, -0.0, None], pa.float64()), NUMBERS),
    (pa.array([98765432.0, 3.0, -0.0, float("nan")], pa.float32()), NUMBERS),
    (pa.array([Decimal("98765432"), Decimal("3"), Decimal("0"), None], pa.decimal128(12, 4)), NUMBERS),
    (pa.array([Decimal("98765432"), Decimal("3"), Decimal("0"), None], pa.decimal256(50, 2)), NUMBERS),
    (pa.array([0.1, 1e-9, 1e20, 2.5e-13, 1e300]), ["0.1", "0.000000001", "1" + "0" * 20, "2.5e-13", "1e+300"]),
    (pa.array([0.1, 16777217.5, 1 / 3], pa.float32()), ["0.1", "16777218", "0.33333334"]),
    (pa.array(np.array([0.1, 2.5], np.float16)), ["0.1", "2.5"]),
    (pa.array([Decimal("1.50"), Decimal("-0.05")], pa.decimal128(10, 2)), ["1.5", "-0.05"]),
    (pa.array([2**64 - 1, 2**53 + 1], pa.uint64()), ["18446744073709551615", "9007199254740993"]),
    (pa.array([float("inf"), float("-inf")]), ["inf", "-inf"]),
    (pa.array([2**63 - 1, -(2**63), None, 0], pa.timestamp("us")), [None, None, None, "1970-01-01"]),
    (pa.array([2**31 - 1, -719_162], pa.int32()).cast(pa.date32()), [None, "0001-01-01"]),
    (pa.array([True, False, None]), ["yes", "no", None]),
    *((times(unit), ["2025-03-01 12:05:00", "2025-03-02"]) for unit in ("s", "ms", "us", "ns")),
    (times("us", "Europe/Berlin"), ["2025-03-01 12:05:00", "2025-03-02"]),
    (pa.array([1_500_000_001], pa.timestamp("ns")), ["1970-01-01 00:00:01.500000001"]),
    (pa.array([datetime.date(2025, 3, 2)]), ["2025-03-02"]),
    (pa.array([datetime.date(2025, 3, 2)], pa.date64()), ["2025-03-02"]),
    (pa.array([datetime.time(8, 30)], pa.time64("us")), ["08:30:00"]),
    (pa.array([90_000, 1], pa.duration("ms")), ["90 seconds", "0.001 seconds"]),
    (pa.array(["", " \n", None, " a \t b ", "nan", "None"]), [None, None, None, "a b", "nan", "None"]),
    (pa.array(["1,234", "1.0"]), ["1,234", "1.0"]),
    (pa.array(["Ame\u0301lie"]), ["Amélie"]),
]  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), AS_STORED, ids=lambda part: str(getattr(part, "type", "")))
def test_a_value_reads_alike_whatever_it_is_stored_as(values, expected):
    assert texts_of(values) == expected


def test_a_list_is_a_set_unless_it_is_said_to_be_a_path():
    lists = [["Drama", "Comedy", "Drama"], ["Comedy", " Drama "], [], [""], None, ["Crime, War", "Film"], ['"A', "b"]]
    expected = ["Comedy, Drama", "Comedy, Drama", None, None, None, '"Crime, War", Film', '"\\"A", b']
    assert texts_of(pa.array(lists)) == expected
    assert texts_of(pa.array([*lists, ["a", None], ["a\x1f"]]))[:7] == expected  # now formatted row by row
    paths = [["Books", "Poetry", "Books"], ["Poetry", "Books"], ["A > B", "C"]]
    assert texts_of(pa.array(paths), "path") == ["Books > Poetry > Books", "Poetry > Books", '"A > B" > C']


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["Comedy", "Am\\u00e9lie"]', "Amélie, Comedy"),
        ("['Drama', 'Comedy']", "Comedy, Drama"),
        ("{'Drama', \"Don't\"}", "Don't, Drama"),
        ("('Drama',)", "Drama"),
        ("[REC]", "[REC]"),
        ("[]", "[]"),
        ("[1408]", "[1408]"),
        ("['Drama' 'Comedy']", "['Drama' 'Comedy']"),
        ("{'Drama': 'Comedy'}", "{'Drama': 'Comedy'}"),
        ("Drama|Comedy", "Drama|Comedy"),
    ],
)
def test_a_list_that_was_exported_as_a_text_reads_like_one(text, expected):
    assert texts_of(pa.array([text])) == [expected]


PARTS = st.lists(st.text(alphabet='a, ">\\', min_size=1, max_size=5), max_size=3)


@given(st.floats(), st.floats(), PARTS, PARTS, st.sampled_from(["x", "path"]))
def test_another_value_has_another_text(number, other, parts, others, name):
    assert (number_text(number) == number_text(other)) == (number == other or (number != number and other != other))
    assert float(number_text(number)) == number or number != number
    with np.errstate(over="ignore"):
        narrow = np.array([number, other], np.float64).astype(np.float32)
    assert np.isnan(narrow).any() or (number_text(narrow[0]) == number_text(narrow[1])) == (narrow[0] == narrow[1])
    plain = [[text for part in value if (text := " ".join(part.split()))] for value in (parts, others)]
    is_same = plain[0] == plain[1] if name == "path" else set(plain[0]) == set(plain[1])
    assert (value_text(parts, COLUMNS, name) == value_text(others, COLUMNS, name)) == is_same


def test_histories_show_items_and_ratings_by_the_same_rules():
    items = pa.table(
        {"item_id": [1, 2], "title": ["Amé", "Ran"], "genres": [["b", "a"], None], "price": [98765001.0, 2]}
    )
    events = {
        "user_id": [7, 7],
        "item_id": [1, 2],
        "timestamp": [1, 2],
        "rating": pa.array([4.1, 1234567], pa.float32()),
    }
    tables = Tables(pa.table({"user_id": [7]}), items, pa.table(events))
    questions = SideQuestions(tables, "user", TEMPLATE, "")
    (row,) = questions.shown(np.array([0])).to_pylist()
    assert questions.item_texts(["Ran", "Amé"]) == {
        "Ran": {"price": "2"},
        "Amé": {"genres": "a, b", "price": "98765001"},
    }
    assert shown_of_row(row).events == [("Amé", "a, b | 98765001", "4.1"), ("Ran", "2", "1234567")]


def test_a_yes_or_no_of_an_item_has_its_column_s_name_in_histories_however_it_is_stored():
    items = {"item_id": [1, 2], "title": ["A", "B"], "kind": ["no", "sea"], "new": [True, None], "sold": ["False", ""]}
    events = {"user_id": [7, 7], "item_id": [1, 2], "timestamp": [1, 2], "rating": [4, 5]}
    tables = Tables(pa.table({"user_id": [7]}), pa.table(items), pa.table(events))
    questions = SideQuestions(tables, "user", TEMPLATE, "")
    (row,) = questions.shown(np.array([0])).to_pylist()
    assert shown_of_row(row).events == [("A", "kind: no | new: yes | sold: False", "4"), ("B", "sea", "5")]
    assert questions.item_texts(["A"]) == {"A": {"kind": "kind: no", "new": "new: yes", "sold": "sold: False"}}


def test_a_change_behind_the_cut_changes_no_prompt():
    first, second = (value_text("x" * 300 + end, AttributeLines(max_value_chars=100), "x") for end in "ab")
    assert first == second and len(first) == 100


@pytest.mark.parametrize("as_stored", ["{}", ["{}"], "['{}']"], ids=("text", "list", "listed"))
def test_a_value_of_very_many_combining_marks_is_not_normalised_whole(as_stored):
    start_s, value = time.process_time(), "e\u0301" * 90 + " " + "\u0301\u0323" * 100_000
    value = [value] if isinstance(as_stored, list) else as_stored.format(value)
    text = value_text(value, AttributeLines(max_value_chars=100), "x")
    assert time.process_time() - start_s < 2  # the whole takes 40 seconds
    assert text and len(text) == 100 and text.startswith("é" * 90 + " ") and unicodedata.is_normalized("NFC", text)


def test_the_attributes_of_many_rows_may_have_more_than_two_gib():
    users = pa.table({"user_id": [1, 2], "x": ["a", None]})
    questions = SideQuestions(Tables(users, users, NO_EVENTS), "user", TEMPLATE, "")
    lines = questions._attribute_lines(users)  # a smaller type cannot hold those of 64,000 rows with 1,500 columns
    assert lines.to_pylist() == ["- x: a", None] and lines.type == pa.large_string()


def test_paths_of_the_configuration_reach_both_blocks_and_change_no_fingerprint_of_the_template():
    plain, template = load_template("kar_user"), KnowledgeSettings(paths=["category"]).template("user")
    assert template.attributes.paths == template.history.paths == ("category",)
    assert template.model_dump() == KnowledgeSettings().template("user").model_dump() != plain.model_dump()


def test_values_that_are_cut_are_counted_in_one_line():
    texts = pa.chunked_array([["a  " * 4, None, "x" * 9, " \n " + "x" * 8, ""]])
    assert num_longer(texts, 8) == 1 and num_longer(pa.chunked_array([[10**9]]), 8) == 0
    for kind in (pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(pa.string(), 2)):
        lists = pa.array([["aaaaa", "bbbbb"], ["a", "b"], None], kind)
        assert num_longer(pa.chunked_array([lists]), 8) == 1
