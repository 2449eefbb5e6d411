"""Launches the kernels of `tree_kernel` on a packed step.

Nothing is read from the device, so that a captured launch can be replayed on new index tensors. Padding sequences and
tokens cost programs that end at once.

Import it only where Triton can be imported. Knows no model, no store and no draft.
"""

import torch
import triton

from pipeline.decoding.packed_attention import PART_KEYS, LaunchShape, PackedIndex
from pipeline.decoding.tree_kernel import attend, combine

BLOCK_KEYS = 32  # keys of one step of a program
MOST_BLOCK_ROWS = 64  # query rows (tokens x folded heads) of one program
INTERPRETED = triton.knobs.runtime.interpret  # as it was when the kernels were defined


def block_rows(shape: LaunchShape, num_folded: int) -> int:
    """Query rows (tokens x folded heads) of one program; a token's heads stay together."""
    least = max(16, triton.next_power_of_2(num_folded))
    return max(least, min(shape.tile_tokens * triton.next_power_of_2(num_folded), MOST_BLOCK_ROWS))


def tree_attention_kernel(
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
    """`packed_attention`, fused. The last dimension of query, keys and values must be contiguous.

    Parameters
    ----------
    shape : None reads the longest sequence's length from the device, which waits for it.

    Returns
    -------
    (N, num_heads, value_dim), zeros for padding.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = keys.shape[1], values.shape[2]
    num_folded, num_sequences = num_heads // num_kv_heads, len(index.num_committed)
    if shape is None:
        max_keys = int((index.slot_starts[1:] - index.slot_starts[:-1]).max())
        shape = LaunchShape.of(max_keys, num_tokens, num_sequences)
    assert query.stride(2) == keys.stride(2) == values.stride(2) == 1, "a head's dimensions are not contiguous"
    out = query.new_zeros(num_tokens, num_heads, value_dim)
    parts, log_sums = out, out
    if shape.num_parts > 1:
        parts = query.new_empty(num_tokens, num_heads, shape.num_parts, value_dim, dtype=torch.float32)
        log_sums = query.new_empty(num_tokens, num_heads, shape.num_parts, dtype=torch.float32)
    num_rows = block_rows(shape, num_folded)
    num_tiles = num_tokens // (num_rows // num_folded) + num_sequences
    head_block, value_block = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    # Of wide heads fewer keys at a time, so that they fit the shared memory.
    fits = head_block * query.element_size() <= 256
    attend[(num_tiles, num_kv_heads, shape.num_parts)](
        query,
        keys,
        values,
        out if sinks is None else sinks,
        parts,
        log_sums,
        index.slots,
        index.slot_starts,
        index.num_committed,
        index.query_starts,
        index.num_chain,
        index.ancestors,
        index.node_positions,
        num_sequences,
        num_heads,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        scale,
        softcap or 0.0,
        window or 0,
        NUM_PARTS=shape.num_parts,
        PART=PART_KEYS,
        FOLDED=num_folded,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=head_block,
        VALUE_DIM=value_dim,
        VALUE_BLOCK=value_block,
        BLOCK_ROWS=num_rows,
        BLOCK_KEYS=BLOCK_KEYS if fits else BLOCK_KEYS // 2,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        IN_FLOAT32=INTERPRETED and query.dtype == torch.bfloat16,  # the interpreter cannot multiply bfloat16
    )
    if shape.num_parts > 1:
        combine[(num_tokens, num_heads)](
            parts,
            log_sums,
            out if sinks is None else sinks,
            out,
            index.query_starts,
            num_sequences,
            num_heads,
            NUM_PARTS=shape.num_parts,
            VALUE_DIM=value_dim,
            VALUE_BLOCK=value_block,
            HAS_SINKS=sinks is not None,
        )
    return out
