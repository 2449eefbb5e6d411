"""What the attention function needs to know of one packed step: where keys lie, and which query sees which.

A step's sequences are cut into groups; each is one attention call, padded to its longest. `row_plan` and `token_plan`
build the groups for the two stores. Index and mask tensors are made once a step, on first use.

Knows shapes only: no model, no draft.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from laserbatch.pipeline.decoding.attention.single_attention import SingleTokens
from laserbatch.pipeline.decoding.device_copy import to_device
from laserbatch.pipeline.decoding.feed import Pack
from laserbatch.pipeline.decoding.memory.kv_cache import KVCache

WIDTH_STEP = 16  # attention widths are rounded up to this many slots: aligned, and fewer distinct shapes
# Cost of an attention call, and of a padded query, in the time that one (row, slot) takes with one query; measured on
# CPU with heads of 128. Groups of rows are cut where padding would cost more than a further call.
CALL_COST_CPU, CALL_COST_CUDA, ROW_COST = 1000, 100_000, 7


@dataclass
class AttentionGroup:
    """Sequences that share one attention call, padded to their longest.

    `queries` maps (row, padded node) to the token's index in the pack: int64[num_rows, num_padded], padding repeats
    the row's first token and its result is dropped. `sees` is bool[num_rows, num_padded, width]: committed slots, own
    ancestors and the node itself. `positions` are absolute: of queries int32[num_rows, num_padded], of slots
    int32[num_rows, width].
    """

    queries: np.ndarray
    sees: np.ndarray
    query_positions: np.ndarray
    slot_positions: np.ndarray

    @property
    def num_rows(self) -> int:
        return self.sees.shape[0]

    @property
    def num_padded(self) -> int:
        return self.sees.shape[1]

    @property
    def width(self) -> int:
        return self.sees.shape[2]

    def read(self, cache) -> tuple[torch.Tensor, torch.Tensor]:
        """The group's keys and values in one layer's cache, (num_rows, num_kv_heads, width, head_dim) each."""
        raise NotImplementedError


@dataclass
class StepPlan:
    """One forward of a pack.

    `build_groups` is called when groups are first asked for. `ragged` is the same step for a kernel that pads nothing
    (`token_plan.RaggedStep`), None over the row store. `build_single` gives the same step where every row adds one
    token over the row store; None elsewhere.
    """

    store: KVCache
    pack: Pack
    build_groups: Callable[[], list[AttentionGroup]]
    ragged: object | None = None
    build_single: Callable[[], SingleTokens] | None = None
    layers_seen: list[int] = field(default_factory=list)
    _indices: dict = field(default_factory=dict)
    _masks: dict = field(default_factory=dict)
    _gathers: dict = field(default_factory=dict)
    _scatters: dict = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.pack)

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        return self.build_groups()

    @cached_property
    def single_tokens(self) -> SingleTokens | None:
        return None if self.build_single is None else self.build_single()

    @cached_property
    def one_token_a_row(self) -> bool:
        """Whether the pack is one token a row, in the order of the groups' rows: plain decoding."""
        if any(group.num_padded > 1 for group in self.groups):
            return False
        order = np.concatenate([group.queries[:, 0] for group in self.groups])
        return bool((order == np.arange(self.num_tokens)).all())

    def write_index(self, num_kv_heads: int, device: torch.device) -> torch.Tensor:
        """The tokens' flat index in a layer of the store."""
        if num_kv_heads not in self._indices:
            rows = self.pack.rows[self.pack.feed_of]
            index = self.store.flat_index(rows, self.pack.slots, num_kv_heads)
            self._indices[num_kv_heads] = to_device(index, device)
        return self._indices[num_kv_heads]

    def mask(self, index: int, window: int | None, num_heads_folded: int, like: torch.Tensor) -> torch.Tensor:
        """Additive mask of a group: (num_rows, 1, num_heads_folded * num_padded, width), 0 where seen.

        With one query a row it is the same for all heads: (num_rows, 1, 1, width).
        """
        key = (index, window, num_heads_folded, like.dtype)
        if key not in self._masks:
            group = self.groups[index]
            sees = group.sees
            if window is not None:
                near = group.query_positions[:, :, None] - group.slot_positions[:, None, :] < window
                sees = sees & near
            # A finite minimum: where a whole block of slots is masked, minus infinity would make NaN of it.
            lowest = torch.finfo(like.dtype).min
            additive = np.where(sees, np.float32(0), np.float32(lowest))
            mask = to_device(additive, like.device).to(like.dtype)[:, None]
            if num_heads_folded > 1 and group.num_padded > 1:  # one query's mask broadcasts
                mask = mask.repeat(1, 1, num_heads_folded, 1)
            self._masks[key] = mask
        return self._masks[key]

    def gather(self, index: int, num_kv_heads: int, num_folded: int, device: torch.device) -> torch.Tensor:
        """Rows of the flat queries (num_heads * num_tokens) in the order (row, kv head, folded head, padded node)."""
        key = (index, num_kv_heads, num_folded)
        if key not in self._gathers:
            tokens = self.groups[index].queries[:, None, None, :]
            heads = np.arange(num_kv_heads * num_folded).reshape(1, num_kv_heads, num_folded, 1)
            self._gathers[key] = to_device((heads * self.num_tokens + tokens).reshape(-1), device)
        return self._gathers[key]

    def scatter(self, num_kv_heads: int, num_folded: int, device: torch.device) -> torch.Tensor:
        """For each (token, head) of the pack, its row in the groups' concatenated results, the inverse of `gather`."""
        key = (num_kv_heads, num_folded)
        if key not in self._scatters:
            num_heads = num_kv_heads * num_folded
            places = np.empty((self.num_tokens, num_heads), np.int64)
            start = 0
            for group in self.groups:
                size = group.num_rows * num_heads * group.num_padded
                order = np.arange(start, start + size).reshape(group.num_rows, num_heads, group.num_padded)
                # Padding repeats the first token: written in reverse, the true place of each token is written last.
                places[group.queries[:, ::-1].reshape(-1)] = order.transpose(0, 2, 1)[:, ::-1].reshape(-1, num_heads)
                start += size
            self._scatters[key] = to_device(places.reshape(-1), device)
        return self._scatters[key]


def cut_groups(sizes: list[int], widths: list[int], may_join: list[bool], setup_cost: int) -> list[list[int]]:
    """Sequences in order, cut into runs where a further attention call is cheaper than padding to the longest.

    Parameters
    ----------
    sizes, widths : each sequence's new tokens, and the slots that they look at.
    may_join : whether a sequence can be in one call with the one before it.
    setup_cost : of a call, in the time that one (row, slot) takes with one query.
    """
    groups: list[list[int]] = []
    padded = width = cost = 0
    for i, (size, own_width) in enumerate(zip(sizes, widths, strict=True)):
        alone = setup_cost + (ROW_COST + size) * own_width
        if groups and may_join[i]:
            padded_together, width_together = max(padded, size), max(width, own_width)
            together = setup_cost + (len(groups[-1]) + 1) * (ROW_COST + padded_together) * width_together
            if together <= cost + alone:
                groups[-1].append(i)
                padded, width, cost = padded_together, width_together, together
                continue
        groups.append([i])
        padded, width, cost = size, own_width, alone
    return groups
