"""Triton kernels of the attention that `metadata` describes, for CUDA; `triton_attention` launches them.

One program takes a few neighbouring new tokens of a sequence with all the query heads that share a key-value head,
so that a key is loaded once for all of them, and walks over its part of the sequence's keys with an online softmax
(FlashAttention-2). Where a sequence has more keys than one part, a second kernel combines the parts by their
log-sum-exp (flash-decoding). In one launch shape parts have a fixed length, so that a sequence's result does not depend
on the other sequences.

Tested through Triton's interpreter on a CPU, and on an NVIDIA H200 (`docs/gpu.md`), where block sizes were measured.
"""

from collections.abc import Callable
from typing import Any, cast

import triton
import triton.language as tl

# A launch takes extra options, and plain numbers for constexpr, which the types of triton.jit do not allow.
jit = cast("Callable[..., Any]", triton.jit)

_LOG2E = tl.constexpr(1.4426950408889634)


@jit(do_not_specialize=["num_sequences", "num_parts", "part_keys"])
def attend(
    query_ptr, key_ptr, value_ptr, sink_ptr,
    out_ptr,  # (N, num_heads, value_dim), or of parts: (N, num_heads, num_parts, value_dim) in float32
    log_sum_ptr,  # (N, num_heads, num_parts) float32, of parts only
    slots_ptr, cu_seqlens_k_ptr, num_committed_ptr, cu_seqlens_q_ptr, num_chain_ptr, ancestors_ptr, positions_ptr,
    num_sequences, num_heads, num_parts, part_keys,
    query_stride_token, query_stride_head, key_stride_slot, key_stride_head, value_stride_slot, value_stride_head,
    scale, softcap, window,
    SEQUENCES_BLOCK: tl.constexpr, IS_CUT: tl.constexpr, FOLDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of one sequence's new tokens, in one key-value head, over one part of the keys."""
    BLOCK_TOKENS: tl.constexpr = BLOCK_ROWS // FOLDED
    kv_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    sequence, query_start, num_new, first = _tile_of_program(
        cu_seqlens_q_ptr, num_sequences, SEQUENCES_BLOCK, BLOCK_TOKENS
    )
    if first >= num_new:
        return

    row = tl.arange(0, BLOCK_ROWS)
    new = first + row // FOLDED
    real = (row < BLOCK_TOKENS * FOLDED) & (new < num_new)
    token = (query_start + new).to(tl.int64)
    head = kv_head * FOLDED + row % FOLDED
    place = token * num_heads + head

    committed = tl.load(num_committed_ptr + sequence)
    chain = tl.load(num_chain_ptr + sequence)
    # The keys that any of the tile's tokens may see. A token sees none of the new tokens after it.
    begin = 0
    if IS_CUT:
        begin = part * part_keys
    if HAS_WINDOW:
        # A chain token's position is its place in the text; a tree node's is no lower than the chain's end.
        begin = tl.maximum(begin, committed + tl.minimum(first, chain) - window + 1)
    end = committed + tl.minimum(first + BLOCK_TOKENS, num_new)
    if IS_CUT:
        end = tl.minimum(end, (part + 1) * part_keys)
        if begin >= end:
            nothing = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            tl.store(log_sum_ptr + place * num_parts + part, nothing, mask=real)
            return

    dim = tl.arange(0, HEAD_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)
    query_place = token * query_stride_token + head * query_stride_head
    query = _load_rows(query_ptr, query_place, real, dim, HEAD_DIM, IN_FLOAT32)
    position = tl.load(positions_ptr + token, mask=real, other=0)
    ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)
    sequence_slots_ptr = slots_ptr + tl.load(cu_seqlens_k_ptr + sequence).to(tl.int64)
    key_positions_ptr = positions_ptr + query_start - committed  # positions of new keys

    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    weighted = tl.zeros([BLOCK_ROWS, VALUE_BLOCK], tl.float32)
    # Whole blocks of committed keys are seen by all of the tile's tokens: they need no mask.
    masked_begin = begin
    if not HAS_WINDOW:
        masked_begin += tl.maximum(tl.minimum(end, committed) - begin, 0) // BLOCK_KEYS * BLOCK_KEYS
    for start in range(begin, masked_begin, BLOCK_KEYS):
        slot = tl.load(sequence_slots_ptr + start + tl.arange(0, BLOCK_KEYS)).to(tl.int64)
        keys = _load_rows(key_ptr, slot * key_stride_slot + kv_head * key_stride_head, None, dim, HEAD_DIM, IN_FLOAT32)
        value_place = slot * value_stride_slot + kv_head * value_stride_head
        values = _load_rows(value_ptr, value_place, None, value_dim, VALUE_DIM, IN_FLOAT32)
        scores = _scores(query, keys, scale, softcap, HAS_SOFTCAP)
        highest, total, weighted = _with_keys(highest, total, weighted, scores, values)
    for start in range(masked_begin, end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        exists = key < end
        slot = tl.load(sequence_slots_ptr + key, mask=exists, other=0).to(tl.int64)
        key_place = slot * key_stride_slot + kv_head * key_stride_head
        keys = _load_rows(key_ptr, key_place, exists, dim, HEAD_DIM, IN_FLOAT32)
        value_place = slot * value_stride_slot + kv_head * value_stride_head
        values = _load_rows(value_ptr, value_place, exists, value_dim, VALUE_DIM, IN_FLOAT32)
        scores = _scores(query, keys, scale, softcap, HAS_SOFTCAP)
        sees = _sees(key, exists, position, ancestors, committed + chain, key_positions_ptr, window, HAS_WINDOW)
        scores = tl.where(sees & real[:, None], scores, float("-inf"))
        highest, total, weighted = _with_keys(highest, total, weighted, scores, values)

    seen = total > 0
    result = weighted / tl.where(seen, total, 1.0)[:, None]
    log_sum = tl.where(seen, highest + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    out_place = place
    if IS_CUT:
        out_place = place * num_parts + part
        tl.store(log_sum_ptr + out_place, log_sum, mask=real)
    elif HAS_SINKS:
        result = result * _share_beside_sink(sink_ptr + head, real, log_sum)[:, None]
    tl.store(
        out_ptr + out_place[:, None] * VALUE_DIM + value_dim[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


@jit
def _tile_of_program(cu_seqlens_q_ptr, num_sequences, SEQUENCES_BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """The program's sequence, the batch index of its first new token, their number, and the first one of the tile.

    Sequence b has the tiles from query_starts[b] // BLOCK_TOKENS + b on, as many as it can need. All sequences are
    read at once, because a binary search would wait for memory in each of its steps.
    """
    tile = tl.program_id(0)
    sequences = tl.arange(0, SEQUENCES_BLOCK)
    exists = sequences < num_sequences
    first_tile = tl.load(cu_seqlens_q_ptr + sequences, mask=exists, other=0) // BLOCK_TOKENS + sequences
    sequence = tl.sum((exists & (first_tile <= tile)).to(tl.int32), 0) - 1
    query_start = tl.load(cu_seqlens_q_ptr + sequence)
    num_new = tl.load(cu_seqlens_q_ptr + sequence + 1) - query_start
    return sequence, query_start, num_new, (tile - query_start // BLOCK_TOKENS - sequence) * BLOCK_TOKENS


@jit
def _load_rows(ptr, place, exists, dim, DIM: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """Load vectors of DIM numbers from `place` on: (rows, block of DIM), padded with zeros."""
    places = ptr + place[:, None] + dim[None, :]
    if exists is not None:
        rows = tl.load(places, mask=exists[:, None] & (dim < DIM)[None, :], other=0.0)
    elif dim.shape[0] == DIM:
        rows = tl.load(places)
    else:
        rows = tl.load(places, mask=(dim < DIM)[None, :], other=0.0)
    if IN_FLOAT32:
        rows = rows.to(tl.float32)
    return rows


@jit
def _scores(query, keys, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores as exponents of two: (rows, keys)."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if HAS_SOFTCAP:  # softcap * tanh(scores / softcap), by exp: it may overflow to infinity, which gives the right 1
        return softcap * _LOG2E * (1.0 - 2.0 / (tl.exp(2.0 * scores * scale / softcap) + 1.0))
    return scores * (scale * _LOG2E)


@jit
def _sees(key, exists, position, ancestors, num_before_tree, key_positions_ptr, window, HAS_WINDOW: tl.constexpr):
    """The keys that each row sees: before the tree all keys up to its own position, in the tree its ancestors."""
    node = key - num_before_tree
    in_tree = exists & (node >= 0)
    shift = tl.where(in_tree, node, 0).to(tl.int64)  # for keys that do not exist it might be 64, which is undefined
    is_ancestor = ((ancestors[:, None] >> shift[None, :]) & 1) > 0
    sees = tl.where(in_tree[None, :], is_ancestor, exists[None, :] & (key[None, :] <= position[:, None]))
    if HAS_WINDOW:
        node_position = tl.load(key_positions_ptr + key, mask=in_tree, other=0)
        key_position = tl.where(in_tree, node_position, key)
        sees = sees & (position[:, None] - key_position[None, :] < window)
    return sees


@jit
def _with_keys(highest, total, weighted, scores, values):
    """The online softmax after more keys: highest score, sum of weights, weighted sum of values."""
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # nothing seen so far
    weights = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(highest - reference)
    weighted = weighted * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_highest, total * decay + tl.sum(weights, 1), weighted


@jit
def _share_beside_sink(sink_ptr, exists, log_sum):
    """The share of the softmax's sum that is not the sink's; a sink's score is a natural exponent."""
    sink = tl.load(sink_ptr, mask=exists, other=0.0).to(tl.float32) * _LOG2E
    return 1.0 / (1.0 + tl.exp2(sink - log_sum))


@jit(do_not_specialize=["num_sequences"])
def combine(
    parts_ptr, log_sum_ptr, sink_ptr, out_ptr, cu_seqlens_q_ptr, num_sequences, num_heads,
    NUM_PARTS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Combine the results of the parts for some heads of a token, weighted by their share of the softmax's sum."""
    token = tl.program_id(0)
    if token >= tl.load(cu_seqlens_q_ptr + num_sequences):  # padding: its parts were never written
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists = head < num_heads
    place = token.to(tl.int64) * num_heads + head
    part_place = place[:, None] * NUM_PARTS + tl.arange(0, NUM_PARTS)[None, :]
    value_dim = tl.arange(0, VALUE_BLOCK)
    in_value = value_dim < VALUE_DIM
    log_sums = tl.load(log_sum_ptr + part_place, mask=exists[:, None], other=0.0)
    highest = tl.max(log_sums, 1)
    shares = tl.exp2(log_sums - highest[:, None])  # a token sees itself, so one part at least is finite
    parts = tl.load(
        parts_ptr + part_place[:, :, None] * VALUE_DIM + value_dim[None, None, :],
        mask=(exists[:, None] & (log_sums > float("-inf")))[:, :, None] & in_value[None, None, :],
        other=0.0,
    )
    total = tl.sum(shares, 1)
    result = tl.sum(parts * shares[:, :, None], 1) / total[:, None]
    if HAS_SINKS:
        result = result * _share_beside_sink(sink_ptr + head, exists, highest + tl.log2(total))[:, None]
    tl.store(
        out_ptr + place[:, None] * VALUE_DIM + value_dim[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=exists[:, None] & in_value[None, :],
    )
