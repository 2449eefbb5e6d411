"""Random packs: sequences of any committed length, with chains and trees, whose keys are scattered over a cache."""

from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata
from laserbatch.pipeline.decoding.batch import Batch
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch
from laserbatch.retrieval_pools.sources import SOURCE_TARGET


@dataclass(frozen=True)
class Pack:
    """Queries (N, num_heads, d), a cache's keys and values (num_kv_heads, num_slots, d), and the attention metadata."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    metadata: AttentionMetadata


def random_parents(rng, num_nodes: int) -> np.ndarray:
    return np.array([rng.integers(-1, i) if i else -1 for i in range(num_nodes)], np.int32)


def chain_tree(token_ids, source: int = SOURCE_TARGET) -> TokenTree:
    """One branch: each token follows the one before it, with log acceptance 0."""
    ids = np.asarray(token_ids, np.int32)
    n = len(ids)
    return TokenTree(ids, np.arange(-1, n - 1, dtype=np.int32), np.zeros(n, np.float32), np.full(n, source, np.uint8))


def random_tree(rng, num_nodes: int, vocab_size: int) -> TokenTree:
    tokens = rng.integers(0, vocab_size, num_nodes).astype(np.int32)
    zeros = np.zeros(num_nodes, np.float32)
    return TokenTree(tokens, random_parents(rng, num_nodes), zeros, zeros.astype(np.uint8))


def keep(cache, batch: Batch, paths: list[np.ndarray]) -> None:
    """Commit each feed's chain and a path of its tree."""
    nodes = np.concatenate([start + path for start, path in zip(batch.trees.starts, paths, strict=True)])
    is_committed = batch.committed_mask(np.arange(len(batch.feeds)), nodes)
    cache.commit(batch.rows, batch.num_chain + [len(path) for path in paths], batch.slot_mapping[is_committed])


def random_metadata(rng, lengths: list[tuple[int, int, int]], num_slots: int, device="cpu") -> AttentionMetadata:
    """Sequences of (committed, chain, tree) tokens. They may share committed slots, like prompts with one prefix."""
    slots, ancestors, positions = [], [], []
    for committed, chain, tree in lengths:
        slots.append(rng.choice(num_slots, committed + chain + tree, replace=False))
        trees = TreeBatch.of([random_tree(rng, tree, 2)])
        ancestors += [np.zeros(chain, np.int64), trees.ancestors]
        positions += [committed + np.arange(chain), committed + chain - 1 + trees.depths]
    committed, chain, tree = np.array(lengths).T

    def starts(sizes) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(sizes)))

    def tensor(array, dtype=np.int32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)

    return AttentionMetadata(
        slots=tensor(np.concatenate(slots)),
        cu_seqlens_k=tensor(starts(committed + chain + tree)),
        num_committed=tensor(committed),
        cu_seqlens_q=tensor(starts(chain + tree)),
        num_chain=tensor(chain),
        ancestors=tensor(np.concatenate(ancestors), np.int64),
        positions=tensor(np.concatenate(positions)),
    )


def random_pack(
    lengths: list[tuple[int, int, int]],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> Pack:
    """Random queries, keys and values with the strides of a model's: contiguous within a head, arbitrary otherwise."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    num_slots = max(sum(parts) for parts in lengths) + 7

    def random(*shape) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    num_tokens = sum(chain + tree for _, chain, tree in lengths)
    return Pack(
        random(num_heads, num_tokens, head_dim).transpose(0, 1),
        random(num_kv_heads, num_slots, head_dim),
        random(num_slots, num_kv_heads, value_dim or head_dim).transpose(0, 1),
        random_metadata(rng, lengths, num_slots, device),
    )
