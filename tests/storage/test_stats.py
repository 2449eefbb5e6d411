"""Counts have the same sums by text, by shard and by side."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.pipeline.decoding.sequence import GenerationResult
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.retrieval_pools.sources import NUM_SOURCES

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
    )


@given(st.lists(results(), max_size=5), st.lists(results(), max_size=5))
def test_merging_shards_equals_counting_all_texts_at_once(first, second):
    merged = DecodingStats.total([DecodingStats.of(first, 1.5, 1), DecodingStats.of(second, 2.0, 3)])
    assert merged == DecodingStats.of(first + second, 3.5, 4)
    if merged.num_steps:
        assert merged.tokens_per_step == 1 + merged.acceptance_length
        num_offered = merged.num_drafted - merged.drafted_by_source["form"]
        assert merged.drafted_per_step * merged.num_steps == pytest.approx(num_offered)


def test_a_night_without_texts_has_zero_counts():
    empty = DecodingStats.total([])
    assert empty == DecodingStats()
    paces = empty.tokens_per_step, empty.acceptance_length, empty.drafted_per_step, empty.tokens_per_s
    assert paces == (None,) * 4
