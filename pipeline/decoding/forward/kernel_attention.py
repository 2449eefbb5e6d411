"""Launches the kernels of `tree_kernel` on a packed step.

Nothing is read from the device, so that a captured launch can be replayed on new index tensors. Padding sequences and
tokens cost programs that end at once.

Import it only where Triton can be imported. Knows no model, no store and no draft.
"""

import torch
import triton

from pipeline.decoding.forward.packed_attention import PART_KEYS, LaunchShape, PackedIndex
from pipeline.decoding.forward.tree_kernel import attend, combine

MOST_BLOCK_KEYS = 32  # keys of one step of a program
MOST_BLOCK_ROWS = 64  # query rows (tokens x folded heads) of one program
INTERPRETED = triton.knobs.runtime.interpret  # as it was when the kernels were defined


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
    sinks_or_any = out if sinks is None else sinks
    num_rows = block_rows(shape, num_folded)
    num_tiles = num_tokens // (num_rows // num_folded) + num_sequences
    whole = {
        "NUM_PARTS": shape.num_parts,
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": _block(value_dim),
        "HAS_SINKS": sinks is not None,
    }
    attend[(num_tiles, num_kv_heads, shape.num_parts)](
        *(query, keys, values, sinks_or_any, parts, log_sums),
        *(index.slots, index.slot_starts, index.num_committed, index.query_starts, index.num_chain),
        *(index.ancestors, index.node_positions, num_sequences, num_heads),
        *(*query.stride()[:2], *keys.stride()[:2], *values.stride()[:2]),
        *(scale, softcap or 0.0, window or 0),
        PART=PART_KEYS,
        FOLDED=num_folded,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=_block(head_dim),
        BLOCK_ROWS=num_rows,
        BLOCK_KEYS=block_keys(head_dim, query.dtype),
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        IN_FLOAT32=INTERPRETED and query.dtype == torch.bfloat16,  # the interpreter cannot multiply bfloat16
        **whole,
    )
    if shape.num_parts > 1:
        combine[(num_tokens, num_heads)](
            parts, log_sums, sinks_or_any, out, index.query_starts, num_sequences, num_heads, **whole
        )
    return out


def block_rows(shape: LaunchShape, num_folded: int) -> int:
    """Query rows (tokens x folded heads) of one program; a token's heads stay together."""
    least = max(16, triton.next_power_of_2(num_folded))
    return max(least, min(shape.tile_tokens * triton.next_power_of_2(num_folded), MOST_BLOCK_ROWS))


def block_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of one step of a program: of wide heads fewer, so that they fit the shared memory."""
    return MOST_BLOCK_KEYS if _block(head_dim) * dtype.itemsize <= 256 else MOST_BLOCK_KEYS // 2


def _block(dim: int) -> int:
    """The least size of a block that holds a head's dimensions and that can be multiplied."""
    return max(16, triton.next_power_of_2(dim))
