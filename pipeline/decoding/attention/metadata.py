"""The attention contract: index arrays say which keys each new token of a batch sees.

A batch is the new tokens of several sequences, one sequence after another. A sequence's new tokens are a causal chain
(a part of its prompt, or its last committed token) and a draft tree below it. Keys and values lie anywhere in the KV
cache, and slots locate them.

The contract is implemented by `triton_attention` (CUDA), `numba_attention` (a CPU, few new tokens a sequence) and
`torch_attention` (any device, padded), each

    attention(query, keys, values, metadata, scale, window, softcap, sinks) -> (N, num_heads, value_dim)

    query : (N, num_heads, head_dim), after rotary embedding.
    keys, values : (num_kv_heads, num_slots, head_dim or value_dim); query head h reads key-value head
        `h // (num_heads / num_kv_heads)`.
    scale : factor of the scores.
    window : a token sees those less than this many positions before it; None: all.
    softcap : scores are bounded to softcap * tanh(score / softcap); None: they are not.
    sinks : (num_heads,), a score that joins each softmax without a value; None: no sinks.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from laserbatch.pipeline.decoding.batch import Batch
from laserbatch.pipeline.decoding.kv_cache import KVCache

MIN_COVERED_KEYS = 256  # least number of keys that a shape covers
MIN_PART_KEYS = 32
MAX_PARTS = 32
MIN_PROGRAMS = 1024  # with fewer, keys are cut into parts: an H100 runs some 500 programs of the kernel at once
MAX_TILE_TOKENS = 64

Array = TypeVar("Array", np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class AttentionMetadata(Generic[Array]):
    """A batch of B sequences and N new tokens: numpy arrays on the host, or tensors on one device.

    `slots` int32[total]: for each sequence the slots of its committed tokens in text order, then those of its new
    tokens in the batch's order. Sequence b has `slots[cu_seqlens_k[b] : cu_seqlens_k[b + 1]]`, int32[B + 1]; the first
    `num_committed[b]` of these, int32[B], are committed. Its new tokens are `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`,
    int32[B + 1]; the first `num_chain[b]` of these, int32[B], are its chain, the others its tree.

    A new token sees all committed tokens of its sequence. `ancestors` int64[N]: bit j of a tree node is set if it sees
    node j of its tree, itself included; 0 in a chain. `positions` int32[N]: position in the text; committed token i is
    at position i, and the chain continues from there. Arrays may be longer than needed: tokens from `cu_seqlens_q[B]`
    on are padding, and their result is zero.
    """

    slots: Array
    cu_seqlens_k: Array
    num_committed: Array
    cu_seqlens_q: Array
    num_chain: Array
    ancestors: Array
    positions: Array


def attention_metadata(batch: Batch, cache: KVCache) -> AttentionMetadata[np.ndarray]:
    """The arrays of a batch over a cache, on the host."""
    ends = np.cumsum(batch.num_committed + batch.sizes)
    slots = np.empty(ends[-1], np.int32)
    first_new = ends - batch.sizes
    slots[np.arange(len(batch)) + (first_new - batch.offsets)[batch.feed_of]] = batch.slot_mapping
    committed = zip(batch.rows.tolist(), (first_new - batch.num_committed).tolist(), first_new.tolist(), strict=True)
    for row, start, end in committed:
        slots[start:end] = cache.slots_of(row)
    ancestors = np.zeros(len(batch), np.int64)
    if len(batch.trees):
        ancestors[batch.is_node] = batch.trees.ancestors
    return AttentionMetadata(
        slots=slots, cu_seqlens_k=np.append(0, ends).astype(np.int32),
        num_committed=batch.num_committed.astype(np.int32),
        cu_seqlens_q=np.append(batch.offsets, len(batch)).astype(np.int32), num_chain=batch.num_chain.astype(np.int32),
        ancestors=ancestors, positions=batch.positions,
    )  # fmt: skip


@dataclass(frozen=True)
class LaunchShape:
    """The parameters of the Triton kernel's launch besides tensors: steps of one shape can replay a captured launch.

    `num_parts` : number of parts into which the keys of a sequence are cut, a power of two; 1: they are not cut.
    `tile_tokens` : number of a sequence's tokens that are computed together, a power of 4.
    `part_keys` : number of keys of a part, a power of two.
    """

    num_parts: int
    tile_tokens: int
    part_keys: int = 256

    @property
    def max_keys(self) -> int:
        """The number of keys of the longest sequence that the shape covers."""
        return self.num_parts * self.part_keys

    @classmethod
    def of(cls, max_keys: int, num_tokens: int, num_sequences: int, num_kv_heads: int = 8) -> "LaunchShape":
        """The shape for sequences of up to `max_keys` keys, new tokens included.

        Keys are cut only where sequences and heads alone do not occupy the device, as partial results are written and
        read back: that took more than half as long as the attention itself for trees of 8 at batch 64 on an H200. The
        keys of prompts are never cut.
        """
        tile_tokens = 1
        while tile_tokens < MAX_TILE_TOKENS and tile_tokens * num_sequences < num_tokens:
            tile_tokens *= 4
        covered_keys = MIN_COVERED_KEYS
        while covered_keys < max_keys:
            covered_keys *= 2
        num_parts, max_parts = 1, min(MAX_PARTS, covered_keys // MIN_PART_KEYS)
        rounded_sequences = 1 << (num_sequences - 1).bit_length()  # so that shapes are few
        if tile_tokens < MAX_TILE_TOKENS:
            while num_parts < max_parts and num_parts * rounded_sequences * num_kv_heads < MIN_PROGRAMS:
                num_parts *= 2
        return cls(num_parts, tile_tokens, covered_keys // num_parts)
