"""What the engine asks of a KV cache, and how much memory one may take.

Two hold to it: `kv_store.KVStore`, contiguous rows that attention views (a CPU), and `token_store.TokenStore`, single
tokens that attention gathers, whose memory follows the live tokens (CUDA).

Knows no model and no sequence.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from laserbatch.pipeline.decoding.memory.room import memory_of

MIN_SHARED_TOKENS = 8  # a shorter common prefix costs more to share than to compute
CACHE_SHARE = {"cuda": 0.8, "cpu": 0.5}  # of the memory that is free after loading; others want some of a machine's


@dataclass(frozen=True)
class RowLease:
    """A row given to a sequence, of whose text the first `num_shared` tokens are already cached."""

    row: int
    num_shared: int


class KVCache(Protocol):
    """Rows, each the cached text of one live sequence; what is written is kept only once it is committed.

    `max_tokens`: bound of the memory, or None; lowered when memory cannot be had. `lengths` int64[max_rows]: committed
    tokens of each row.
    """

    max_tokens: int | None
    lengths: np.ndarray

    @property
    def num_live_rows(self) -> int: ...

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` could be held at all, were it alone."""

    def acquire(self, token_ids: np.ndarray, num_tokens: int, num_expected: int) -> RowLease | None:
        """Give a row to a sequence of at most `num_tokens` tokens, probably `num_expected`; None while none is free.

        `num_shared` is less than the length of `token_ids`: the last one is always computed, for its logits.
        """

    def longest_prefix(self, token_ids: np.ndarray) -> int:
        """How many leading tokens `acquire` would find cached."""

    def make_room(self, num_tokens: int) -> bool:
        """Whether the next forward can write this many tokens; finished prompts go, and memory grows, as needed."""

    def reserve(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """So many slots of each row, one row's after another's: int64[sum of counts], for the next forward to write.

        They are free until committed.
        """

    def commit(self, rows: np.ndarray, counts: np.ndarray, slots: np.ndarray) -> None:
        """Keep what was written to so many `slots` of each row, in text order: it continues the row's sequence."""

    def remember_prefix(self, row: int, token_ids: np.ndarray) -> None:
        """State that a row's text begins with these tokens, so that others may share them."""

    def release(self, row: int) -> None:
        """End a sequence. The prefix that was remembered stays shareable while nothing else needs its place."""

    def forget_ended(self) -> None:
        """Share nothing any more of sequences that have ended."""

    def erase(self, row: int) -> None:
        """What was written to a live row and not committed may not be finite: nobody may read over it any more."""

    def drop_unused(self) -> None:
        """Give all memory back if no live row has a token in it: after a first forward that it was too much for."""

    def flat_index(self, rows: np.ndarray, slots: np.ndarray, num_kv_heads: int) -> np.ndarray:
        """Where `write` puts tokens, int64, for rows and slots int64[num_tokens]."""

    def write(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        """Store a layer's new keys and values, (num_kv_heads, num_tokens, head_dim); the layer's memory."""

    def bytes_per_token(self) -> int:
        """Memory of one token over all layers that were written so far."""


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that two int32 arrays share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def cache_bound(device: torch.device, bytes_per_token: int, num_sharing: int = 1) -> int:
    """Tokens that the cache may hold on a device, from the memory that is free now.

    Parameters
    ----------
    num_sharing : engines of one machine, which take equal parts of its memory. A GPU is never shared.
    """
    on_cuda = device.type == "cuda"
    free_bytes = memory_of(device).free_bytes // (1 if on_cuda else num_sharing)
    return max(1, int(free_bytes * CACHE_SHARE["cuda" if on_cuda else "cpu"]) // max(1, bytes_per_token))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, torch's of any device included."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
