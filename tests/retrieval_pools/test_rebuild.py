"""A pool's files depend on its texts alone, and not on the merged older pool or on the memory limit."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import EMPTY_POOL, Pool
from laserbatch.retrieval_pools.settings import DraftSettings

TEXT = st.tuples(st.lists(st.integers(0, 2), max_size=10), st.sampled_from("abc"), st.integers(0, 4))
TEXTS = st.lists(TEXT, max_size=12)
EXAMPLES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def build(folder, texts, min_support=1, depth=16, **options):
    rows = (PoolText(np.array(ids, np.int32), group, entity) for ids, group, entity in texts)
    chosen = DraftSettings(min_support=min_support, index_depth=depth)
    pool = build_pool(rows, folder, side="item", tokenizer_hash="t", model_id="m", settings=chosen, **options)
    return pool, pool.num_sorted


def turns_of(num_places):
    """Sort `num_places` positions at a time."""
    return patch("laserbatch.retrieval_pools.index.build.SORT_MEMORY_BYTES", 16 * num_places)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@EXAMPLES
@given(
    before=TEXTS, today=TEXTS, retained=st.sets(st.integers(0, 11)), more=st.lists(st.integers(0, 12), max_size=6),
    min_support=st.integers(1, 3), num_places=st.sampled_from([1, 7, 30, 1 << 30]),
)  # fmt: skip
def test_rebuild_from_an_older_pool_equals_a_full_build(
    tmp_path_factory, before, today, retained, more, min_support, num_places
):
    """Texts are added, removed, changed and moved, and change their group or entity."""
    folder = tmp_path_factory.mktemp("pools")
    texts = [text for number, text in enumerate(before) if number in retained]
    for place, text in zip(more, today, strict=False):
        texts.insert(place, text)
    texts += [(ids, "d", entity) for ids, _, entity in before[:2]]
    old, _ = build(folder / "old", before, min_support)
    with turns_of(num_places):
        _, num_sorted = build(folder / "merged", texts, min_support, previous=old)
    build(folder / "full", texts, min_support)
    assert files(folder / "merged") == files(folder / "full")
    assert num_sorted <= len(texts)


@EXAMPLES
@given(texts=TEXTS, min_support=st.integers(1, 3), num_places=st.integers(1, 40))
def test_bounded_build_equals_an_unbounded_one(tmp_path_factory, texts, min_support, num_places):
    folder = tmp_path_factory.mktemp("pools")
    with turns_of(num_places):
        build(folder / "bounded", texts, min_support)
    build(folder / "unbounded", texts, min_support)
    assert files(folder / "bounded") == files(folder / "unbounded")


def test_only_changed_texts_are_sorted(tmp_path):
    rng = np.random.default_rng(0)
    texts = [(rng.integers(0, 50, 30), "ab"[k % 2], k) for k in range(200)]
    old, num_sorted = build(tmp_path / "old", texts)
    assert num_sorted == 200
    today = list(texts)
    for k in range(0, 200, 20):
        today[k] = (rng.integers(0, 50, 31), "c", k)
    del today[5]
    _, num_sorted = build(tmp_path / "today", today, previous=old)
    assert num_sorted == 10
    build(tmp_path / "full", today)
    assert files(tmp_path / "today") == files(tmp_path / "full")
    _, num_sorted = build(tmp_path / "same", today, previous=Pool.open(tmp_path / "today"))
    assert num_sorted == 0
    assert files(tmp_path / "same") == files(tmp_path / "full")


def test_pool_of_another_depth_and_the_empty_pool_are_left_alone(tmp_path):
    texts = [([1, 2], "a", 0), ([2, 1], "a", 1)]
    other, _ = build(tmp_path / "other", texts, depth=32)
    for name, previous in (("one", other), ("two", EMPTY_POOL)):
        _, num_sorted = build(tmp_path / name, texts, previous=previous)
        assert num_sorted == 2


@pytest.mark.parametrize(("num_groups", "dtype"), [(1, "u1"), (256, "u1"), (257, "u2"), (1000, "u2")])
def test_group_codes_take_one_byte_while_there_are_few_groups(tmp_path, num_groups, dtype):
    texts = [([k % 7, k % 5], str(k), k) for k in range(num_groups)]
    old, _ = build(tmp_path / "old", texts[: num_groups // 2])
    pool, _ = build(tmp_path / "p", texts, previous=old)
    assert pool.index.group_codes.dtype == np.dtype(dtype)
    build(tmp_path / "full", texts)
    assert files(tmp_path / "p") == files(tmp_path / "full")
    codes = {int(code) for code in pool.index.group_codes}
    assert codes == set(range(num_groups))
