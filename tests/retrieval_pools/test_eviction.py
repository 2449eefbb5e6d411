"""What leaves a full pool: texts that draft nothing, copies of others, and what only old nights wrote."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.eviction import choose_texts
from laserbatch.retrieval_pools.index.layout import TextSpans
from laserbatch.retrieval_pools.index.suffix_order import SEPARATOR
from laserbatch.retrieval_pools.settings import PoolBuildSettings


def choose(texts, max_tokens, ages=None, half_life=None):
    tokens = np.array([SEPARATOR, *(token for text in texts for token in (*text, SEPARATOR))], np.int32)
    ages = np.zeros(len(texts), np.float32) if ages is None else np.array(ages, np.float32)
    return choose_texts(tokens, TextSpans.of_tokens(tokens), ages, max_tokens, half_life).tolist()


def alone(rng, length=20):
    return rng.integers(1000, 1_000_000, length).tolist()


def family(rng, size, length=20):
    """Texts of one phrase with an end of their own each."""
    phrase = rng.integers(0, 1000, length - 2).tolist()
    return [[*phrase, *rng.integers(1000, 1_000_000, 2).tolist()] for _ in range(size)]


def test_texts_whose_ngrams_stand_nowhere_else_leave_first():
    rng = np.random.default_rng(0)
    shared = [text for _ in range(5) for text in family(rng, 3)]
    texts = [alone(rng) for _ in range(10)] + shared + [alone(rng) for _ in range(10)]
    assert choose(texts, 20 * len(shared)) == list(range(10, 25))


def test_copies_of_one_text_leave_before_the_only_two_of_another():
    rng = np.random.default_rng(1)
    many, pairs = family(rng, 40), [text for _ in range(10) for text in family(rng, 2)]
    kept = choose(many + pairs, 20 * 30)
    assert sum(text < 40 for text in kept) <= 20
    of_pairs = {(text - 40) // 2 for text in kept if text >= 40}
    assert of_pairs == set(range(10))


def test_what_only_old_nights_wrote_leaves_first_but_not_what_is_still_written():
    rng = np.random.default_rng(2)
    old, both, new = family(rng, 4), family(rng, 8), family(rng, 4)
    texts = [*old, *both, *new]
    ages = [30] * 4 + [30, 0] * 4 + [0] * 4
    kept = choose(texts, 20 * 4, ages, half_life=5)
    assert {text >= 12 for text in kept} == {False, True} and min(kept) >= 4
    assert min(choose(texts, 20 * 4, ages)) < 4  # age alone is no reason


@settings(max_examples=100)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=12), max_tokens=st.integers(1, 60),
    half_life=st.sampled_from([None, 0.01, 3.0]), ages=st.lists(st.floats(0, 4000), min_size=12, max_size=12),
)  # fmt: skip
def test_the_size_is_kept_and_filled(texts, max_tokens, half_life, ages):
    kept = choose(texts, max_tokens, ages[: len(texts)], half_life)
    assert kept == sorted(set(kept)) == choose(texts, max_tokens, ages[: len(texts)], half_life)
    room = max_tokens - sum(len(texts[text]) for text in kept)
    assert room >= 0
    assert all(len(text) > room for number, text in enumerate(texts) if number not in kept)


@pytest.mark.parametrize("with_previous", [False, True])
def test_a_full_pool_is_that_of_its_kept_texts(tmp_path, with_previous):
    rng = np.random.default_rng(3)
    texts = [alone(rng) for _ in range(5)] + family(rng, 6) + family(rng, 4)
    rows = [PoolText(np.array(text, np.int32), f"g{number}") for number, text in enumerate(texts)]
    options = {"side": "user", "tokenizer_hash": "t", "model_id": "m", "vocab_size": 1_000_000}
    previous = build_pool(rows[3:9], tmp_path / "previous", **options) if with_previous else None
    counts = []
    full = PoolBuildSettings(max_tokens=200)
    build_pool(rows, tmp_path / "p", building=full, on_counts=counts.append, previous=previous, **options)
    assert counts[0].num_texts_left_out == 5
    build_pool(rows[5:], tmp_path / "kept", **options)
    for path in (tmp_path / "kept").iterdir():
        assert path.read_bytes() == (tmp_path / "p" / path.name).read_bytes()


def test_half_life_without_a_size_is_refused():
    with pytest.raises(ValueError, match="give max_tokens too"):
        PoolBuildSettings(half_life_nights=3)
