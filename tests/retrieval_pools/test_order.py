"""The order of a pool's positions, against sorting them by what follows; moved and merged, against sorting anew."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.retrieval_pools.index.order import count_first_tokens, merge_runs, sort_suffixes, sort_texts
from laserbatch.retrieval_pools.index.texts import SEPARATOR, find_known_texts, values_at, values_by_position

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=14)
DEPTHS = st.sampled_from([1, 2, 4, 16])


def lay_out(texts):
    return np.array([SEPARATOR, *(token for text in texts for token in (*text, SEPARATOR))], np.int32)


def whole(chunks):
    return [position for chunk in chunks for position in chunk.tolist()]


def cut(order, size):
    return [order[k : k + size] for k in range(0, len(order), size)]


def starts_of(tokens):
    return np.flatnonzero(tokens == SEPARATOR).astype(np.int32)


def order_slowly(tokens, depth):
    """By the first token and those after it up to a separator, at most `depth`; then by position."""

    def key(position):
        end = position + 1
        while tokens[end] != SEPARATOR:
            end += 1
        return tokens[position : min(end, position + depth)], position

    return sorted(range(len(tokens) - 1), key=key)


@given(texts=TEXTS, depth=DEPTHS)
def test_order_equals_sorting_what_follows_and_starts_bound_each_token(texts, depth):
    tokens = lay_out(texts)
    order, starts = sort_suffixes(tokens, 4, depth), count_first_tokens(tokens, 4)
    assert order.tolist() == order_slowly(tokens.tolist(), depth)
    assert order.dtype == starts.dtype == np.int32
    for token in range(-1, 4):
        positions = order[starts[token + 1] : starts[token + 2]]
        assert sorted(positions.tolist()) == np.flatnonzero(tokens[:-1] == token).tolist()


def test_place_of_a_text_does_not_depend_on_the_next_one():
    one = sort_suffixes(lay_out([[1, 2], [3], [1, 2], [0]]), 4, 64).tolist()
    other = sort_suffixes(lay_out([[1, 2], [0], [1, 2], [3]]), 4, 64).tolist()
    assert one.index(1) < one.index(6)  # equal texts, by position
    assert other.index(1) < other.index(6)


@given(
    texts=TEXTS, owner=st.lists(st.integers(0, 3), min_size=14, max_size=14), depth=DEPTHS, size=st.integers(1, 9)
)  # fmt: skip
def test_orders_of_parts_merge_to_the_order_of_all(texts, owner, depth, size):
    tokens = lay_out(texts)
    starts = starts_of(tokens)
    owner = np.array(owner[: len(texts)], np.int64)
    parts = [sort_texts(tokens, starts, np.flatnonzero(owner == k), 3, depth) for k in range(4)]
    expected = sort_suffixes(tokens, 3, depth).tolist()
    assert whole(merge_runs(tokens, [cut(part, size) for part in parts], depth)) == expected
    assert whole(merge_runs(tokens, [], depth)) == []
    assert whole(merge_runs(tokens, [cut(parts[0], size)], depth)) == parts[0].tolist()


@given(seed=st.integers(0, 1 << 16), num_new=st.integers(1, 30), vocab_size=st.sampled_from([1, 2, 50]), depth=DEPTHS,
       size=st.sampled_from([7, 100, 1 << 18]))  # fmt: skip
def test_a_few_texts_merge_into_many(seed, num_new, vocab_size, depth, size):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, vocab_size, rng.integers(0, 12)).tolist() for _ in range(400)]
    tokens = lay_out(texts)
    starts = starts_of(tokens)
    new = np.sort(rng.choice(400, num_new, replace=False))
    many, few = (sort_texts(tokens, starts, part, vocab_size, depth) for part in (np.delete(np.arange(400), new), new))
    expected = sort_suffixes(tokens, vocab_size, depth).tolist()
    for one, two in ((many, few), (few, many)):
        assert whole(merge_runs(tokens, [cut(one, size), cut(two, size)], depth)) == expected


@given(texts=TEXTS, today=TEXTS, order=st.randoms(use_true_random=False))
def test_known_texts_are_equal_and_in_sequence_and_as_many_as_can_be(texts, today, order):
    today = today + texts[: len(texts) // 2]
    order.shuffle(today)
    old_tokens, tokens = lay_out(texts), lay_out(today)
    known = find_known_texts(tokens, starts_of(tokens), old_tokens, starts_of(old_tokens))
    pairs = [(old, now) for old, now in enumerate(known.tolist()) if now >= 0]
    assert all(texts[old] == today[now] for old, now in pairs)
    assert all(one[1] < two[1] for one, two in itertools.pairwise(pairs))
    distinct = sorted(set(map(tuple, texts)))
    if len(distinct) == len(texts) and len(set(map(tuple, today))) == len(today):
        assert len(pairs) == longest_common(list(map(tuple, texts)), list(map(tuple, today)))


def longest_common(one, two):
    best = [[0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(two):
            best[i + 1][j + 1] = best[i][j] + 1 if a == b else max(best[i][j + 1], best[i + 1][j])
    return best[-1][-1]


def test_all_texts_are_known_when_nothing_changed_even_equal_ones():
    tokens = lay_out([[1, 2], [1, 2], [], [], [0]])
    assert find_known_texts(tokens, starts_of(tokens), tokens, starts_of(tokens)).tolist() == [0, 1, 2, 3, 4]


def test_values_of_texts_by_position(tmp_path):
    rng = np.random.default_rng(0)
    texts = [[1] * length for length in rng.integers(0, 4, 3_000)]
    values = rng.integers(0, 99, 3_000).astype(np.uint16)
    found = values_by_position(values, starts_of(lay_out(texts)), tmp_path / "values.npy")
    expected = [value for value, text in zip(values.tolist(), texts, strict=True) for _ in (0, *text)]
    assert found.tolist() == expected and found.dtype == np.uint16
    places = rng.permutation(len(expected)).astype(np.int32)
    assert values_at(found, places).tolist() == found[places].tolist()
