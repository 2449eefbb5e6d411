"""Launches the kernels of `triton_kernel` on a batch. Import it only where Triton can be imported.

Nothing is read from the device, so that a captured launch can be replayed on new index tensors. Padding sequences and
tokens cost programs that end at once.
"""

from dataclasses import dataclass

import torch
import triton

from laserbatch.pipeline.decoding.attention.metadata import PART_KEYS, AttentionMetadata, LaunchShape
from laserbatch.pipeline.decoding.attention.triton_kernel import attend, combine


@dataclass(frozen=True)
class Blocks:
    """How large one program of `attend` is: keys of one of its steps, rows (tokens x folded heads) at most."""

    keys: int = 32
    rows: int = 64
    num_warps: int = 4
    num_stages: int = 3


DEFAULT_BLOCKS = Blocks()  # by reasoning; `benchmarks/attention.py --blocks` measures others
INTERPRETED = triton.knobs.runtime.interpret  # as it was when the kernels were defined


def triton_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    shape: LaunchShape | None = None,
    blocks: Blocks = DEFAULT_BLOCKS,
) -> torch.Tensor:
    """The contract of `metadata`, fused. The last dimension of query, keys and values must be contiguous.

    `shape` : None reads the longest sequence's length from the device, which waits for it.

    Returns
    -------
    (N, num_heads, value_dim), zeros for padding.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = keys.shape[0], values.shape[2]
    num_folded, num_sequences = num_heads // num_kv_heads, len(metadata.num_committed)
    if shape is None:
        max_keys = int((metadata.cu_seqlens_k[1:] - metadata.cu_seqlens_k[:-1]).max())
        shape = LaunchShape.of(max_keys, num_tokens, num_sequences)
    assert query.stride(2) == keys.stride(2) == values.stride(2) == 1, "a head's dimensions are not contiguous"
    out = query.new_zeros(num_tokens, num_heads, value_dim)
    parts, log_sums = out, out
    if shape.num_parts > 1:
        parts = query.new_empty(num_tokens, num_heads, shape.num_parts, value_dim, dtype=torch.float32)
        log_sums = query.new_empty(num_tokens, num_heads, shape.num_parts, dtype=torch.float32)
    sinks_or_any = out if sinks is None else sinks
    num_rows = block_rows(shape, num_folded, blocks)
    num_tiles = num_tokens // (num_rows // num_folded) + num_sequences
    whole = {
        "NUM_PARTS": shape.num_parts,
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": _block(value_dim),
        "HAS_SINKS": sinks is not None,
    }
    attend[(num_tiles, num_kv_heads, shape.num_parts)](
        *(query, keys, values, sinks_or_any, parts, log_sums),
        *(metadata.slots, metadata.cu_seqlens_k, metadata.num_committed, metadata.cu_seqlens_q, metadata.num_chain),
        *(metadata.ancestors, metadata.positions, num_sequences, num_heads),
        *(*query.stride()[:2], keys.stride(1), keys.stride(0), values.stride(1), values.stride(0)),
        *(scale, softcap or 0.0, window or 0),
        PART=PART_KEYS,
        FOLDED=num_folded,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=_block(head_dim),
        BLOCK_ROWS=num_rows,
        BLOCK_KEYS=block_keys(head_dim, query.dtype, blocks),
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        IN_FLOAT32=INTERPRETED and query.dtype == torch.bfloat16,  # the interpreter cannot multiply bfloat16
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        **whole,
    )
    if shape.num_parts > 1:
        combine[(num_tokens, num_heads)](
            parts, log_sums, sinks_or_any, out, metadata.cu_seqlens_q, num_sequences, num_heads, **whole
        )
    return out


def block_rows(shape: LaunchShape, num_folded: int, blocks: Blocks = DEFAULT_BLOCKS) -> int:
    """Query rows (tokens x folded heads) of one program; a token's heads stay together."""
    least = max(16, triton.next_power_of_2(num_folded))
    return max(least, min(shape.tile_tokens * triton.next_power_of_2(num_folded), blocks.rows))


def block_keys(head_dim: int, dtype: torch.dtype, blocks: Blocks = DEFAULT_BLOCKS) -> int:
    """Keys of one step of a program: of wide heads fewer, so that they fit the shared memory."""
    return blocks.keys if _block(head_dim) * dtype.itemsize <= 256 else max(16, blocks.keys // 2)


def _block(dim: int) -> int:
    """The least size of a block that holds a head's dimensions and that can be multiplied."""
    return max(16, triton.next_power_of_2(dim))
