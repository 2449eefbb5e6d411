"""Attribute groups: split by the next attribute, merged into the parent, found by longest prefix."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing.attributes import AttributeGroups, choose_columns, split_groups, tokens_of


def _books(rows):
    """(category path, era, count) to a table of items."""
    paths = [path for path, _, count in rows for _ in range(count)]
    eras = [era for _, era, count in rows for _ in range(count)]
    return pa.table({
        "item_id": pa.array([f"i{n}" for n in range(len(paths))]),
        "title": pa.array([f"Book {n}" for n in range(len(paths))]),
        "category": pa.array(paths, pa.list_(pa.string())),
        "era": pa.array(eras, pa.string()),
    })  # fmt: skip


BOOKS = _books([
    (["Mystery", "Harbour"], "1920s", 30),
    (["Mystery", "Harbour"], "1950s", 25),
    (["Mystery", "Manor"], "1920s", 20),
    (["Mystery", "Train"], "1920s", 3),
    (["Romance", "Harbour"], "1950s", 40),
    (["Cookery"], "1950s", 2),
    (None, None, 4),
])  # fmt: skip


def _fit(entities, names, max_size, min_size):
    return AttributeGroups.fit(entities, choose_columns(entities, names), max_size, min_size)


@pytest.fixture(scope="module")
def books():
    return _fit(BOOKS, ["category", "era"], max_size=40, min_size=10)


def test_large_groups_are_split_and_small_ones_stay_with_their_parent(books):
    assert books.num_entities == {
        (): 6,  # Cookery is too small, and the others have no category
        ("Mystery",): 3,  # books about trains
        ("Mystery", "Harbour"): 0,
        ("Mystery", "Harbour", "era=1920s"): 30,
        ("Mystery", "Harbour", "era=1950s"): 25,
        ("Mystery", "Manor"): 20,
        ("Romance",): 40,
    }
    assert "attribute/Mystery/Harbour/era=1920s" in books.groups


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        ({"category": ["Mystery", "Harbour"], "era": "1920s"}, "attribute/Mystery/Harbour/era=1920s"),
        ({"category": ["Mystery", "Harbour"], "era": "2090s"}, "attribute/Mystery/Harbour"),
        ({"category": ["Mystery", "Harbour"], "era": None}, "attribute/Mystery/Harbour"),
        ({"category": ["Mystery", "Harbour"]}, "attribute/Mystery/Harbour"),
        ({"category": ["Mystery", "Harbour", "Deeper"], "era": "1920s"}, "attribute/Mystery/Harbour"),
        ({"category": ["Mystery", "Spaceship"], "era": "1920s"}, "attribute/Mystery"),
        ({"category": ["Mystery", None, "Harbour"], "era": "1920s"}, "attribute/Mystery"),
        ({"category": ["Mystery", ""], "era": "1920s"}, "attribute/Mystery"),
        ({"category": ["Mystery"], "era": ""}, "attribute/Mystery"),
        ({"category": "Mystery"}, "attribute/Mystery"),
        ({"category": ["Cookery"], "era": "1950s"}, "attribute"),
        ({"category": ["Unheard of"], "era": "1920s"}, "attribute"),
        ({"category": [], "era": "1920s"}, "attribute"),
        ({"category": 17, "era": {"odd": 1}}, "attribute"),
        ({"category": None, "era": None}, "attribute"),
        ({}, "attribute"),
    ],
)
def test_longest_known_prefix_decides(books, attributes, group):
    assert books.group_of(attributes) == group


def test_values_that_changed_their_type_fall_back(books):
    changed = pa.table({"category": pa.array([[1.5], [2.5]]), "era": pa.array([1920, 1950])})
    assert [books.group_of(row) for row in changed.to_pylist()] == ["attribute", "attribute"]


def test_the_same_table_in_other_arrow_types_and_chunks_gives_the_same_groups(books):
    other = BOOKS.set_column(2, "category", BOOKS["category"].cast(pa.large_list(pa.large_string())))
    other = other.set_column(3, "era", BOOKS["era"].dictionary_encode())
    chunked = pa.concat_tables([other.slice(0, 50), other.slice(50, 7), other.slice(57)])
    assert _fit(chunked, ["category", "era"], max_size=40, min_size=10) == books
    rows = zip(BOOKS.to_pylist(), chunked.to_pylist(), strict=True)
    assert all(books.group_of(row) == books.group_of(same) for row, same in rows)


def test_one_group_when_nothing_is_too_large():
    groups = _fit(BOOKS, None, max_size=1000, min_size=1)
    assert groups.groups == ["attribute"]


def test_no_entities_and_no_attributes_still_give_the_root():
    groups = _fit(BOOKS.slice(0, 0), None, 10, 1)
    assert groups.group_of({"category": ["Mystery"]}) == "attribute"
    titles_only = _fit(BOOKS.select(["item_id", "title"]), None, 10, 1)
    assert titles_only.columns == ()
    assert titles_only.num_entities == {(): BOOKS.num_rows}


def test_numbers_are_binned_by_quantiles_of_the_fit():
    ages = pa.table({"user_id": range(100), "age": pa.array([*range(18, 68), *range(18, 66), None, float("nan")])})
    groups = _fit(ages, ["age"], max_size=10, min_size=1)
    (column,) = groups.columns
    assert column.kind == "number"
    assert len(column.edges) == 3
    low, _, high = column.edges
    assert groups.group_of({"age": 3}) == f"attribute/age=..{low:g}"
    assert groups.group_of({"age": low}) != f"attribute/age=..{low:g}"
    assert groups.group_of({"age": 1e9}) == f"attribute/age={high:g}.."
    for nothing in (None, float("nan"), float("inf"), "43", True):
        assert groups.group_of({"age": nothing}) == "attribute"
    assert groups.num_entities[()] == 2


def test_a_constant_number_is_one_bin():
    (column,) = choose_columns(pa.table({"age": [30] * 20}), ["age"])
    assert column.edges == ()
    assert column.tokens(30) == column.tokens(99) == ("age=..",)


def test_slashes_and_equal_signs_in_values_stay_readable_and_distinct():
    table = pa.table({"category": pa.array([["Sci/Fi"], ["Sci", "Fi"], ["era=1920s"], ["50%"]] * 5)})
    groups = _fit(table, ["category"], 1, 1)
    assert groups.group_of({"category": ["Sci/Fi"]}) == "attribute/Sci%2FFi"
    assert groups.group_of({"category": ["Sci", "Fi"]}) == "attribute/Sci/Fi"
    assert groups.group_of({"category": ["era=1920s"]}) == "attribute/era%3D1920s"
    assert len(set(groups.groups)) == len(groups.groups)


def test_guess_takes_paths_then_text_of_few_values_then_numbers_and_no_ids_titles_or_vectors():
    num_rows = 200
    region = [n % 3 for n in range(num_rows)]
    table = pa.table({
        "age": pa.array([n * 37 % 61 for n in range(num_rows)]),
        "coin": pa.array(["heads" if n % 7 % 2 else "tails" for n in range(num_rows)]),
        "city": pa.array([f"city {r}{n % 2}" for n, r in enumerate(region)]),
        "region": pa.array([f"region {r}" for r in region]),
        "constant": pa.array(["same"] * num_rows),
        "motto": pa.array([f"my words {n}" for n in range(num_rows)]),
        "empty": pa.nulls(num_rows, pa.string()),
        "user_id": pa.array([f"u{n}" for n in range(num_rows)]),
        "title": pa.array([f"title {n % 2}" for n in range(num_rows)]),
        "born": pa.array([0] * num_rows, pa.timestamp("us")),
        "vector": pa.array([[0.5, 0.5]] * num_rows),
        "taste": pa.array([["Mystery"]] * num_rows),
    })  # fmt: skip
    names = [column.name for column in choose_columns(table, None)]
    assert names == ["taste", "coin", "region", "city", "age"]


def test_named_columns_that_cannot_be_used_are_named_in_the_error():
    with pytest.raises(PoolError, match=r"'genre'.*columns item_id, title, category, era"):
        choose_columns(BOOKS, ["genre"])
    with pytest.raises(PoolError, match=r"'born' of type timestamp"):
        choose_columns(pa.table({"born": pa.array([0], pa.timestamp("us"))}), ["born"])


def test_a_second_path_names_its_column():
    table = pa.table({"category": [["A", "B"]], "mood": [["B"]]})
    columns = choose_columns(table, None)
    assert tokens_of(columns, table.to_pylist()[0]) == ("A", "B", "mood=B")


TOKENS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=4).map(tuple)


@given(
    st.dictionaries(TOKENS, st.integers(1, 9), max_size=25),
    st.integers(1, 30),
    st.integers(1, 6),
    st.lists(TOKENS, max_size=8),
)
def test_split_is_a_partition_and_the_trie_finds_the_longest_prefix(counts, max_size, min_size, queries):
    prefixes = split_groups(counts, max_size, min_size)
    table = pa.table({"path": pa.array([list(tokens) for tokens in counts], pa.list_(pa.string()))})
    columns = choose_columns(table, ["path"])
    groups = AttributeGroups(columns, prefixes)

    def slow_group(tokens):
        return max((prefix for prefix in prefixes if tokens[: len(prefix)] == prefix), key=len)

    held = dict.fromkeys(prefixes, 0)
    for tokens, count in counts.items():
        held[slow_group(tokens)] += count
    assert held == prefixes
    for prefix in prefixes:
        assert not prefix or prefix[:-1] in prefixes  # every parent of a group is one
        inside = sum(count for tokens, count in counts.items() if tokens[: len(prefix)] == prefix)
        assert not prefix or inside >= min_size
        has_parts = any(other[:-1] == prefix for other in prefixes if other)
        assert not has_parts or inside > max_size
    for tokens in [*queries, *counts]:
        assert groups.group_of({"path": list(tokens)}) == "/".join(("attribute", *slow_group(tokens)))


VALUES = st.fixed_dictionaries({
    "path": st.none() | st.lists(st.none() | st.sampled_from(["", "a", "b", "a/b"]), max_size=3),
    "word": st.none() | st.sampled_from(["", "x", "y=", "x/y"]),
    "flag": st.none() | st.booleans(),
    "size": st.none() | st.floats(width=32),
})  # fmt: skip
SCHEMA = pa.schema([
    ("path", pa.list_(pa.string())), ("word", pa.string()), ("flag", pa.bool_()), ("size", pa.float64())
])  # fmt: skip


@given(st.lists(VALUES, max_size=30), st.lists(VALUES, max_size=10), st.integers(1, 8))
def test_every_entity_has_a_known_group_before_and_after_saving(tmp_path_factory, fitted_rows, asked_rows, max_size):
    fitted = pa.Table.from_pylist(fitted_rows, SCHEMA)
    groups = _fit(fitted, ["path", "word", "flag", "size"], max_size, 1)
    folder = tmp_path_factory.mktemp("groups")
    groups.save(folder)
    reloaded = AttributeGroups.load(groups.columns, folder)
    names = [groups.group_of(row) for row in fitted.to_pylist()]
    assert {name: names.count(name) for name in groups.groups} == dict(
        zip(groups.groups, groups.num_entities.values(), strict=True)
    )
    for row in [*fitted_rows, *asked_rows]:
        assert groups.group_of(row) == reloaded.group_of(row)
        assert groups.group_of(row) in groups.groups
