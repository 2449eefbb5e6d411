"""Attention on a CPU as compiled loops over the slots of each sequence: for trees and single tokens alike.

No sequence is padded to another. A task is a few neighbouring tokens of a sequence with all the query heads that share
a key-value head; it copies the keys and values that it needs as float32, in whole vectors, and so few at a time that
they stay in the first-level cache. The tasks of a step are divided among torch's threads. A token's scores and sums are
added in a fixed order, and keys that it does not see add exact zeros, so that it has the same bits in a tree as alone,
whatever else is in the batch. In bfloat16, queries, keys, values and the result are rounded, and all else is float32;
where the processor has AMX, AMX multiplies (`amx_attention`). The contract is that of `metadata`, without softcap and
sinks. Import this module only where it is used: numba takes a while to load.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numba
import numpy as np
import torch
from numba import njit, prange

from laserbatch.pipeline.decoding.attention.amx import ROWS, STEP, has_amx
from laserbatch.pipeline.decoding.attention.amx_attention import (
    add_in_order_of_steps,
    fits_tiles,
    set_scores_by_tiles,
    set_sums_by_tiles,
)
from laserbatch.pipeline.decoding.attention.bfloat16 import as_array, narrowed
from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata
from laserbatch.pipeline.decoding.attention.tile_product import (
    TILE_COLUMNS,
    TILE_ROWS,
    add_product,
    gather_columns,
    gather_rows,
    padded,
)
from laserbatch.retrieval_pools.compiled import cached, source_stamp

# Compiled loops with AMX instructions are stored apart, as a process without AMX cannot run them.
ATTENTION_STAMP = f"{source_stamp(sorted(Path(__file__).parent.glob('*.py')))}-{has_amx()}"
MAX_TASK_ROWS = 64  # most tokens x query heads of a task, so that its scores stay in a core's cache
MIN_SCORES_PER_THREAD = 3_000  # fewer scores are computed faster by one thread than by two
# Sums may be taken in another order, as vectors need it; numbers that are not finite stay so.
SUMS = {"reassoc", "contract", "nsz", "arcp"}
FIXED_POINT = np.float32(1 << 30)
LOG2E = np.float32(1.4426950408889634)


@dataclass(frozen=True)
class Tasks:
    """The sequence and tokens [first, last) of each task, int64[num_tasks] all; and the number of query-key pairs."""

    sequences: np.ndarray
    first: np.ndarray
    last: np.ndarray
    num_scores: int

    @classmethod
    def of(cls, metadata: AttentionMetadata[np.ndarray], num_folded: int) -> "Tasks":
        """The tasks of a batch where `num_folded` query heads share a key-value head."""
        starts = metadata.cu_seqlens_q.astype(np.int64)
        sizes = np.diff(starts)
        num_tiles = -(-sizes * num_folded // MAX_TASK_ROWS)
        tile = np.repeat(-(-sizes // num_tiles), num_tiles)
        sequences = np.repeat(np.arange(len(sizes)), num_tiles)
        number = np.arange(len(sequences)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        first = starts[sequences] + number * tile
        last = np.minimum(first + tile, starts[sequences + 1])
        num_scores = int((np.diff(metadata.cu_seqlens_k) * sizes).sum()) * num_folded
        return cls(sequences[first < last], first[first < last], last[first < last], num_scores)


def numba_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: AttentionMetadata[np.ndarray],
    tasks: Tasks, scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of a batch's tokens: (N, num_heads, value_dim).

    All are float32, or all bfloat16, on a CPU; keys and values are contiguous.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = len(values), values.shape[2]
    num_folded = num_heads // num_kv_heads
    folded_query = as_array(query.contiguous()).reshape(num_tokens, num_kv_heads, num_folded, head_dim)
    result = query.new_empty(num_tokens, num_kv_heads, num_folded, value_dim)
    most_threads = min(torch.get_num_threads(), num_threads())
    numba.set_num_threads(max(1, min(most_threads, tasks.num_scores * num_kv_heads // MIN_SCORES_PER_THREAD)))
    _attend(
        *(folded_query, as_array(keys), as_array(values)),
        *(metadata.slots, metadata.cu_seqlens_k, metadata.num_committed, metadata.cu_seqlens_q, metadata.num_chain),
        *(metadata.ancestors, metadata.positions, tasks.sequences, tasks.first, tasks.last),
        *(np.float32(scale), 0 if window is None else window, as_array(result)),
    )
    return result.view(num_tokens, num_heads, value_dim)


@cache
def num_threads() -> int:
    """Start numba's threads without changing the number of torch's; return the number of numba's threads."""
    torch_threads = torch.get_num_threads()
    numba.set_num_threads(1)  # starts them
    torch.set_num_threads(torch_threads)
    # numba sets it when it is imported, which its types do not show.
    return numba.config.NUMBA_NUM_THREADS  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


@cached(ATTENTION_STAMP, parallel=True)
def _attend(
    query, keys, values, slots, cu_seqlens_k, num_committed, cu_seqlens_q, num_chain, ancestors, positions,
    sequences, first, last, scale, window, result,
):  # fmt: skip
    """Attention of all tasks: query (N, num_kv_heads, num_folded, head_dim), result with value_dim; window 0: none."""
    num_kv_heads = query.shape[1]
    for number in prange(len(sequences) * num_kv_heads):
        task, head = number // num_kv_heads, number % num_kv_heads
        sequence = sequences[task]
        sequence_slots = slots[cu_seqlens_k[sequence] : cu_seqlens_k[sequence + 1]]
        start = cu_seqlens_q[sequence]
        tokens = slice(start, cu_seqlens_q[sequence + 1])
        _attend_tile(
            query[first[task] : last[task]], keys[head], values[head], sequence_slots, num_committed[sequence],
            num_chain[sequence], ancestors[tokens], positions[tokens], first[task] - start, head, scale, window,
            result[first[task] : last[task]],
        )  # fmt: skip


@njit(error_model="numpy")  # a division that checks for zero is not vectorised
def _attend_tile(
    query, keys, values, slots, committed, chain, ancestors, positions, first, head, scale, window, result
):  # fmt: skip
    """Attend for one task and head: the sequence's new tokens from `first` on.

    `query` (tokens, num_kv_heads, num_folded, head_dim) is read, and `result` written, at one key-value head only.
    """
    num_tokens, _, num_folded, head_dim = query.shape
    lowest = positions[first]
    for token in range(first, first + num_tokens):
        lowest = min(lowest, positions[token])
    begin = max(0, min(lowest - window + 1, committed)) // STEP * STEP if window > 0 else 0
    end = committed + first + num_tokens  # a token sees none of the tokens after it
    num_keys, num_rows = end - begin, num_tokens * num_folded
    places = np.empty(padded(num_keys, TILE_COLUMNS), np.int64)
    for key in range(len(places)):
        places[key] = slots[min(begin + key, end - 1)]
    by_tiles = fits_tiles(keys, head_dim, values.shape[1])
    scores = np.empty((padded(num_rows, ROWS if by_tiles else TILE_ROWS), len(places)), np.float32)
    if by_tiles:
        set_scores_by_tiles(query, head, keys, values, places, scores)
    else:
        _set_scores(query, head, keys, values, places, scores)
    is_single = num_tokens == 1 and first == 0 and window == 0  # it sees all these keys
    for token in range(num_tokens):
        query_index = first + token
        for key in range(num_keys if is_single else 0 if window > 0 else committed, num_keys):
            new = begin + key - committed
            if new < 0:
                sees = positions[query_index] - (begin + key) < window
            else:
                sees = new <= query_index if new < chain else (ancestors[query_index] >> (new - chain)) & 1 != 0
                sees = sees and (window == 0 or positions[query_index] - positions[new] < window)
            if not sees:
                for folded in range(num_folded):
                    scores[token * num_folded + folded, key] = -np.inf
    totals = np.empty(num_rows, np.float32)
    for row in range(num_rows):
        totals[row] = _set_weights(scores[row, :num_keys], scale)
    if by_tiles:
        sums = np.empty((len(scores), values.shape[1]), np.float32)
        chain_end = committed + chain - begin
        num_in_order = num_keys if num_keys <= chain_end else chain_end // STEP * STEP
        set_sums_by_tiles(scores, num_rows, num_in_order, values, places, sums)
        if num_in_order < num_keys:
            own, seen = scores[:num_rows, :num_keys], ancestors[first : first + num_tokens]
            add_in_order_of_steps(own, num_folded, num_in_order, chain_end, seen, values, places, sums)
    else:
        sums = _sums(scores, num_keys, values, places)
    for row in range(num_rows):
        vector, total = result[row // num_folded, head, row % num_folded], totals[row]
        for d in range(values.shape[1]):
            vector[d] = narrowed(sums[row, d] / total, vector)


@njit(error_model="numpy")
def _set_scores(query, head, keys, values, places, scores):
    """Like `amx_attention.set_scores_by_tiles`, in vectors; rows are padded to TILE_ROWS."""
    num_tokens, _, num_folded, head_dim = query.shape
    rows = np.zeros((len(scores), head_dim), query.dtype)
    for row in range(num_tokens * num_folded):
        rows[row] = query[row // num_folded, head, row % num_folded]
    pair = 4 // keys.itemsize
    columns = np.empty((head_dim // pair, TILE_COLUMNS * pair), keys.dtype)
    for key in range(0, len(places), TILE_COLUMNS):
        gather_columns(keys, places, key, columns, values)
        add_product(rows, 0, columns, head_dim // pair, scores, key)


@njit(error_model="numpy")
def _sums(scores, num_keys, values, places):
    """The sums of the first `num_keys` values, weighted by the scores: (padded rows, padded value_dim)."""
    value_rows = np.zeros((TILE_COLUMNS, padded(values.shape[1], TILE_COLUMNS)), np.float32)
    sums = np.empty((len(scores), value_rows.shape[1]), np.float32)
    for key in range(0, num_keys, TILE_COLUMNS):
        gather_rows(values, places, key, value_rows)
        add_product(scores, key, value_rows, min(TILE_COLUMNS, num_keys - key), sums, 0)
    return sums


@njit(fastmath=SUMS)
def _set_weights(scores, scale):
    """Replace a row's scores by e^(scale * (score - the highest)), each at most 1; returns their sum.

    The sum is taken over integers, so that it depends neither on their order nor on zeros between them.
    """
    highest, total, factor = _highest(scores), np.int64(0), scale * LOG2E
    for i in range(len(scores)):
        scores[i] = power_of_two((scores[i] - highest) * factor)
    for i in range(len(scores)):
        total += np.int64(np.int32(scores[i] * FIXED_POINT))
    return np.float32(total) / FIXED_POINT


@njit
def _highest(scores):
    """A row's highest score, compared as integers of the same order: a loop over possible NaNs is not vectorised.

    It is arbitrary if a score is NaN: that score's weight is NaN whatever is subtracted.
    """
    highest = np.int32(-0x80000000)
    for i in range(len(scores)):
        highest = max(highest, _flipped(np.float32(scores[i]).view(np.int32)))
    return np.int32(_flipped(highest)).view(np.float32)


@njit
def _flipped(bits):
    """The bits of a float32 as an integer of the same order, or back."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


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
    return np.float32(0) if x < np.float32(-126) else p * factor  # for minus infinity, too
