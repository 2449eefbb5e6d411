"""The order of a pool's positions, against sorting them by what follows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from laserbatch.retrieval_pools.index.suffix_order import SEPARATOR, sort_suffixes

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=15)


def lay_out(texts):
    tokens = [SEPARATOR]
    for text in texts:
        tokens += [*text, SEPARATOR]
    return np.array(tokens, np.int32)


def order_slowly(tokens, depth):
    """By the first token and those after it up to a separator, at most `depth`; then by position."""

    def key(position):
        end = position + 1
        while tokens[end] != SEPARATOR:
            end += 1
        return tokens[position : min(end, position + depth)], position

    return sorted(range(len(tokens) - 1), key=key)


@settings(max_examples=200)
@given(texts=TEXTS, depth=st.sampled_from([1, 2, 4, 16]))
def test_order_equals_sorting_what_follows(texts, depth):
    tokens = lay_out(texts)
    result = sort_suffixes(tokens, 4, depth)
    assert result.order.tolist() == order_slowly(tokens.tolist(), depth)
    assert result.order.dtype == result.starts.dtype == np.int32


@settings(max_examples=50)
@given(texts=TEXTS)
def test_starts_bound_the_positions_of_each_token(texts):
    tokens = lay_out(texts)
    result = sort_suffixes(tokens, 5, 16)
    for token in range(-1, 5):
        positions = result.order[result.starts[token + 1] : result.starts[token + 2]]
        assert sorted(positions.tolist()) == np.flatnonzero(tokens[:-1] == token).tolist()


def test_place_of_a_text_does_not_depend_on_the_next_one():
    one = sort_suffixes(lay_out([[1, 2], [3], [1, 2], [0]]), 4, 64).order.tolist()
    other = sort_suffixes(lay_out([[1, 2], [0], [1, 2], [3]]), 4, 64).order.tolist()
    assert one.index(1) < one.index(6)  # equal texts, by position
    assert other.index(1) < other.index(6)
