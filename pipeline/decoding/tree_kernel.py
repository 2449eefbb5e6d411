"""Triton kernels of the attention that `packed_attention` describes, for CUDA; `kernel_attention` launches them.

One program takes a few neighbouring packed tokens of a sequence with all the query heads that share a key-value head,
so that a key is loaded once for all of them, and walks over its part of the sequence's keys with an online softmax
(FlashAttention-2). Where a sequence has more keys than one part, a second kernel combines the parts by their
log-sum-exp (flash-decoding). Parts are cut at fixed lengths: what a sequence gets does not depend on what shares its
pack.

Tested against `packed_attention` through Triton's interpreter on a CPU, and compiled for compute capabilities 8.0 and
9.0. They have not been run on a GPU yet: block sizes are chosen by reasoning, not by measurement.

Knows arrays only; import it only where Triton can be imported.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_sequences"])
def attend(
    query_ptr,
    key_ptr,
    value_ptr,
    sink_ptr,
    out_ptr,  # (N, num_heads, value_dim), or of parts: (N, num_heads, num_parts, value_dim) in float32
    log_sum_ptr,  # (N, num_heads, num_parts) float32, of parts only
    slots_ptr,
    slot_starts_ptr,
    num_committed_ptr,
    query_starts_ptr,
    num_chain_ptr,
    ancestors_ptr,
    positions_ptr,
    num_sequences,
    num_heads,
    query_stride_token,
    query_stride_head,
    key_stride_slot,
    key_stride_head,
    value_stride_slot,
    value_stride_head,
    scale,
    softcap,
    window,
    NUM_PARTS: tl.constexpr,
    PART: tl.constexpr,
    FOLDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """A tile of one sequence's new tokens, in one key-value head, over one part of the keys."""
    BLOCK_TOKENS: tl.constexpr = BLOCK_ROWS // FOLDED
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)

    # Sequence b has the tiles from query_starts[b] // BLOCK_TOKENS + b on, as many as it can need: find the tile's own.
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(query_starts_ptr + middle) // BLOCK_TOKENS + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    query_start = tl.load(query_starts_ptr + sequence)
    num_new = tl.load(query_starts_ptr + sequence + 1) - query_start
    first = (tile - query_start // BLOCK_TOKENS - sequence) * BLOCK_TOKENS  # of the sequence's new tokens
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
    slot_start = tl.load(slot_starts_ptr + sequence).to(tl.int64)
    num_before_tree = committed + chain
    # The keys that any of the tile's tokens may see. A token sees none of the new ones behind it.
    begin = part * PART
    if HAS_WINDOW:
        # A chain token's position is its place in the text; a tree node's is no lower than the chain's end.
        begin = tl.maximum(begin, committed + tl.minimum(first, chain) - window + 1)
    end = committed + tl.minimum(first + BLOCK_TOKENS, num_new)
    if NUM_PARTS > 1:
        end = tl.minimum(end, (part + 1) * PART)
        if begin >= end:
            tl.store(
                log_sum_ptr + place * NUM_PARTS + part, tl.full([BLOCK_ROWS], float("-inf"), tl.float32), mask=real
            )
            return

    dim = tl.arange(0, HEAD_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)
    query = tl.load(
        query_ptr + token[:, None] * query_stride_token + head[:, None] * query_stride_head + dim[None, :],
        mask=real[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    if IN_FLOAT32:
        query = query.to(tl.float32)
    position = tl.load(positions_ptr + token, mask=real, other=0)
    ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)

    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    weighted = tl.zeros([BLOCK_ROWS, VALUE_BLOCK], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        key_index = start + tl.arange(0, BLOCK_KEYS)
        exists = key_index < end
        slot = tl.load(slots_ptr + slot_start + key_index, mask=exists, other=0).to(tl.int64)
        keys = tl.load(
            key_ptr + slot[None, :] * key_stride_slot + kv_head * key_stride_head + dim[:, None],
            mask=exists[None, :] & (dim < HEAD_DIM)[:, None],
            other=0.0,
        )
        if IN_FLOAT32:
            keys = keys.to(tl.float32)
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh, which Triton's language does not have: exp may overflow to infinity, which gives 1.
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        # Of what comes before the tree all positions up to one's own are seen, of the tree one's ancestors.
        node = key_index - num_before_tree
        in_tree = node >= 0
        shift = tl.where(in_tree, node, 0).to(tl.int64)
        ancestor = ((ancestors[:, None] >> shift[None, :]) & 1) > 0
        sees = tl.where(in_tree[None, :], ancestor, key_index[None, :] <= position[:, None])
        if HAS_WINDOW:
            new_token = query_start + key_index - committed
            node_position = tl.load(positions_ptr + new_token, mask=in_tree & exists, other=0)
            key_position = tl.where(in_tree, node_position, key_index)
            sees = sees & (position[:, None] - key_position[None, :] < window)
        sees = sees & exists[None, :] & real[:, None]
        scores = tl.where(sees, scores * _LOG2E, float("-inf"))  # in powers of two from here on
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # nothing seen so far
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(highest - reference)
        total = total * decay + tl.sum(weights, 1)
        values = tl.load(
            value_ptr + slot[:, None] * value_stride_slot + kv_head * value_stride_head + value_dim[None, :],
            mask=exists[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        if IN_FLOAT32:
            values = values.to(tl.float32)
        weighted = weighted * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = new_highest

    seen = total > 0
    result = weighted / tl.where(seen, total, 1.0)[:, None]
    log_sum = tl.where(seen, highest + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    in_value = real[:, None] & (value_dim < VALUE_DIM)[None, :]
    if NUM_PARTS > 1:
        part_place = place * NUM_PARTS + part
        tl.store(log_sum_ptr + part_place, log_sum, mask=real)
        tl.store(out_ptr + part_place[:, None] * VALUE_DIM + value_dim[None, :], result, mask=in_value)
    else:
        if HAS_SINKS:
            sink = tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32) * _LOG2E
            result = result * (1.0 / (1.0 + tl.exp2(sink - log_sum)))[:, None]
        tl.store(
            out_ptr + place[:, None] * VALUE_DIM + value_dim[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=in_value,
        )


@triton.jit(do_not_specialize=["num_sequences"])
def combine(
    parts_ptr,
    log_sum_ptr,
    sink_ptr,
    out_ptr,
    query_starts_ptr,
    num_sequences,
    num_heads,
    NUM_PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One token's head: its parts' results, weighted by their share of the softmax's sum."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token >= tl.load(query_starts_ptr + num_sequences):  # padding: its parts were never written
        return
    place = token.to(tl.int64) * num_heads + head
    part = tl.arange(0, NUM_PARTS)
    value_dim = tl.arange(0, VALUE_BLOCK)
    in_value = value_dim < VALUE_DIM
    log_sums = tl.load(log_sum_ptr + place * NUM_PARTS + part)
    highest = tl.max(log_sums, 0)
    shares = tl.exp2(log_sums - highest)  # a token sees itself, so one part at least is finite
    parts = tl.load(
        parts_ptr + (place * NUM_PARTS + part)[:, None] * VALUE_DIM + value_dim[None, :],
        mask=(log_sums > float("-inf"))[:, None] & in_value[None, :],
        other=0.0,
    )
    total = tl.sum(shares, 0)
    result = tl.sum(parts * shares[:, None], 0) / total
    if HAS_SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32) * _LOG2E
        result = result * (1.0 / (1.0 + tl.exp2(sink - highest - tl.log2(total))))
    tl.store(out_ptr + place * VALUE_DIM + value_dim, result.to(out_ptr.dtype.element_ty), mask=in_value)
