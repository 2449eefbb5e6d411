"""Attention by torch, on any device, where neither compiled loops nor a kernel can be used.

A batch's sequences are divided into groups; each group is one attention call, padded to its longest sequence. Query
heads that share a key-value head are folded into the query length, so that no key is repeated for them. The contract is
that of `metadata`.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata
from laserbatch.pipeline.decoding.device_memory import to_device

WIDTH_STEP = 16  # attention widths are rounded up to this many keys: aligned, and fewer distinct shapes
# Cost of an attention call, and of a row's key besides its queries, in units of one query with one key; measured on a
# CPU with heads of 128. A group ends where padding would cost more than one more call.
CALL_COST, ROW_COST = {"cpu": 1000, "cuda": 100_000}, 7
# Prompts are cut into blocks of this many tokens, each of which reads the keys up to its own last token only.
BLOCK_TOKENS = 128


@dataclass
class Group:
    """The rows of one attention call; a row has new tokens of one sequence, padded to the longest row.

    `queries` int64[num_rows, num_padded] are tokens of the batch (padding repeats the row's first); `slots`
    int64[num_rows, width] hold the row's keys (padding repeats the last); `sees` bool[num_rows, num_padded, width].
    Positions in the text are int32, (num_rows, num_padded) for queries and (num_rows, width) for keys.
    """

    queries: np.ndarray
    slots: np.ndarray
    sees: np.ndarray
    query_positions: np.ndarray
    key_positions: np.ndarray
    _on_device: dict = field(default_factory=dict)

    def index(self, name: str, device: torch.device) -> torch.Tensor:
        """`queries` or `slots`, flattened, on a device."""
        if name not in self._on_device:
            self._on_device[name] = to_device(getattr(self, name).reshape(-1), device)
        return self._on_device[name]

    def read(self, memory: torch.Tensor) -> torch.Tensor:
        """Keys or values of the rows: (num_rows, num_kv_heads, width, dim)."""
        gathered = memory.index_select(1, self.index("slots", memory.device))
        return gathered.view(len(memory), *self.slots.shape, memory.shape[2]).transpose(0, 1)

    def mask(self, window: int | None, num_folded: int, like: torch.Tensor) -> torch.Tensor:
        """Additive mask, 0 where seen: (num_rows, 1, num_folded * num_padded, width), or (num_rows, 1, 1, width)."""
        key = (window, num_folded, like.dtype)
        if key not in self._on_device:
            sees = self.sees
            if window is not None:
                sees = sees & (self.query_positions[:, :, None] - self.key_positions[:, None, :] < window)
            # A finite minimum: minus infinity would give NaN where a whole block of keys is masked.
            additive = np.where(sees, np.float32(0), np.float32(torch.finfo(like.dtype).min))
            mask = to_device(additive, like.device).to(like.dtype)[:, None]
            if num_folded > 1 and self.queries.shape[1] > 1:  # one query's mask broadcasts
                mask = mask.repeat(1, 1, num_folded, 1)
            self._on_device[key] = mask
        return self._on_device[key]


def torch_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, groups: list[Group], scale: float,
    window: int | None, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of the groups' tokens, at their indices in (N, num_heads, value_dim)."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = keys.shape[0], values.shape[2]
    num_folded = num_heads // num_kv_heads
    result = query.new_empty(num_tokens, num_heads, value_dim)
    for group in groups:
        num_rows, num_padded = group.queries.shape
        tokens = group.index("queries", query.device)
        folded = query.index_select(0, tokens).view(num_rows, num_padded, num_kv_heads, num_folded, head_dim)
        folded = folded.permute(0, 2, 3, 1, 4).reshape(num_rows, num_kv_heads, num_folded * num_padded, head_dim)
        group_keys, group_values = (group.read(memory) for memory in (keys, values))
        mask = group.mask(window, num_folded, query)
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(folded, group_keys, group_values, attn_mask=mask, scale=scale)
        else:
            out = _written_out(folded, group_keys, group_values, mask, scale, softcap, sinks)
        out = out.view(num_rows, num_kv_heads, num_folded, num_padded, value_dim).permute(0, 3, 1, 2, 4)
        result.index_copy_(0, tokens, out.reshape(-1, num_heads, value_dim))
    return result


def _written_out(query, keys, values, mask, scale, softcap, sinks) -> torch.Tensor:
    """Attention with a softcap or sinks: query (num_rows, num_kv_heads, num_folded * num_padded, head_dim)."""
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = (scores + mask).float()
    if sinks is not None:
        num_rows, num_kv_heads, num_queries, _ = scores.shape
        num_folded = len(sinks) // num_kv_heads
        sink = sinks.float().view(1, num_kv_heads, num_folded, 1).expand(num_rows, -1, -1, num_queries // num_folded)
        scores = torch.cat([scores, sink.reshape(num_rows, num_kv_heads, num_queries, 1)], -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(query.dtype), values)


def cut_groups(metadata: AttentionMetadata[np.ndarray], call_cost: int) -> list[Group]:
    """Group a batch's sequences by similar numbers of new tokens; prompts are cut into blocks.

    A group ends where one more call, of cost `call_cost`, is cheaper than padding to the longest row.
    """
    sizes = np.diff(metadata.cu_seqlens_q)
    most = BLOCK_TOKENS if call_cost < BLOCK_TOKENS**2 else int(sizes.max(initial=1))
    num_blocks = -(-sizes // most)
    sequence_of = np.repeat(np.arange(len(sizes)), num_blocks)
    begin = (np.arange(len(sequence_of)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)) * most
    end = np.minimum(begin + most, np.repeat(sizes, num_blocks))
    widths = metadata.num_committed[sequence_of] + end
    order = np.lexsort((widths, end - begin))
    groups: list[list[int]] = []
    padded = width = cost = 0
    for i, size, row_width in zip(order.tolist(), (end - begin)[order].tolist(), widths[order].tolist(), strict=True):
        alone = call_cost + (ROW_COST + size) * row_width
        padded_together, width_together = max(padded, size), max(width, row_width)
        if groups:
            together = call_cost + (len(groups[-1]) + 1) * (ROW_COST + padded_together) * width_together
            if together <= cost + alone:
                groups[-1].append(i)
                padded, width, cost = padded_together, width_together, together
                continue
        groups.append([i])
        padded, width, cost = size, row_width, alone
    return [_group(metadata, sequence_of[members], begin[members], end[members]) for members in groups]


def _group(metadata: AttentionMetadata[np.ndarray], sequences: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Group:
    """Index and mask arrays of the new tokens [begin, end) of some sequences, int64[num_rows] all."""
    begin, end = begin[:, None], end[:, None]  # (num_rows, 1), like the next four arrays
    committed, chain = metadata.num_committed[sequences, None], metadata.num_chain[sequences, None]
    first_query, first_slot = metadata.cu_seqlens_q[sequences, None], metadata.cu_seqlens_k[sequences, None]
    columns = np.arange(-(-int((committed + end).max()) // WIDTH_STEP) * WIDTH_STEP)
    places = begin + np.arange(int((end - begin).max()))
    places = np.where(places < end, places, begin)  # (num_rows, num_padded), among the sequence's new tokens
    queries = (first_query + places).astype(np.int64)
    new = columns - committed  # (num_rows, width): which new token a column holds; below 0: a committed one
    # A chain token sees itself and the chain before it, a node the whole chain, and both see all committed tokens.
    sees = new[:, None, :] <= np.minimum(places, chain - 1)[:, :, None]
    num_nodes = end - chain
    if (num_nodes > 0).any():
        rows, bits = np.nonzero(np.arange(int(num_nodes.max())) < num_nodes)
        is_ancestor = (metadata.ancestors[queries[rows]] >> bits[:, None]) & 1  # (all nodes of the group, num_padded)
        sees[rows, :, (committed + chain)[rows, 0] + bits] = is_ancestor.astype(bool)
    slots = metadata.slots[first_slot + np.minimum(columns, committed + end - 1)].astype(np.int64)
    new_positions = metadata.positions[first_query + np.clip(new, 0, end - 1)]
    key_positions = np.where(new < 0, columns, new_positions)
    return Group(queries, slots, sees, metadata.positions[queries], key_positions)
