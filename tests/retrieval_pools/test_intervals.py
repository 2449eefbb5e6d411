"""Intervals of a pool's order, against what stands in it."""

import numpy as np
from numba import njit

from retrieval_pools.build import PoolText, build_pool
from retrieval_pools.drafting.intervals import narrow_interval, narrow_to_run, sample_place, sample_stride


@njit
def narrowed(index, first, last, token, num_samples, begin, end):
    return (
        narrow_interval(index, first, last, 1, token),
        narrow_to_run(index, first, last, 1, token, num_samples, begin, end),
    )


@njit
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
