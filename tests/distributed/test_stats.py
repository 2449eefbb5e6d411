"""Counts add up the same whether they are summed by text, by shard or by side."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.pipeline.decoding.engine import GenerationResult
from laserbatch.pipeline.distributed.stats import (
    MOST_LENGTH_BINS,
    decoding_stats,
    length_histogram,
    merge_lengths,
    merge_stats,
)
from laserbatch.retrieval_pools.sources import NUM_SOURCES

counts = st.lists(st.integers(0, 50), min_size=0, max_size=6)
sources = st.lists(st.integers(0, 50), min_size=NUM_SOURCES, max_size=NUM_SOURCES)


@st.composite
def results(draw):
    num_tokens = draw(st.integers(0, 20))
    return GenerationResult(
        request_id="r",
        text="",
        token_ids=np.zeros(num_tokens, np.int32),
        sources=np.zeros(num_tokens, np.uint8),
        finish_reason=draw(st.sampled_from(["end_of_text", "stop", "length"])),
        num_steps=draw(st.integers(0, 20)),
        num_drafted=draw(st.integers(0, 99)),
        num_accepted=draw(st.integers(0, 99)),
        drafted_by_source=np.array(draw(sources), np.int64),
        accepted_by_source=np.array(draw(sources), np.int64),
        drafted_by_depth=np.array(draw(counts), np.int64),
        accepted_by_depth=np.array(draw(counts), np.int64),
    )


@given(st.lists(results(), max_size=5), st.lists(results(), max_size=5))
def test_merging_shards_equals_counting_all_texts_at_once(first, second):
    merged = merge_stats([decoding_stats(first, 1.5, 1), decoding_stats(second, 2.0, 3)])
    assert merged == decoding_stats(first + second, 3.5, 4)


def test_a_night_without_texts_has_zero_counts():
    empty = merge_stats([])
    assert empty["num_texts"] == 0 and empty["lengths"]["counts"] == [] and empty["drafted_by_depth"] == []


@given(st.lists(st.integers(0, 5000), max_size=9), st.lists(st.integers(0, 300), max_size=9))
def test_lengths_are_few_numbers_however_many_texts_there_are(first, second):
    merged = merge_lengths([length_histogram(first), length_histogram(second)])
    assert merged == length_histogram(first + second)
    assert sum(merged["counts"]) == len(first + second) and len(merged["counts"]) <= MOST_LENGTH_BINS
    if max(first + second, default=0) < MOST_LENGTH_BINS:
        assert merged["bin_width"] == 1
