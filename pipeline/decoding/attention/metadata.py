"""Which keys each new token of a batch sees: the attention contract, said in index arrays.

A batch is the new tokens of several sequences, one sequence after another. A sequence's new tokens are a causal chain
(a part of its prompt, or its last committed token) and a draft tree below it. Keys and values lie in the KV cache,
anywhere: the slots name them.

The contract is implemented by `triton_attention` (CUDA), `numba_attention` (a CPU, few new tokens a sequence) and
`torch_attention` (any device, padded), each

    attention(query, keys, values, metadata, scale, window, softcap, sinks) -> (N, num_heads, value_dim)

    query : (N, num_heads, head_dim), after rotary embedding.
    keys, values : (num_kv_heads, num_slots, head_dim or value_dim); query head h reads key-value head
        `h // (num_heads / num_kv_heads)`.
    scale : factor of the scores.
    window : a token sees those less than this many positions before it; None: all.
    softcap : scores are bounded to softcap * tanh(score / softcap); None: they are not.
    sinks : (num_heads,), a score that takes part in each softmax and brings no value; None: there is none.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from laserbatch.pipeline.decoding.batch import Batch
from laserbatch.pipeline.decoding.kv_cache import KVCache

MIN_COVERED_KEYS = 256  # of the longest sequence of a shape
MIN_PART_KEYS = 32
MAX_PARTS = 32
MIN_PROGRAMS = 1024  # below which keys are cut: an H100 runs some 500 programs of the kernel at once
MAX_TILE_TOKENS = 64

Array = TypeVar("Array", np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class AttentionMetadata(Generic[Array]):
    """A batch of B sequences and N new tokens; arrays of numpy on the host, or tensors on one device.

    `slots` int32[total]: of each sequence the slots of its committed tokens in text order, then those of its new tokens
    in the batch's order; sequence b's are `slots[cu_seqlens_k[b] : cu_seqlens_k[b + 1]]`, int32[B + 1], of which the
    first `num_committed[b]` are committed, int32[B]. Its new tokens are `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`,
    int32[B + 1], the first `num_chain[b]` of them its chain, int32[B], the rest its tree.

    A new token sees all that is committed. `ancestors` int64[N]: of a tree node, bit j says that it sees node j of its
    own tree, its own bit included; 0 in a chain. `positions` int32[N], absolute; committed token i is at position i,
    and the chain goes on from there. Arrays may be longer than needed: tokens from `cu_seqlens_q[B]` on are padding,
    and their result is zero.
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
        slots=slots,
        cu_seqlens_k=np.append(0, ends).astype(np.int32),
        num_committed=batch.num_committed.astype(np.int32),
        cu_seqlens_q=np.append(batch.offsets, len(batch)).astype(np.int32),
        num_chain=batch.num_chain.astype(np.int32),
        ancestors=ancestors,
        positions=batch.positions,
    )


@dataclass(frozen=True)
class LaunchShape:
    """What the Triton kernel's launch depends on beside tensors: steps of one shape can replay a captured launch.

    `num_parts` : into how many parts the keys of a sequence are cut, a power of two; 1 takes all keys in one go.
    `tile_tokens` : tokens of a sequence that go together, a power of 4.
    `part_keys` : keys of a part, a power of two.
    """

    num_parts: int
    tile_tokens: int
    part_keys: int = 256

    @property
    def max_keys(self) -> int:
        """Keys of the longest sequence that the shape serves."""
        return self.num_parts * self.part_keys

    @classmethod
    def of(cls, max_keys: int, num_tokens: int, num_sequences: int, num_kv_heads: int = 8) -> "LaunchShape":
        """For sequences of up to `max_keys` keys, new tokens included.

        Keys are cut where sequences and heads alone do not occupy the device: partial results are written and read
        again, which took more than half as long as the attention itself for trees of 8 at batch 64 on an H200. Prompts
        are never cut.
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
