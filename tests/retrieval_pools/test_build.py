"""Building a pool: its input, refused input, and its files."""

import json
import os

import numpy as np
import pytest
from drafts import draft

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.build import HeldBack, PoolText, build_pool
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.settings import PoolSettings


def build(folder, texts, **options):
    rows = (PoolText(np.array(text, np.int32), group) for text, group in texts)
    return build_pool(rows, folder, **{"side": "user", "tokenizer_hash": "t1", "model_id": "m1"} | options)


def test_manifest_counts_texts_tokens_and_groups(tmp_path):
    pool = build(tmp_path / "p", [([1, 2, 3], "a"), ([4], "b"), ([], "a")])
    manifest = pool.manifest
    assert (manifest.side, manifest.tokenizer_hash, manifest.model_id) == ("user", "t1", "m1")
    assert (manifest.num_texts, manifest.num_tokens, manifest.vocab_size) == (3, 4, 5)
    assert manifest.groups == {"a": {"num_texts": 2, "num_tokens": 3}, "b": {"num_texts": 1, "num_tokens": 1}}
    assert tuple(pool.manifest.groups) == ("a", "b")
    assert pool.settings.scope == "side"


def test_same_texts_give_the_same_bytes(tmp_path):
    texts = [([1, 2, 3], "a"), ([1, 2], "b"), ([3, 1, 2], "a")]
    build(tmp_path / "one", texts)
    build(tmp_path / "two", texts)
    names = sorted(os.listdir(tmp_path / "one"))
    assert names == ["group_codes.npy", "manifest.json", "order.npy", "starts.npy", "tokens.npy"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_support_is_written_only_for_a_limit(tmp_path):
    texts = [([1, 2, 3], "a"), ([1, 2], "b")]
    pool = build(tmp_path / "p", texts, settings=PoolSettings(min_support=2))
    assert (tmp_path / "p" / "support.npy").exists()
    assert pool.index.support.dtype == np.uint8 and len(pool.index.support) == len(pool.index.order)
    assert json.loads((tmp_path / "p" / "manifest.json").read_text())["settings"]["min_support"] == 2
    without = build(tmp_path / "without", texts)
    for name in ("tokens", "order", "group_codes", "starts"):
        assert (tmp_path / "p" / f"{name}.npy").read_bytes() == (tmp_path / "without" / f"{name}.npy").read_bytes()
    assert without.index.support is None


def test_nine_bytes_a_position_and_a_table(tmp_path):
    pool = build(tmp_path / "p", [(np.arange(35) % 10, "")] * 100)
    num_positions = pool.manifest.num_tokens + pool.manifest.num_texts
    assert pool.manifest.size_bytes == 9 * num_positions + 4 * 12 + 4 * 128 + 4
    assert 9 * num_positions / pool.manifest.num_tokens < 10


@pytest.mark.parametrize("texts", [[], [([], "")], [([], ""), ([], "")], [([5], "")], [([5, 5, 5, 5], "")]])
def test_tiny_pools_open_and_draft(tmp_path, texts):
    build(tmp_path / "p", texts)
    pool = Pool.open(tmp_path / "p", "t1", verify=True)
    for context in ([], [5], [5, 5], [0]):
        tree = draft(pool, np.array(context, np.int32), 0)
        assert set(tree.token_ids.tolist()) <= {5}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1], [2, -1]], "text 1 has the token id -1; expected 0 to"),
        ([[0.5]], "text 0 is not a row of token ids"),
        ([[[1, 2]]], "text 0 is not a row of token ids"),
        ([[1], [2**31]], "text 1 has the token id 2147483648"),
        ([[1], [3, 2**31 - 3]], "text 1 has the token id 2147483645; expected 0 to 16777215"),
    ],
)
def test_bad_texts_are_named(tmp_path, texts, message):
    rows = [PoolText(np.array(text), "") for text in texts]
    assert_is_refused(rows, tmp_path, message)


def test_a_group_that_is_no_text_is_named(tmp_path):
    rows = [PoolText(np.array([1]), group) for group in ("a", "a", None, 5)]
    assert_is_refused(rows, tmp_path, "text 2 has the group None; expected a string")


def assert_is_refused(rows, tmp_path, message):
    with pytest.raises(PoolError, match=message):
        build_pool(rows, tmp_path / "p", side="user", tokenizer_hash="t", model_id="m")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("limit", "message"), [("MAX_GROUPS", "most 3 groups"), ("MAX_POSITIONS", "most 3 tokens")])
def test_more_than_a_pool_holds_is_refused(tmp_path, monkeypatch, limit, message):
    monkeypatch.setattr(f"laserbatch.retrieval_pools.index.texts.{limit}", 3)
    rows = [PoolText(np.array([0], np.int32), group) for group in "abcd"]
    with pytest.raises(PoolError, match=message):
        build_pool(rows, tmp_path / "p", side="user", tokenizer_hash="t", model_id="m")


def test_a_pool_is_never_overwritten(tmp_path):
    build(tmp_path / "p", [([1], "")])
    with pytest.raises(PoolError, match="there already"):
        build(tmp_path / "p", [([2], "")])
    assert Pool.open(tmp_path / "p", verify=True).manifest.vocab_size == 2


def test_texts_that_fail_leave_nothing_behind(tmp_path):
    def texts():
        yield PoolText(np.array([1], np.int32))
        raise RuntimeError("the reader failed")

    with pytest.raises(RuntimeError, match="the reader failed"):
        build_pool(texts(), tmp_path / "p", side="user", tokenizer_hash="t", model_id="m")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("places_a_turn", [1 << 40, 1000])
@pytest.mark.parametrize("num_texts", [300, 1200, 2400])
def test_disk_that_fills_up_publishes_nothing(small_disk, monkeypatch, num_texts, places_a_turn):
    """The disk fills up while texts or the order are written."""
    monkeypatch.setattr("laserbatch.retrieval_pools.index.build.SORT_MEMORY_BYTES", 16 * places_a_turn)
    (small_disk / "other").write_bytes(b"x" * (3 << 18))
    texts = [(np.arange(100) % 90, "") for _ in range(num_texts)]
    with pytest.raises(OSError, match=r"No space left on device.*/p"):
        build(small_disk / "p", texts)
    assert os.listdir(small_disk) == ["other"]
    (small_disk / "other").unlink()
    build(small_disk / "p", texts[:300])
    assert Pool.open(small_disk / "p", verify=True).manifest.num_texts == 300


@pytest.mark.usefixtures("removes_as_nfs")
@pytest.mark.parametrize("min_support", [1, 2])
def test_texts_are_replayed_against_a_pool_of_the_others_while_it_is_built(tmp_path, min_support):
    rng = np.random.default_rng(0)
    texts = [(rng.integers(0, 4, rng.integers(0, 30)), "abc"[k % 3]) for k in range(60)]
    texts[7] = (np.array([5, 5]), "d")  # a token and a group that no other text has
    settings = PoolSettings(min_support=min_support)
    out = np.array([0, 7, 30, 59])
    others = build(tmp_path / "others", [text for k, text in enumerate(texts) if k not in out], settings=settings)
    seen = []

    def replay(pool):
        for group in ("a", "d", None):
            for context in ([], [1], [2, 3], [5]):
                seen.append(drafted(pool, context, group))
                assert seen[-1] == drafted(others, context, group)

    build(tmp_path / "p", texts, settings=settings, calibration=HeldBack(out, replay))
    build(tmp_path / "full", texts, settings=settings)
    assert any(map(len, seen))
    for path in (tmp_path / "full").iterdir():
        assert path.read_bytes() == (tmp_path / "p" / path.name).read_bytes()


def drafted(pool, context, group):
    tree = draft(pool, np.array(context, np.int32), 0, group=group, min_acceptance=0)
    return [*zip(tree.token_ids.tolist(), tree.parents.tolist(), tree.log_acceptance.tolist(), strict=True)]
