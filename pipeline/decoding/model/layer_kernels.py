"""Triton kernels for the operations between a decoder layer's matrix products; `cuda_layers` launches them.

Each reads and writes its operands once. Sums are taken in float32, and results are rounded where transformers' layers
round them. Tested through Triton's interpreter on a CPU, and on an NVIDIA H200 (`docs/gpu.md`).
"""

import triton.language as tl

from laserbatch.pipeline.decoding.attention.triton_kernel import jit


@jit
def rms_norm(
    hidden_ptr,  # (num_tokens, size): the residual stream, to which the update is added in place
    update_ptr,  # (num_tokens, size): result of the layer's last product
    update_weight_ptr,  # (size,) of the norm that some models apply to the update
    weight_ptr,  # (size,)
    out_ptr,  # (num_tokens, size): the normalised stream
    update_epsilon, epsilon,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
    HAS_UPDATE: tl.constexpr, NORMS_UPDATE: tl.constexpr, ADDS_ONE: tl.constexpr,
):  # fmt: skip
    """One token: hidden += update (or its RMSNorm), out = RMSNorm(hidden). `ADDS_ONE`: weights are stored minus 1."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    channel = tl.arange(0, BLOCK)
    exists = channel < SIZE
    hidden = tl.load(hidden_ptr + start + channel, mask=exists, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        update = tl.load(update_ptr + start + channel, mask=exists, other=0.0)
        if NORMS_UPDATE:
            weight = tl.load(update_weight_ptr + channel, mask=exists, other=0.0)
            update = _normalised(update.to(tl.float32), weight, update_epsilon, SIZE, ADDS_ONE)
        rounded = (hidden + update.to(tl.float32)).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + start + channel, rounded, mask=exists)
        hidden = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=exists, other=0.0)
    tl.store(out_ptr + start + channel, _normalised(hidden, weight, epsilon, SIZE, ADDS_ONE), mask=exists)


@jit
def _normalised(values, weight, epsilon, SIZE: tl.constexpr, ADDS_ONE: tl.constexpr):
    """RMSNorm of one token's float32 values, in the type of the weight; values beyond SIZE are zero."""
    mean = tl.sum(values * values, axis=0) / SIZE
    return _weighted(values * (1.0 / tl.sqrt(mean + epsilon)), weight, ADDS_ONE)


@jit
def _weighted(values, weight, ADDS_ONE: tl.constexpr):
    """Normalised float32 values times the weight: Llama rounds before the product, Gemma after it alone."""
    if ADDS_ONE:
        return (values * (1.0 + weight.to(tl.float32))).to(weight.dtype)
    return (values.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@jit
def rotate_and_store(
    qkv_ptr,  # (num_tokens, num_heads + 2 * num_kv_heads, HEAD_DIM): queries are rotated in place
    query_weight_ptr, key_weight_ptr,  # (HEAD_DIM,) of the norms of queries and keys
    positions_ptr, slots_ptr,  # int64[num_tokens]
    cos_ptr, sin_ptr,  # (num_positions, HEAD_DIM / 2)
    keys_ptr, values_ptr,  # the layer's cache: (num_kv_heads, capacity, HEAD_DIM)
    num_heads, num_kv_heads, key_stride_slot, key_stride_head, value_stride_slot, value_stride_head, epsilon,
    HEAD_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, ADDS_ONE: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: normalise and rotate queries and keys, store keys and values into the token's slot."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, HALF_BLOCK)
    num_rotated = num_heads + num_kv_heads
    in_head = (channel < HALF)[None, :]
    exists = (head < num_rotated + num_kv_heads)[:, None] & in_head
    place = ((token * (num_rotated + num_kv_heads) + head) * HEAD_DIM)[:, None] + channel[None, :]
    first = tl.load(qkv_ptr + place, mask=exists, other=0.0)
    second = tl.load(qkv_ptr + place + HALF, mask=exists, other=0.0)
    position = tl.load(positions_ptr + token) * HALF
    cos = tl.load(cos_ptr + position + channel, mask=channel < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position + channel, mask=channel < HALF, other=0.0).to(tl.float32)[None, :]
    slot = tl.load(slots_ptr + token)

    is_query = (head < num_heads)[:, None]
    is_rotated = (head < num_rotated)[:, None]
    rotated_first, rotated_second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        squares = rotated_first * rotated_first + rotated_second * rotated_second
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=1, keep_dims=True) / HEAD_DIM + epsilon)
        first_weight = _head_weight(query_weight_ptr, key_weight_ptr, is_query, channel, channel < HALF)
        second_weight = _head_weight(query_weight_ptr, key_weight_ptr, is_query, channel + HALF, channel < HALF)
        rotated_first = _weighted(rotated_first * factor, first_weight, ADDS_ONE).to(tl.float32)
        rotated_second = _weighted(rotated_second * factor, second_weight, ADDS_ONE).to(tl.float32)
    dtype = qkv_ptr.dtype.element_ty
    new_first = _rounded(rotated_first * cos, dtype) - _rounded(rotated_second * sin, dtype)
    new_second = _rounded(rotated_second * cos, dtype) + _rounded(rotated_first * sin, dtype)
    new_first = tl.where(is_rotated, new_first.to(dtype), first)
    new_second = tl.where(is_rotated, new_second.to(dtype), second)

    tl.store(qkv_ptr + place, new_first, mask=exists & is_query)
    tl.store(qkv_ptr + place + HALF, new_second, mask=exists & is_query)
    is_key = is_rotated & (head >= num_heads)[:, None]
    key_head = (head - num_heads).to(tl.int64)[:, None]
    key_place = slot * key_stride_slot + key_head * key_stride_head + channel[None, :]
    tl.store(keys_ptr + key_place, new_first, mask=is_key & in_head)
    tl.store(keys_ptr + key_place + HALF, new_second, mask=is_key & in_head)
    is_value = exists & (head >= num_rotated)[:, None]
    value_head = (head - num_rotated).to(tl.int64)[:, None]
    value_place = slot * value_stride_slot + value_head * value_stride_head + channel[None, :]
    tl.store(values_ptr + value_place, new_first, mask=is_value)
    tl.store(values_ptr + value_place + HALF, new_second, mask=is_value)


@jit
def _rounded(values, dtype: tl.constexpr):
    """Float32 values, rounded as transformers' rotation rounds its products."""
    return values.to(dtype).to(tl.float32)


@jit
def _head_weight(query_weight_ptr, key_weight_ptr, is_query, channel, exists):
    """Weights of each head's norm: (heads, channels)."""
    query_weight = tl.load(query_weight_ptr + channel, mask=exists, other=0.0)[None, :]
    key_weight = tl.load(key_weight_ptr + channel, mask=exists, other=0.0)[None, :]
    return tl.where(is_query, query_weight, key_weight)


@jit
def gate(
    gate_up_ptr,  # (num_tokens, 2 * SIZE): each token's gate, then the values that it gates
    out_ptr,  # (num_tokens, SIZE)
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up, by SiLU or by the tanh form of GELU."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < SIZE
    value = tl.load(gate_up_ptr + token * 2 * SIZE + channel, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * SIZE + SIZE + channel, mask=exists, other=0.0).to(tl.float32)
    exponent = value
    if IS_GELU:  # (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        exponent = 1.5957691216057308 * (value + 0.044715 * value * value * value)
    activated = value / (1.0 + tl.exp(-exponent))
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + token * SIZE + channel, (activated.to(dtype).to(tl.float32) * up).to(dtype), mask=exists)
