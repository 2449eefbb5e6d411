"""Attention of single tokens of many rows on one or two CPU cores: compiled loops that read each row's own keys only.

In plain decoding every row adds one token, so nothing is shared between queries but the heads of a group. torch's
fused attention multiplies matrices of two rows then, at a third of the speed of these loops on one core, and has to be
called for runs of rows of about the same length. It uses all cores, which these loops do not.

Knows arrays only: no model, no store.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

MOST_THREADS = 2  # of torch; with more its own attention is faster
LEAST_ROWS = 4  # in a step; calls for fewer cost no less than torch's


@dataclass(frozen=True)
class SingleTokens:
    """What one new token in each of N rows sees.

    `rows` int64[N] of the store; `sees` bool[N, width], its own slot included; `num_slots` int64[N], of which those
    from there on are not seen; `positions` int32[N] and `slot_positions` int32[N, width] are absolute.
    """

    rows: np.ndarray
    sees: np.ndarray
    num_slots: np.ndarray
    positions: np.ndarray
    slot_positions: np.ndarray

    def visible(self, window: int | None) -> np.ndarray:
        """`sees`, without what lies `window` positions back or more."""
        if window is None:
            return self.sees
        return self.sees & (self.positions[:, None] - self.slot_positions < window)


def suits_single_attention(query: torch.Tensor, num_rows: int) -> bool:
    """Whether the loops are the faster way for a query (..., head_dim) of so many rows."""
    if query.device.type != "cpu" or query.dtype != torch.float32:
        return False
    return num_rows >= LEAST_ROWS and torch.get_num_threads() <= MOST_THREADS


def single_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: SingleTokens,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of one layer: float32[N, num_heads, value_dim].

    Parameters
    ----------
    query : float32[N, num_heads, head_dim], of any strides.
    keys, values : float32[num_rows, num_kv_heads, width, head_dim or value_dim], contiguous.
    scale : None is 1 / sqrt(head_dim).
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = keys.shape[1], values.shape[3]
    result = query.new_empty(num_tokens, num_heads, value_dim)
    by_kv_head = (num_tokens, num_kv_heads, num_heads // num_kv_heads, -1)
    _compiled()(
        query.contiguous().view(by_kv_head).numpy(),
        keys.numpy(),
        values.numpy(),
        tokens.rows,
        tokens.visible(window),
        tokens.num_slots,
        np.float32(1 / math.sqrt(head_dim) if scale is None else scale),
        result.view(by_kv_head).numpy(),
    )
    return result


@cache
def _compiled():
    """The loops, compiled once a machine; sums may be taken in another order, as vectors need it."""
    from numba import njit  # not loaded where torch's own attention serves

    return njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})(_attend)


def _attend(query, keys, values, rows, sees, num_slots, scale, result):
    num_tokens, num_kv_heads, num_folded, head_dim = query.shape
    value_dim = values.shape[3]
    scores = np.empty((num_folded, sees.shape[1]), np.float32)
    slots = np.empty(sees.shape[1], np.int64)
    for token in range(num_tokens):
        row, num_seen = rows[token], 0
        for slot in range(num_slots[token]):
            if sees[token, slot]:
                slots[num_seen] = slot
                num_seen += 1
        for head in range(num_kv_heads):
            for i in range(num_seen):
                key = keys[row, head, slots[i]]
                for folded in range(num_folded):
                    one = query[token, head, folded]
                    total = np.float32(0)
                    for d in range(head_dim):
                        total += one[d] * key[d]
                    scores[folded, i] = total * scale
            for folded in range(num_folded):
                highest = scores[folded, 0]
                for i in range(1, num_seen):
                    highest = max(highest, scores[folded, i])
                total = np.float32(0)
                for i in range(num_seen):
                    weight = np.exp(scores[folded, i] - highest)
                    scores[folded, i] = weight
                    total += weight
                for i in range(num_seen):
                    scores[folded, i] /= total
                for d in range(value_dim):
                    result[token, head, folded, d] = 0
            for i in range(num_seen):
                value = values[row, head, slots[i]]
                for folded in range(num_folded):
                    weight = scores[folded, i]
                    out = result[token, head, folded]
                    for d in range(value_dim):
                        out[d] += weight * value[d]
