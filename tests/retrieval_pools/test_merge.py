"""Orders moved and merged, against sorting everything anew."""

import itertools
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from laserbatch.retrieval_pools.index import merge
from laserbatch.retrieval_pools.index.layout import (
    TextSpans,
    count_first_tokens,
    find_known_texts,
    text_at,
    values_by_place,
)
from laserbatch.retrieval_pools.index.merge import merge_into_older, merge_runs, move_order, sort_texts
from laserbatch.retrieval_pools.index.suffix_order import SEPARATOR, sort_suffixes

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=14)
DEPTHS = st.sampled_from([1, 2, 4, 16])


def lay_out(texts):
    return np.array([SEPARATOR, *(token for text in texts for token in (*text, SEPARATOR))], np.int32)


def whole(chunks):
    return [position for chunk in chunks for position in chunk.tolist()]


def cut(order, size):
    return [order[k : k + size] for k in range(0, len(order), size)]


def shared_slowly(tokens, order, depth):
    """Tokens from each position on, the separator that ends its text the last one, and how many those before share."""
    suffixes = []
    for position in order:
        rest = tokens[position + 1 :].tolist()
        suffixes.append([int(tokens[position]), *rest[: rest.index(SEPARATOR) + 1]][:depth])
    shared = [0] if suffixes else []
    for one, two in itertools.pairwise(suffixes):
        same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
        shared.append(depth if one == two else len(same))
    return shared


@settings(max_examples=200)
@given(texts=TEXTS, owner=st.lists(st.integers(0, 3), min_size=14, max_size=14), depth=DEPTHS, size=st.integers(1, 9),
       most=st.sampled_from([1, 5, 1 << 18]))  # fmt: skip
def test_orders_of_parts_merge_to_the_order_of_all(texts, owner, depth, size, most):
    tokens = lay_out(texts)
    starts = TextSpans.of_tokens(tokens).starts
    owner = np.array(owner[: len(texts)], np.int64)
    parts = [sort_texts(tokens, starts, np.flatnonzero(owner == k), 3, depth) for k in range(4)]
    expected = sort_suffixes(tokens, 3, depth).order.tolist()
    with patch.object(merge, "CHUNK_PLACES", most):  # so long are the chunks that come out
        merged = list(merge._merged(tokens, [cut(part, size) for part in parts], depth))
        positions = [chunk.positions for chunk in merged]
        assert whole(merge_runs(tokens, [cut(part, size) for part in parts], depth)) == expected == whole(positions)
    assert whole(chunk.shared for chunk in merged) == shared_slowly(tokens, expected, depth)
    assert all(len(chunk) <= max(most, size) for chunk in positions)
    assert whole(merge_runs(tokens, [], depth)) == []
    assert whole(merge_runs(tokens, [cut(parts[0], size)], depth)) == parts[0].tolist()


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 16), num_new=st.integers(1, 30), vocab_size=st.sampled_from([1, 2, 50]), depth=DEPTHS,
       size=st.sampled_from([7, 100, 1 << 18]), num_cores=st.sampled_from([1, 2, 3]))  # fmt: skip
def test_a_few_texts_merge_into_many(seed, num_new, vocab_size, depth, size, num_cores):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, vocab_size, rng.integers(0, 12)).tolist() for _ in range(400)]
    tokens = lay_out(texts)
    starts = TextSpans.of_tokens(tokens).starts
    new = np.sort(rng.choice(400, num_new, replace=False))
    many, few = (sort_texts(tokens, starts, part, vocab_size, depth) for part in (np.delete(np.arange(400), new), new))
    expected = sort_suffixes(tokens, vocab_size, depth).order.tolist()
    with patch("laserbatch.retrieval_pools.index.arrays._num_usable_cores", lambda: num_cores):
        assert whole(merge_runs(tokens, [cut(many, size), cut(few, size)], depth)) == expected
        assert whole(merge_into_older(tokens, cut(many, size), cut(few, size), depth)) == expected
        assert whole(merge_into_older(tokens, cut(few, size), cut(many, size), depth)) == expected


@settings(max_examples=200)
@given(texts=TEXTS, new=TEXTS, places=st.lists(st.integers(0, 14), min_size=14, max_size=14),
       gone=st.sets(st.integers(0, 13)), depth=DEPTHS)  # fmt: skip
def test_an_order_of_moved_texts_and_one_of_new_texts_merge_to_the_order_of_all(texts, new, places, gone, depth):
    before = lay_out(texts)
    today = [(number, text) for number, text in enumerate(texts) if number not in gone]
    for text, place in zip(new, places, strict=False):
        today.insert(place, (None, text))
    tokens = lay_out([text for _, text in today])
    starts = TextSpans.of_tokens(tokens).starts
    new_starts = np.full(len(texts), -1, np.int32)
    for place, (number, _) in enumerate(today):
        if number is not None:
            new_starts[number] = starts[place]
    fresh = np.array([place for place, (number, _) in enumerate(today) if number is None], np.int64)
    moved = move_order(cut(sort_suffixes(before, 3, depth).order, 3), TextSpans.of_tokens(before), new_starts)
    added = [sort_texts(tokens, starts, fresh, 3, depth)]
    assert whole(merge_into_older(tokens, moved, added, depth)) == sort_suffixes(tokens, 3, depth).order.tolist()


@settings(max_examples=200)
@given(texts=TEXTS, today=TEXTS, order=st.randoms(use_true_random=False))
def test_known_texts_are_equal_and_in_sequence_and_as_many_as_can_be(texts, today, order):
    today = today + texts[: len(texts) // 2]
    order.shuffle(today)
    old_tokens, tokens = lay_out(texts), lay_out(today)
    known = find_known_texts(tokens, TextSpans.of_tokens(tokens).starts, old_tokens, TextSpans.of_tokens(old_tokens))
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
    spans = TextSpans.of_tokens(tokens)
    assert find_known_texts(tokens, spans.starts, tokens, spans).tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=50)
@given(texts=st.lists(st.lists(st.integers(0, 2), max_size=150), max_size=150))
def test_text_of_every_position(texts):
    tokens = lay_out(texts)
    spans = TextSpans.of_tokens(tokens)
    expected = [number for number, text in enumerate(texts) for _ in range(len(text) + 1)]
    assert [text_at(spans, position) for position in range(len(tokens) - 1)] == expected
    order = sort_suffixes(tokens, 3, 16)
    values = np.arange(len(texts), dtype=np.uint16) * 7
    assert values_by_place(order.order, spans, values).tolist() == [7 * expected[p] for p in order.order]
    assert count_first_tokens(tokens, 3).tolist() == order.starts.tolist()
