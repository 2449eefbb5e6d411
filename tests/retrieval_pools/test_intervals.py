"""Intervals of a pool's order, against a plain search of the texts."""

from pathlib import Path

import numpy as np

from laserbatch.retrieval_pools.compiled import cached, source_stamp
from laserbatch.retrieval_pools.drafting.intervals import (
    ends_of_run,
    find_interval,
    narrow_to_run,
    sample_place,
    sample_stride,
)
from laserbatch.retrieval_pools.index.build import PoolText, build_pool

HERE = Path(__file__)
STAMP = source_stamp([HERE, *sorted((HERE.parents[2] / "retrieval_pools").rglob("*.py"))])


@cached(STAMP)
def narrowed(index, first, last, token, num_samples, begin, end):
    return (
        ends_of_run(index, first, last, first, last, 1, token),
        narrow_to_run(index, first, last, 1, token, num_samples, begin, end),
    )


@cached(STAMP)
def sample_places(first, last, num_samples):
    stride = sample_stride(num_samples, last - first)
    return [sample_place(first, stride, k) for k in range(num_samples)]


def test_an_interval_is_narrowed_to_a_token_by_search_and_from_its_samples(tmp_path):
    rng = np.random.default_rng(0)
    texts = [PoolText(np.minimum(rng.geometric(0.3, 12), 6).astype(np.int32)) for _ in range(60)]
    pool = build_pool(texts, tmp_path / "p", side="item", tokenizer_hash="t", model_id="m")
    index, num_checked = pool.index, 0
    for first, last in zip(index.starts[1:-1].tolist(), index.starts[2:].tolist(), strict=True):
        following = index.tokens[index.order[first:last] + 1]
        for num_samples in (1, 2, 3, 7, last - first):
            if not 0 < num_samples <= last - first:
                continue
            sampled = following[np.array(sample_places(first, last, num_samples)) - first]
            for token in np.unique(sampled):
                begin, end = np.searchsorted(sampled, token), np.searchsorted(sampled, token, side="right")
                places = tuple(first + np.searchsorted(following, token, side=side) for side in ("left", "right"))
                assert narrowed(index, first, last, token, num_samples, begin, end) == (places, places)
                num_checked += 1
    assert num_checked > 50


@cached(STAMP)
def found_interval(index, context, length):
    return find_interval(index, context, length)


def test_a_context_is_found_wherever_it_stands_and_only_there(tmp_path):
    rng = np.random.default_rng(1)
    texts = [PoolText(np.minimum(rng.geometric(0.4, 40), 5).astype(np.int32)) for _ in range(120)]
    pool = build_pool(texts, tmp_path / "p", side="item", tokenizer_hash="t", model_id="m")
    index, sizes = pool.index, set()
    beginnings = [tuple(index.tokens[position : position + 8].tolist()) for position in index.order.tolist()]
    contexts = [np.minimum(rng.geometric(0.4, 8), 6).astype(np.int32) for _ in range(40)]
    contexts += [texts[k].token_ids[first : first + 8] for k in range(40) for first in (0, 17, 32)]
    contexts += [np.concatenate([[-1], texts[k].token_ids[:7]]).astype(np.int32) for k in range(10)]
    for context in contexts:
        for length in range(1, 9):
            suffix = tuple(context[8 - length :].tolist())
            places = [place for place, beginning in enumerate(beginnings) if beginning[:length] == suffix]
            first, last = found_interval(index, context, length)
            assert list(range(first, last)) == places
            sizes.add(len(places))
    assert {0, 1, 2} <= sizes and max(sizes) > 1000 and len(sizes) > 50
