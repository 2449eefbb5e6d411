"""Launches the kernels of `triton_kernel` on a batch. Import it only where Triton can be imported.

Nothing is read from the device, so that a captured launch can be replayed on new index tensors. Padding sequences and
tokens cost programs that end at once.
"""

from dataclasses import dataclass

import torch
import triton
from triton import knobs

from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata, LaunchShape
from laserbatch.pipeline.decoding.attention.triton_kernel import attend, combine


@dataclass(frozen=True)
class Blocks:
    """The size of one program of `attend`: the keys of each step, and the most rows (tokens x folded heads)."""

    keys: int = 32
    rows: int = 64
    num_warps: int = 4
    num_stages: int = 5


DEFAULT_BLOCKS = Blocks()  # the fastest of eleven on an H200, but 3 % slower than the best for plain steps of batch 64
COMBINED_RESULTS = 32  # partial results (heads x parts) of one program of `combine`
INTERPRETED = knobs.runtime.interpret  # the setting when the kernels were defined


def triton_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: AttentionMetadata[torch.Tensor],
    scale: float, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    shape: LaunchShape | None = None, blocks: Blocks = DEFAULT_BLOCKS, scratch: "Scratch | None" = None,
) -> torch.Tensor:  # fmt: skip
    """Fused attention by the contract of `metadata`, with zeros for padding.

    The last dimension of query, keys and values must be contiguous.

    `shape` : None reads the longest sequence's length from the device, which waits for it.
    `scratch` : memory shared by the layers of a step; the result is overwritten by the next layer's.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = keys.shape[0], values.shape[2]
    num_folded, num_sequences = num_heads // num_kv_heads, len(metadata.num_committed)
    if shape is None:
        max_keys = int((metadata.cu_seqlens_k[1:] - metadata.cu_seqlens_k[:-1]).max())
        shape = LaunchShape.of(max_keys, num_tokens, num_sequences, num_kv_heads)
    assert query.stride(2) == keys.stride(2) == values.stride(2) == 1, "a head's dimensions are not contiguous"
    out, parts, log_sums = (scratch or Scratch()).tensors(query, value_dim, shape.num_parts)
    sinks_or_any = out if sinks is None else sinks
    num_rows = block_rows(shape, num_folded, blocks)
    num_tiles = num_tokens // (num_rows // num_folded) + num_sequences
    whole = {"VALUE_DIM": value_dim, "VALUE_BLOCK": _block(value_dim), "HAS_SINKS": sinks is not None}
    attend[(num_tiles, num_kv_heads, shape.num_parts)](
        *(query, keys, values, sinks_or_any, parts, log_sums),
        *(metadata.slots, metadata.cu_seqlens_k, metadata.num_committed, metadata.cu_seqlens_q, metadata.num_chain),
        *(metadata.ancestors, metadata.positions, num_sequences, num_heads, shape.num_parts, shape.part_keys),
        *(*query.stride()[:2], keys.stride(1), keys.stride(0), values.stride(1), values.stride(0)),
        *(scale, softcap or 0.0, window or 0),
        SEQUENCES_BLOCK=sequences_block(num_sequences), IS_CUT=shape.num_parts > 1, FOLDED=num_folded,
        HEAD_DIM=head_dim, HEAD_BLOCK=_block(head_dim), BLOCK_ROWS=num_rows,
        BLOCK_KEYS=block_keys(head_dim, query.dtype, blocks), HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        IN_FLOAT32=INTERPRETED and query.dtype == torch.bfloat16,  # the interpreter cannot multiply bfloat16
        num_warps=blocks.num_warps, num_stages=blocks.num_stages, **whole,
    )  # fmt: skip
    if shape.num_parts > 1:
        heads = max(1, COMBINED_RESULTS // shape.num_parts)
        combine[(num_tokens, triton.cdiv(num_heads, heads))](
            *(parts, log_sums, sinks_or_any, out, metadata.cu_seqlens_q, num_sequences, num_heads),
            NUM_PARTS=shape.num_parts, HEADS=heads, **whole,
        )  # fmt: skip
    return out


class Scratch:
    """Results and partial results of attention, allocated by the first layer of a step and shared by the others."""

    def __init__(self) -> None:
        self._tensors: dict[tuple, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def tensors(
        self, query: torch.Tensor, value_dim: int, num_parts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The result (num_tokens, num_heads, value_dim), zero for padding, and float32 results and sums of parts.

        With one part the last two are not needed, and the result takes their places.
        """
        key = (*query.shape[:2], value_dim, num_parts, query.dtype)
        if key not in self._tensors:
            out = query.new_zeros(*query.shape[:2], value_dim)
            parts = log_sums = out
            if num_parts > 1:
                parts = query.new_empty(*query.shape[:2], num_parts, value_dim, dtype=torch.float32)
                log_sums = query.new_empty(*query.shape[:2], num_parts, dtype=torch.float32)
            self._tensors[key] = out, parts, log_sums
        return self._tensors[key]


def sequences_block(num_sequences: int) -> int:
    """The number of sequences that a program reads at once: a power of 4, so that few kernels are compiled."""
    block = 16
    while block < num_sequences:
        block *= 4
    return block


def block_rows(shape: LaunchShape, num_folded: int, blocks: Blocks = DEFAULT_BLOCKS) -> int:
    """The number of query rows (tokens x folded heads) of one program; a token's heads stay together."""
    rows_of_token = 1 << (num_folded - 1).bit_length()  # the next power of two
    return max(16, rows_of_token, min(shape.tile_tokens * rows_of_token, blocks.rows))


def block_keys(head_dim: int, dtype: torch.dtype, blocks: Blocks = DEFAULT_BLOCKS) -> int:
    """The number of keys per step of a program, fewer for wide heads, so that they fit the shared memory."""
    return blocks.keys if _block(head_dim) * dtype.itemsize <= 256 else max(16, blocks.keys // 2)


def _block(dim: int) -> int:
    """The smallest block size that holds a head's dimensions and can be multiplied."""
    return max(16, 1 << (dim - 1).bit_length())
