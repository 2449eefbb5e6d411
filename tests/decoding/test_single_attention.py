"""The compiled loops over single tokens give what torch's fused attention gives, holes and windows included."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from laserbatch.pipeline.decoding.attention import single_attention as module
from laserbatch.pipeline.decoding.attention.single_attention import (
    SingleTokens,
    single_attention,
    suits_single_attention,
)


def random_tokens(rng, num_tokens: int, num_rows: int, width: int) -> SingleTokens:
    rows = rng.permutation(num_rows)[:num_tokens]
    num_slots = rng.integers(1, width + 1, num_tokens)
    sees = (rng.random((num_tokens, width)) < 0.8) & (np.arange(width) < num_slots[:, None])
    slot_positions = np.cumsum(sees, 1, dtype=np.int32) - 1
    sees[np.arange(num_tokens), num_slots - 1] = True
    positions = slot_positions[np.arange(num_tokens), num_slots - 1]
    return SingleTokens(rows, sees, num_slots, positions, slot_positions)


@pytest.mark.parametrize("num_folded", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_loops_equal_fused_attention(num_folded, window, scale):
    rng = np.random.default_rng(num_folded)
    torch.manual_seed(0)
    num_tokens, num_kv_heads, width, head_dim, value_dim = 5, 2, 21, 16, 8
    tokens = random_tokens(rng, num_tokens, 7, width)
    keys = torch.randn(7, num_kv_heads, 32, head_dim)
    values = torch.randn(7, num_kv_heads, 32, value_dim)
    unseen = np.setdiff1d(np.arange(7), tokens.rows)
    keys[unseen] = values[unseen] = torch.nan  # rows of others are not read
    query = torch.randn(num_kv_heads * num_folded, num_tokens, head_dim).transpose(0, 1)
    found = single_attention(query, keys, values, tokens, scale, window)
    expected = F.scaled_dot_product_attention(
        query[:, :, None],
        keys[tokens.rows, :, :width].repeat_interleave(num_folded, 1),
        values[tokens.rows, :, :width].repeat_interleave(num_folded, 1),
        attn_mask=torch.from_numpy(tokens.visible(window))[:, None, None],
        scale=scale,
    )[:, :, 0]
    torch.testing.assert_close(found, expected)


def test_where_the_loops_are_used(monkeypatch):
    query = torch.zeros(1, 4, 8, 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: module.MOST_THREADS)
    assert suits_single_attention(query, 8)
    assert not suits_single_attention(query, module.LEAST_ROWS - 1)
    assert not suits_single_attention(query.bfloat16(), 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: module.MOST_THREADS + 1)
    assert not suits_single_attention(query, 8)
