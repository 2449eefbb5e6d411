"""Leaves of a tree as groups: what tells texts apart decides, and every entity falls into one."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing import leaves as module
from laserbatch.retrieval_pools.routing.attributes import choose_columns
from laserbatch.retrieval_pools.routing.embeddings import id_column
from laserbatch.retrieval_pools.routing.leaves import (
    LEAF_FILE,
    EntityTexts,
    LeafGroups,
    cluster_texts,
    read_rules,
)
from laserbatch.retrieval_pools.routing.router import Router
from laserbatch.retrieval_pools.settings import RoutingSettings

NUM_ITEMS, NUM_UNWRITTEN = 160, 20  # the last items have no text yet
ERAS = ("1920s", "1930s", "1940s", "1950s")
SETTINGS = RoutingSettings(scheme="attribute", attribute_grouping="leaves", num_groups=4, min_group_size=5)


def _items():
    numbers = np.arange(NUM_ITEMS)
    return pa.table({
        "item_id": [f"i{n:03d}" for n in numbers],
        "category": pa.array([["Mystery", "Harbour" if n % 3 else "Manor"] for n in numbers], pa.list_(pa.string())),
        "era": [ERAS[n // 2 % 4] for n in numbers],
        "pages": pa.array([100 + n * 7 % 50 for n in numbers]),
    })  # fmt: skip


def _texts(items=None):
    """Texts whose words depend on the era alone."""
    rng, items = np.random.default_rng(0), _items() if items is None else items
    eras = items["era"].to_pylist()[: NUM_ITEMS - NUM_UNWRITTEN]
    tokens = [(rng.integers(0, 40, 30) + 40 * ERAS.index(era)).astype(np.int32) for era in eras]
    return EntityTexts(items["item_id"].combine_chunks()[: len(tokens)], pa.array(tokens, pa.list_(pa.int32())))


def _fit(items, texts, names=("category", "era", "pages"), **options):
    ids = id_column(items, "item_id", "items")
    columns = choose_columns(items, names, num_bins=4)
    return LeafGroups.fit(items, ids, texts, columns, **({"num_leaves": 4, "min_size": 5} | options))


def _groups(leaves, table):
    return [leaves.group_of(row) for row in table.to_pylist()]


@pytest.fixture(scope="module")
def items():
    return _items()


@pytest.fixture(scope="module")
def leaves(items):
    return _fit(items, _texts())


def test_texts_with_the_same_words_are_one_cluster():
    rng = np.random.default_rng(1)
    planted = np.arange(60) % 3
    texts = [rng.integers(0, 50, 40) + 50 * topic for topic in planted]
    found = cluster_texts(pa.array(texts, pa.list_(pa.int32())), 3, seed=0)
    assert sorted(set(found)) == [0, 1, 2]
    assert adjusted_rand_score(planted, found) == 1


@pytest.mark.parametrize("texts", [[], [[]], [[], []], [[1]], [[1], [1]], [[1, 1]]])
def test_too_little_text_is_one_cluster(texts):
    assert cluster_texts(pa.array(texts, pa.list_(pa.int32())), 3, seed=0).tolist() == [0] * len(texts)


def test_leaves_follow_the_attribute_that_tells_texts_apart(items, leaves):
    assert adjusted_rand_score(items["era"].to_pylist(), _groups(leaves, items)) == 1
    assert leaves.groups == ["leaf/0", "leaf/1", "leaf/2", "leaf/3"]
    assert sum(leaves.num_entities) == NUM_ITEMS


def test_an_entity_without_a_text_falls_into_the_leaf_of_its_like(leaves):
    groups = {era: leaves.group_of({"era": era, "category": ["Never", "seen"], "pages": None}) for era in ERAS}
    assert len(set(groups.values())) == 4


def test_unknown_and_missing_values_fall_into_one_leaf(leaves):
    unknown = {leaves.group_of({"era": era}) for era in ("2090s", None, "", 17, math.nan, ["1920s"])}
    assert unknown == {leaves.group_of({})}
    assert unknown < set(leaves.groups)


def test_a_missing_number_is_in_no_bin(items):
    pages = np.arange(NUM_ITEMS)
    numbered = items.select(["item_id"]).append_column("pages", pa.array(pages))
    tokens = [[1, 2, 3] if n < 80 else [4, 5, 6] for n in pages.tolist()]
    leaves = _fit(numbered, EntityTexts(numbered["item_id"].combine_chunks(), pa.array(tokens)), ("pages",))
    assert leaves.group_of({"pages": 0}) != leaves.group_of({"pages": 159})
    missing = (None, math.nan, math.inf, "many", True)
    assert len({leaves.group_of({"pages": value}) for value in missing}) == 1


def test_a_level_of_a_path_is_known_by_what_lies_above_it(items):
    paths = [[("Mystery", "Romance")[n % 2], ("Harbour", "Manor")[n // 2 % 2]] for n in range(NUM_ITEMS)]
    topics = [n % 2 ^ n // 2 % 2 for n in range(NUM_ITEMS)]  # neither level alone tells anything
    items = items.select(["item_id"]).append_column("category", pa.array(paths))
    texts = EntityTexts(items["item_id"].combine_chunks(), pa.array([[topic, topic, 5] for topic in topics]))
    leaves = _fit(items, texts, ("category",), num_leaves=4)
    held = {(group, topic) for group, topic in zip(_groups(leaves, items), topics, strict=True)}
    assert len(held) == len({group for group, _ in held}) > 1


def test_leaves_hold_as_many_entities_as_fall_into_them(items, leaves):
    found = _groups(leaves, items)
    assert tuple(found.count(group) for group in leaves.groups) == leaves.num_entities


def test_a_leafs_rule_says_what_it_holds(leaves, tmp_path):
    by_era = {leaves.group_of({"era": era}): era for era in ERAS}
    unknown = leaves.group_of({})
    leaves.save(tmp_path)
    rules = read_rules(tmp_path)
    assert list(rules) == leaves.groups
    for group, era in by_era.items():
        parts = rules[group].split(" and ")
        assert (f"era={era}" in parts) is (group != unknown)
        assert all(part.startswith("not era=") for part in parts if part != f"era={era}")


@settings(max_examples=40)
@given(seed=st.integers(0, 1000))
def test_rules_hold_for_the_entities_of_their_leaves(seed):
    rng = np.random.default_rng(seed)
    kinds = [f"k{number}" for number in rng.integers(0, 9, 80)]
    years = [None if number > 44 else int(number) for number in rng.integers(0, 50, 80)]
    items = pa.table({"item_id": [f"i{n}" for n in range(80)], "kind": kinds, "year": pa.array(years, pa.int64())})
    words = [
        [int(kind[1:]) % 4, 10 + (year or 0) // 15, *rng.integers(20, 30, 2)]
        for kind, year in zip(kinds, years, strict=True)
    ]
    texts = EntityTexts(items["item_id"].combine_chunks(), pa.array(words, pa.list_(pa.int32())))
    leaves = _fit(items, texts, ("kind", "year"), num_leaves=8)
    assert len(leaves.groups) > 2
    rule_of = dict(zip(leaves.groups, leaves.rules, strict=True))
    for kind, year in zip([*kinds, "new"], [*years, None], strict=True):
        values = zip(leaves.columns, (kind, year), strict=True)
        tokens = {token for column, value in values for token in column.tokens(value)}
        for part in rule_of[leaves.group_of({"kind": kind, "year": year})].split(" and "):
            assert (part.removeprefix("not ") in tokens) != part.startswith("not "), (part, tokens)


def test_values_rarer_than_a_leaf_count_as_unknown(items):
    kinds = [f"often {n % 2}" if n % 8 else f"seldom {n}" for n in range(NUM_ITEMS)]
    items = items.select(["item_id"]).append_column("kind", pa.array(kinds))
    words = [[n % 2 if n % 8 else 5, 7] for n in range(NUM_ITEMS)]
    texts = EntityTexts(items["item_id"].combine_chunks(), pa.array(words))
    leaves = _fit(items, texts, ("kind",), min_size=4)
    assert leaves.group_of({"kind": "seldom 0"}) == leaves.group_of({"kind": "never seen"})
    assert len({leaves.group_of({"kind": kind}) for kind in ("often 0", "often 1", "seldom 0")}) == 3


def test_equal_arguments_give_equal_files_whatever_the_order_of_rows(items, leaves, tmp_path):
    order = np.random.default_rng(3).permutation(NUM_ITEMS)
    shuffled, texts = items.take(order), _texts()
    again = np.random.default_rng(4).permutation(len(texts.ids))
    other = _fit(shuffled, EntityTexts(texts.ids.take(pa.array(again)), texts.token_ids.take(pa.array(again))))
    for folder, groups in ((tmp_path / "a", leaves), (tmp_path / "b", other)):
        folder.mkdir()
        groups.save(folder)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == [LEAF_FILE]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_many_texts_are_sampled_by_the_seed(items, monkeypatch):
    monkeypatch.setattr(module, "MAX_FIT_TEXTS", 60)
    clustered = []

    def seen(token_ids, *options):
        clustered.append(token_ids.to_pylist())
        return cluster_texts(token_ids, *options)

    monkeypatch.setattr(module, "cluster_texts", seen)
    first, second, _ = (_fit(items, _texts(), seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert len(clustered[0]) == 60 and clustered[0] == clustered[1] != clustered[2]
    assert adjusted_rand_score(items["era"].to_pylist(), _groups(first, items)) == 1


def test_a_saved_tree_groups_as_before(items, leaves, tmp_path):
    leaves.save(tmp_path)
    loaded = LeafGroups.load(leaves.columns, tmp_path)
    assert loaded == leaves
    assert _groups(loaded, items) == _groups(leaves, items)


@pytest.mark.parametrize(
    ("texts", "names"), [(None, ("era",)), (_texts(), ()), (EntityTexts(pa.array([], pa.string()), pa.array([])), None)]
)
def test_without_texts_or_attributes_there_is_one_leaf(items, texts, names, tmp_path):
    if texts is not None and not len(texts.ids):
        texts = replace(texts, token_ids=pa.array([], pa.list_(pa.int32())))
    one = _fit(items, texts, names)
    assert one.num_entities == (NUM_ITEMS,)
    assert one.rules == ["everything"]
    assert one.group_of({"era": "1920s"}) == "leaf/0"
    one.save(tmp_path)
    assert LeafGroups.load(one.columns, tmp_path) == one
    assert _fit(items.slice(0, 0), texts, names).group_of({}) == "leaf/0"


def test_texts_of_others_are_passed_over_and_ids_of_another_kind_refused(items, leaves):
    texts = _texts()
    ids = pa.concat_arrays([texts.ids, pa.array(["stranger"])])
    more = EntityTexts(ids, pa.concat_arrays([texts.token_ids, pa.array([[999] * 9], pa.list_(pa.int32()))]))
    assert _fit(items, more) == leaves
    with pytest.raises(PoolError, match="ids of texts are int64, those of entities are large_string"):
        _fit(items, EntityTexts(pa.array([1]), pa.array([[1]], pa.list_(pa.int32()))))


def test_the_router_sends_cold_entities_to_leaves_and_saves_them(items, tmp_path):
    nothing_yet = pa.table({"user_id": pa.array([], pa.string()), "item_id": pa.array([], pa.string())})
    router = Router.fit("item", items, nothing_yet, SETTINGS.model_copy(update={"scheme": "router"}), texts=_texts())
    router.save(tmp_path)
    loaded = Router.load(tmp_path)
    routes = [loaded.route(row["item_id"], row, 0) for row in items.to_pylist()]
    assert routes == [router.route(row["item_id"], row, 0) for row in items.to_pylist()]
    assert {route.scheme for route in routes} == {"attribute"}
    assert adjusted_rand_score(items["era"].to_pylist(), [route.group for route in routes]) == 1
    assert loaded.route("never seen", {"era": "1930s"}, 0).group == routes[2].group


def test_defaults_of_the_router_work_with_guessed_columns(items):
    nothing_yet = pa.table({"user_id": pa.array([], pa.string()), "item_id": pa.array([], pa.string())})
    settings = RoutingSettings(attribute_grouping="leaves")
    router = Router.fit("item", items, nothing_yet, settings, texts=_texts())
    assert adjusted_rand_score(items["era"].to_pylist(), _groups(router.attributes, items)) > 0.8


def test_a_damaged_tree_is_refused(items, tmp_path):
    nothing_yet = pa.table({"user_id": pa.array([], pa.string()), "item_id": pa.array([], pa.string())})
    router = Router.fit("item", items, nothing_yet, SETTINGS, texts=_texts())
    router.save(tmp_path)
    written = (tmp_path / LEAF_FILE).read_text()
    described = json.loads(written)
    for damaged in (
        written[:300],
        json.dumps({**described, "tree": described["tree"]["inside"]}),
        json.dumps({**described, "groups": described["groups"][1:]}),
    ):
        (tmp_path / LEAF_FILE).write_text(damaged)
        with pytest.raises(PoolError, match=r"cannot be read .*pools rebuild"):
            Router.load(tmp_path)
    (tmp_path / LEAF_FILE).unlink()
    with pytest.raises(PoolError, match=LEAF_FILE):
        Router.load(tmp_path)
