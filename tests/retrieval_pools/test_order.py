"""The order of a pool's positions, against sorting them by the following tokens; moved and merged, against sorting."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.retrieval_pools.index.order import count_first_tokens, merge, sort_texts
from laserbatch.retrieval_pools.index.texts import SEPARATOR, TextOf, find_known_texts

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=14)
VOCAB_SIZE = 40
DEPTHS = st.sampled_from([1, 2, 4, 16])


def lay_out(texts):
    """Read-only, as a night maps its texts: for other arrays numba would compile everything again."""
    tokens = np.array([SEPARATOR, *(token for text in texts for token in (*text, SEPARATOR))], np.int32)
    tokens.flags.writeable = False
    return tokens


def whole(chunks):
    return [position for chunk in chunks for position in chunk.tolist()]


def cut(order, size):
    return [order[k : k + size] for k in range(0, len(order), size)]


def starts_of(tokens):
    return np.flatnonzero(tokens == SEPARATOR).astype(np.int32)


def order_slowly(tokens, depth):
    """Positions by at most `depth` tokens from there, up to a separator; then by position."""

    def key(position):
        end = position + 1
        while tokens[end] != SEPARATOR:
            end += 1
        return tokens[position : min(end, position + depth)], position

    return sorted(range(len(tokens) - 1), key=key)


def sort(tokens, depth, texts=None, max_positions=1 << 30):
    starts = starts_of(tokens)
    texts = np.arange(len(starts) - 1) if texts is None else texts
    first_tokens = count_first_tokens(tokens, starts, texts, VOCAB_SIZE)
    return whole(sort_texts(tokens, starts, texts, first_tokens, depth, max_positions))


@given(texts=TEXTS, depth=DEPTHS, max_positions=st.sampled_from([1, 5, 30, 1 << 30]))
def test_order_equals_sorting_what_follows_and_starts_bound_each_token(texts, depth, max_positions):
    tokens = lay_out(texts)
    order = sort(tokens, depth, max_positions=max_positions)
    assert order == order_slowly(tokens.tolist(), depth)
    starts = count_first_tokens(tokens, starts_of(tokens), np.arange(len(texts)), VOCAB_SIZE)
    for token in range(-1, 4):
        assert sorted(order[starts[token + 1] : starts[token + 2]]) == np.flatnonzero(tokens[:-1] == token).tolist()


@given(seed=st.integers(0, 1 << 16), vocab_size=st.sampled_from([1, 2, 40]), depth=st.sampled_from([4, 16]))
def test_order_of_many_texts_of_few_phrases(seed, vocab_size, depth):
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, vocab_size, rng.integers(0, 9)) for _ in range(6)]
    texts = [np.concatenate([phrases[k] for k in rng.integers(6, size=3)]).tolist() for _ in range(50)]
    tokens = lay_out(texts)
    assert sort(tokens, depth) == order_slowly(tokens.tolist(), depth)


@given(texts=TEXTS, owner=st.lists(st.booleans(), min_size=14, max_size=14), depth=DEPTHS, size=st.integers(1, 9))
def test_orders_of_parts_merge_to_the_order_of_all(texts, owner, depth, size):
    tokens, owner = lay_out(texts), np.array(owner[: len(texts)], bool)
    parts = [np.array(sort(tokens, depth, np.flatnonzero(owner == k)), np.int32) for k in (False, True)]
    assert whole(merge(tokens, *(cut(part, size) for part in parts), depth)) == sort(tokens, depth)


@given(seed=st.integers(0, 1 << 16), num_new=st.integers(1, 20), vocab_size=st.sampled_from([1, 2, 40]), depth=DEPTHS,
       size=st.sampled_from([7, 100, 1 << 18]))  # fmt: skip
def test_a_few_texts_merge_into_many(seed, num_new, vocab_size, depth, size):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, vocab_size, rng.integers(0, 12)).tolist() for _ in range(120)]
    tokens = lay_out(texts)
    new = np.sort(rng.choice(120, num_new, replace=False))
    parts = (np.array(sort(tokens, depth, part), np.int32) for part in (np.delete(np.arange(120), new), new))
    many, few = (cut(part, size) for part in parts)
    for first, second in ((many, few), (few, many)):
        assert whole(merge(tokens, first, second, depth)) == sort(tokens, depth)


@given(texts=TEXTS, today=TEXTS, order=st.randoms(use_true_random=False))
def test_known_texts_are_equal_and_in_sequence_and_as_many_as_can_be(texts, today, order):
    today = today + texts[: len(texts) // 2]
    order.shuffle(today)
    old_tokens, tokens = lay_out(texts), lay_out(today)
    known = find_known_texts(tokens, starts_of(tokens), old_tokens, starts_of(old_tokens))
    pairs = [(old, now) for old, now in enumerate(known.tolist()) if now >= 0]
    assert all(texts[old] == today[now] for old, now in pairs)
    assert all(first[1] < second[1] for first, second in itertools.pairwise(pairs))
    distinct = sorted(set(map(tuple, texts)))
    if len(distinct) == len(texts) and len(set(map(tuple, today))) == len(today):
        assert len(pairs) == longest_common(list(map(tuple, texts)), list(map(tuple, today)))


def longest_common(first, second):
    best = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            best[i + 1][j + 1] = best[i][j] + 1 if a == b else max(best[i][j + 1], best[i + 1][j])
    return best[-1][-1]


def test_all_texts_are_known_when_nothing_changed_even_equal_ones():
    tokens = lay_out([[1, 2], [1, 2], [], [], [0]])
    assert find_known_texts(tokens, starts_of(tokens), tokens, starts_of(tokens)).tolist() == [0, 1, 2, 3, 4]


def test_values_of_the_texts_of_positions():
    rng = np.random.default_rng(0)
    texts = [[1] * length for length in rng.permutation([0, 1, 2, 3, 63, 64, 200] * 100)]
    values = rng.integers(0, 99, 700).astype(np.uint16)
    expected = np.array([value for value, text in zip(values, texts, strict=True) for _ in (0, *text)])
    positions = rng.permutation(len(expected)).astype(np.int32)
    values_of_texts = TextOf(starts_of(lay_out(texts))).values(values, positions)
    assert values_of_texts.tolist() == expected[positions].tolist() and values_of_texts.dtype == np.uint16
