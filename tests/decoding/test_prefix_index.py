"""The index of prefixes, against comparing a text with each of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.pipeline.decoding.prefix_index import PrefixIndex

TOKENS = st.sampled_from([0, 1, 2, 255, 256, 2**16, 2**31 - 1])  # their bytes sort in another order
TEXTS = st.lists(TOKENS, max_size=6)


def common_prefix(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@given(st.lists(st.tuples(st.integers(0, 5), TEXTS)), st.lists(TEXTS, min_size=1))
def test_the_most_alike_text_is_found_whatever_comes_and_goes(changes, queries):
    """A text with a known name replaces the earlier text of that name; an empty text removes it."""
    index, texts = PrefixIndex(), {}
    for name, tokens in changes:
        if not tokens and name in texts:
            assert index.pop(name) == texts.pop(name)
        else:
            index.put(name, ids(tokens), tokens)
            texts.pop(name, None)
            texts[name] = tokens
        assert len(index) == len(texts) and list(index.values()) == list(texts.values())
        assert all(other in index and index[other] == held for other, held in texts.items())
        for query in queries:
            most = max((common_prefix(held, query) for held in texts.values()), default=0)
            num_shared, entry = index.longest(ids(query))
            assert num_shared == most
            assert (entry is None) == (most == 0) and (entry is None or entry[:most] == query[:most])
    for held in list(texts.values()):
        assert index.pop_first() == held
    assert len(index) == 0


def test_texts_need_not_lie_in_one_piece():
    index = PrefixIndex()
    index.put(3, np.arange(20, dtype=np.int64)[::2], "even")
    assert index.longest(np.arange(0, 12, 2)) == (6, "even")


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(KeyError):
        PrefixIndex().pop(1)
