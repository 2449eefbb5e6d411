"""What attention over a packed step computes, said in index arrays; and a slow, obvious version of it in torch.

A pack is the new tokens of several sequences, one sequence after another. A sequence's new tokens are a causal chain
(a part of its prompt, or its last committed token) and a draft tree below it. Keys and values lie in a store, anywhere:
the index names their slots.

`tree_kernel` computes the same on CUDA. Knows no model, no store and no draft.
"""

from dataclasses import dataclass

import torch

PART_KEYS = 256
MOST_TILE_TOKENS = 64


@dataclass(frozen=True)
class PackedIndex:
    """Which keys each packed token sees, as tensors on one device; B sequences, N packed tokens.

    `slots` int32[total]: for each sequence the slots of its committed tokens in text order, then those of its new
    tokens in pack order; sequence b's are `slots[slot_starts[b] : slot_starts[b + 1]]`, int32[B + 1], of which the
    first `num_committed[b]` are committed, int32[B]. Its packed tokens are `query_starts[b]` to `query_starts[b + 1]`,
    int32[B + 1], the first `num_chain[b]` of them its chain, int32[B], the rest its tree.

    `ancestors` int64[N]: of a tree node, bit j says that it sees node j of its own tree, its own bit included; 0 in a
    chain. `node_positions` int32[N]: absolute positions; committed token i is at position i, and the chain goes on from
    there. Arrays may be longer than needed: tokens from `query_starts[B]` on are padding, and their result is zero.
    """

    slots: torch.Tensor
    slot_starts: torch.Tensor
    num_committed: torch.Tensor
    query_starts: torch.Tensor
    num_chain: torch.Tensor
    ancestors: torch.Tensor
    node_positions: torch.Tensor


@dataclass(frozen=True)
class LaunchShape:
    """What a kernel's launch depends on beside tensors: steps of one shape can replay a captured launch.

    `num_parts`: into how many parts of PART_KEYS keys the longest sequence is cut, a power of two, maybe more than
    needed; 1 takes all keys in one go, however many. `tile_tokens`: a sequence's tokens that go together, a power of 4.
    """

    num_parts: int
    tile_tokens: int

    @classmethod
    def of(cls, max_keys: int, num_tokens: int, num_sequences: int) -> "LaunchShape":
        """For sequences of up to `max_keys` keys, new tokens included."""
        num_parts = 1
        while num_parts * PART_KEYS < max_keys:
            num_parts *= 2
        tile_tokens = 1
        while tile_tokens < MOST_TILE_TOKENS and tile_tokens * num_sequences < num_tokens:
            tile_tokens *= 4
        return cls(num_parts, tile_tokens)


def visible_keys(index: PackedIndex, sequence: int, window: int | None = None) -> torch.Tensor:
    """Which of its sequence's slots each of its packed tokens sees: bool[num_new, num_committed + num_new]."""
    committed, chain = int(index.num_committed[sequence]), int(index.num_chain[sequence])
    first, last = int(index.query_starts[sequence]), int(index.query_starts[sequence + 1])
    num_new, device = last - first, index.slots.device
    sees = torch.zeros(num_new, committed + num_new, dtype=torch.bool, device=device)
    sees[:, :committed] = True
    sees[:chain, committed : committed + chain] = torch.ones(chain, chain, dtype=torch.bool, device=device).tril()
    sees[chain:, committed : committed + chain] = True
    bits = torch.arange(num_new - chain, device=device)
    sees[chain:, committed + chain :] = (index.ancestors[first + chain : last, None] >> bits) & 1 > 0
    if window is not None:
        own = index.node_positions[first:last]
        positions = torch.cat((torch.arange(committed, device=device, dtype=own.dtype), own))
        sees &= own[:, None] - positions < window
    return sees


def packed_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    index: PackedIndex,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    shape: LaunchShape | None = None,
) -> torch.Tensor:
    """Attention of packed tokens over their own sequences, one sequence at a time, on any device.

    Parameters
    ----------
    query : (N, num_heads, head_dim), after rotary embedding.
    keys, values : (num_slots, num_kv_heads, head_dim or value_dim), of any strides; query head h reads key-value head
        `h // (num_heads / num_kv_heads)`.
    scale : factor of the scores.
    window : a token sees those less than this many positions before it.
    softcap : scores are bounded to softcap * tanh(score / softcap).
    sinks : (num_heads,), a score that takes part in each softmax and brings no value.
    shape : of no meaning here; the kernel's launch.

    Returns
    -------
    (N, num_heads, value_dim), zeros for padding.
    """
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    result = query.new_zeros(query.shape[0], num_heads, values.shape[2])
    for sequence in range(len(index.num_committed)):
        first, last = int(index.query_starts[sequence]), int(index.query_starts[sequence + 1])
        if first == last:
            continue
        slots = index.slots[int(index.slot_starts[sequence]) : int(index.slot_starts[sequence + 1])].long()
        own_keys = keys[slots].repeat_interleave(num_heads // num_kv_heads, 1).float()  # (num_keys, num_heads, d)
        own_values = values[slots].repeat_interleave(num_heads // num_kv_heads, 1).float()
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), own_keys) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible_keys(index, sequence, window), -torch.inf)
        if sinks is not None:
            sink_scores = sinks.float()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat((scores, sink_scores), -1)
        weights = torch.softmax(scores, -1)[..., : len(slots)]
        result[first:last] = torch.einsum("hqk,khd->qhd", weights, own_values).to(query.dtype)
    return result
