"""Attention on a CPU as compiled loops over the slots of each sequence: for trees and single tokens alike.

Nothing is gathered and nothing is padded. A task is a few neighbouring tokens of a sequence with all the query heads
that share a key-value head; the tasks of a step are divided among torch's threads. The contract is that of `metadata`,
without softcap and sinks. Import it only where it is used: numba takes a while.
"""

from dataclasses import dataclass
from functools import cache

import numba
import numpy as np
import torch
from numba import njit, prange

from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata
from laserbatch.retrieval_pools.compiled import kept_on_disk

TILE_ROWS = 64  # tokens x query heads of a task, at most: its scores stay in a core's cache
MIN_SCORES_PER_THREAD = 3_000  # fewer scores are computed faster by one thread than by two
# Sums may be taken in another order, as vectors need it; what is not finite stays so.
SUMS = {"reassoc", "contract", "nsz", "arcp"}
LOG2E = np.float32(1.4426950408889634)


@dataclass(frozen=True)
class Tasks:
    """Tokens [first, last) of the batch that go together, their sequence, int64[num_tasks] all; and query-key pairs."""

    sequences: np.ndarray
    first: np.ndarray
    last: np.ndarray
    num_scores: int

    @classmethod
    def of(cls, metadata: AttentionMetadata[np.ndarray], sequences: np.ndarray, num_folded: int) -> "Tasks":
        """The tasks of some sequences, int64[n], where `num_folded` query heads share a key-value head."""
        starts = metadata.cu_seqlens_q.astype(np.int64)
        sizes = np.diff(starts)[sequences]
        num_tiles = -(-sizes * num_folded // TILE_ROWS)
        tile = np.repeat(-(-sizes // num_tiles), num_tiles)
        of = np.repeat(sequences, num_tiles)
        number = np.arange(len(of)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        first = starts[of] + number * tile
        last = np.minimum(first + tile, starts[of + 1])
        num_scores = int((np.diff(metadata.cu_seqlens_k)[sequences] * sizes).sum()) * num_folded
        return cls(of[first < last], first[first < last], last[first < last], num_scores)


def numba_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata[np.ndarray],
    tasks: Tasks,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of the tasks' tokens at their places of (N, num_heads, value_dim); elsewhere it is anything.

    All are float32 on a CPU; keys and values are contiguous.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = len(values), values.shape[2]
    num_folded = num_heads // num_kv_heads
    own = np.ascontiguousarray(query.numpy()).reshape(num_tokens, num_kv_heads, num_folded, head_dim)
    result = np.empty((num_tokens, num_kv_heads, num_folded, value_dim), np.float32)
    most_threads = min(torch.get_num_threads(), _num_threads())
    numba.set_num_threads(max(1, min(most_threads, tasks.num_scores * num_kv_heads // MIN_SCORES_PER_THREAD)))
    _attend(
        *(own, keys.numpy(), values.numpy()),
        *(metadata.slots, metadata.cu_seqlens_k, metadata.num_committed, metadata.cu_seqlens_q, metadata.num_chain),
        *(metadata.ancestors, metadata.positions, tasks.sequences, tasks.first, tasks.last),
        *(np.float32(scale), 0 if window is None else window, result),
    )
    return torch.from_numpy(result).view(num_tokens, num_heads, value_dim)


@cache
def _num_threads() -> int:
    """Threads that numba has. It starts them where torch has its own, and must not change how many torch uses."""
    of_torch = torch.get_num_threads()
    numba.set_num_threads(1)  # starts them
    torch.set_num_threads(of_torch)
    # numba sets it as it is imported, which its types do not show.
    return numba.config.NUMBA_NUM_THREADS  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


@kept_on_disk(nogil=True, parallel=True)
def _attend(
    query, keys, values, slots, cu_seqlens_k, num_committed, cu_seqlens_q, num_chain, ancestors, positions,
    sequences, first, last, scale, window, result,
):  # fmt: skip
    """Attention of tasks: query (N, num_kv_heads, num_folded, head_dim), result with value_dim; window 0 is none."""
    num_kv_heads = query.shape[1]
    for number in prange(len(sequences) * num_kv_heads):
        task, head = number // num_kv_heads, number % num_kv_heads
        sequence = sequences[task]
        own_slots = slots[cu_seqlens_k[sequence] : cu_seqlens_k[sequence + 1]]
        start = cu_seqlens_q[sequence]
        own = slice(start, cu_seqlens_q[sequence + 1])
        _attend_tile(
            query[first[task] : last[task], head], keys[head], values[head], own_slots, num_committed[sequence],
            num_chain[sequence], ancestors[own], positions[own], first[task] - start, scale, window,
            result[first[task] : last[task], head],
        )  # fmt: skip


@njit(fastmath=SUMS)
def _attend_tile(
    query, keys, values, slots, committed, chain, ancestors, positions, first, scale, window, result
):  # fmt: skip
    """One task in one head: the sequence's new tokens from `first` on, query (tokens, num_folded, head_dim)."""
    num_tokens, num_folded, head_dim = query.shape
    lowest = positions[first]
    for token in range(first, first + num_tokens):
        lowest = min(lowest, positions[token])
    begin = max(0, min(lowest - window + 1, committed)) if window > 0 else 0
    end = committed + first + num_tokens  # a token sees none of those behind it
    seen_slots = slots[begin:end]
    num_rows, num_keys = num_tokens * num_folded, end - begin
    rows = np.empty((num_rows, head_dim), np.float32)
    for row in range(num_rows):
        for d in range(head_dim):
            rows[row, d] = query[row // num_folded, row % num_folded, d] * scale
    scores = np.empty((num_rows, num_keys), np.float32)
    is_single = num_tokens == 1 and first == 0  # it sees all these keys
    if is_single:
        _score_single(rows, keys, seen_slots, scores)
    else:
        _score(rows, keys, seen_slots, scores)
    for token in range(num_tokens):
        own = first + token
        for key in range(num_keys if is_single else 0 if window > 0 else committed, num_keys):
            new = begin + key - committed
            if new < 0:
                sees = positions[own] - (begin + key) < window
            else:
                sees = new <= own if new < chain else (ancestors[own] >> (new - chain)) & 1 != 0
                sees = sees and (window == 0 or positions[own] - positions[new] < window)
            if not sees:
                for folded in range(num_folded):
                    scores[token * num_folded + folded, key] = -np.inf
    for row in range(num_rows):
        _softmax(scores[row])
    sums = np.zeros((num_rows, values.shape[1]), np.float32)
    if is_single:
        _weigh_single(scores, values, seen_slots, sums)
    else:
        _weigh(scores, values, seen_slots, sums)
    for row in range(num_rows):
        for d in range(values.shape[1]):
            result[row // num_folded, row % num_folded, d] = sums[row, d]


@njit(fastmath=SUMS)
def _score_single(rows, keys, slots, scores):
    """The same as `_score` for few rows, two of which stay in registers. Memory is what it waits for: it is read in
    order, a key at a time."""
    for row in range(0, len(rows), 2):
        one, other = rows[row], rows[min(row + 1, len(rows) - 1)]
        for i in range(len(slots)):
            key = keys[slots[i]]
            first = second = np.float32(0)
            for d in range(rows.shape[1]):
                first += one[d] * key[d]
                second += other[d] * key[d]
            scores[row, i] = first
            if row + 1 < len(rows):
                scores[row + 1, i] = second


@njit(fastmath=SUMS)
def _weigh_single(weights, values, slots, sums):
    spare = np.zeros(sums.shape[1], np.float32)  # for the second row of the last pair where there is none
    for row in range(0, len(weights), 2):
        is_pair = row + 1 < len(weights)
        one, other = sums[row], sums[row + 1] if is_pair else spare
        for i in range(len(slots)):
            value = values[slots[i]]
            first, second = weights[row, i], weights[row + 1, i] if is_pair else np.float32(0)
            for d in range(sums.shape[1]):
                one[d] += first * value[d]
                other[d] += second * value[d]


@njit(fastmath=SUMS)
def _score(rows, keys, slots, scores):
    """scores[row, i] = rows[row] . keys[slots[i]]: two keys and four rows at a time, in registers."""
    num_rows, num_keys = scores.shape
    for i in range(0, num_keys - 1, 2):
        one, other = keys[slots[i]], keys[slots[i + 1]]
        for row in range(0, num_rows - 3, 4):
            _score_four(rows, row, one, other, scores, i)
        for row in range(num_rows - num_rows % 4, num_rows):
            first = second = np.float32(0)
            for d in range(rows.shape[1]):
                first += rows[row, d] * one[d]
                second += rows[row, d] * other[d]
            scores[row, i], scores[row, i + 1] = first, second
    if num_keys % 2:
        key = keys[slots[num_keys - 1]]
        for row in range(num_rows):
            total = np.float32(0)
            for d in range(rows.shape[1]):
                total += rows[row, d] * key[d]
            scores[row, num_keys - 1] = total


@njit(fastmath=SUMS, inline="never")
def _score_four(rows, row, one, other, scores, i):
    a, b, c, d = rows[row], rows[row + 1], rows[row + 2], rows[row + 3]
    a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = np.float32(0)
    for j in range(rows.shape[1]):
        x, y = one[j], other[j]
        a0 += a[j] * x
        a1 += a[j] * y
        b0 += b[j] * x
        b1 += b[j] * y
        c0 += c[j] * x
        c1 += c[j] * y
        d0 += d[j] * x
        d1 += d[j] * y
    scores[row, i], scores[row, i + 1] = a0, a1
    scores[row + 1, i], scores[row + 1, i + 1] = b0, b1
    scores[row + 2, i], scores[row + 2, i + 1] = c0, c1
    scores[row + 3, i], scores[row + 3, i + 1] = d0, d1


@njit
def power_of_two(x):
    """2^x for x <= 0, to float32's precision. A loop over it has no calls, so it is computed in vectors."""
    whole = np.int32(x - np.float32(0.5))
    f = x - np.float32(whole)
    p = np.float32(1.540353e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.618129e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1)
    factor = np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)  # 2^whole, by its exponent
    return np.float32(0) if x < np.float32(-126) else p * factor  # of minus infinity, too


@njit(fastmath=SUMS)
def _softmax(scores):
    highest = scores[0]
    for i in range(1, len(scores)):
        if scores[i] > highest:
            highest = scores[i]
    total = np.float32(0)
    for i in range(len(scores)):
        scores[i] = power_of_two((scores[i] - highest) * LOG2E)
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total


@njit(fastmath=SUMS)
def _weigh(weights, values, slots, sums):
    """sums[row] += weights[row, i] * values[slots[i]] over all i, four values at a time."""
    num_rows, num_keys = weights.shape
    for i in range(0, num_keys - 3, 4):
        a, b = values[slots[i]], values[slots[i + 1]]
        c, d = values[slots[i + 2]], values[slots[i + 3]]
        for row in range(num_rows):
            w, x, y, z = weights[row, i], weights[row, i + 1], weights[row, i + 2], weights[row, i + 3]
            for j in range(sums.shape[1]):
                sums[row, j] += w * a[j] + x * b[j] + y * c[j] + z * d[j]
    for i in range(num_keys - num_keys % 4, num_keys):
        value = values[slots[i]]
        for row in range(num_rows):
            for j in range(sums.shape[1]):
                sums[row, j] += weights[row, i] * value[j]
